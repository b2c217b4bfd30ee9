"""Cache kinds: one file each, named as on the command line.

A kind file has a `KIND` object of a subclass of `CacheKind`, and may hold the literal `SUITE` (when
it runs: "default", the default, "nightly" or "name"). Adding a file runs it through every family,
phase and check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vlmbench import compat
from vlmbench.schema import Case


@dataclass(frozen=True)
class Expected:
    """What a phase must turn out to be: compiled or not, in how many graphs (None: any number)."""

    compiled: bool
    graphs: int | None = None


class CacheKind:
    """What differs between caches. Attributes are declarations, made before anything runs.

    `class_name` is the class that must be seen in use. `static_shape` says that every decode step
    has the same shapes, so that one graph serves all. `compiles_in_generate` says that generate()
    compiles with it by itself where compiling is on. `exports_as` says how an exported decode step
    gets the cache: "buffers" (the tensors of `state` are buffers of the exporting module, and `restore`
    makes the cache of them inside its forward), "module" (the cache is a submodule of it),
    "functional" (the cache is an input and an output), or "" (it cannot be exported: `unsupported`
    says why).
    """

    class_name: str
    static_shape = True
    compiles_in_generate = True
    exports_as: Literal["buffers", "module", "functional", ""] = "buffers"

    def unsupported(self, case: Case, config: Any) -> str | None:
        """Why this kind cannot serve `case`, known before anything runs; None if it can."""
        return None

    def new(self, model: Any, case: Case, length: int) -> Any:
        """A fresh, empty cache of `length` positions on the model's device and in its dtype."""
        raise NotImplementedError(type(self).__name__)

    def generate_arguments(self, model: Any, case: Case, arguments: compat.Arguments) -> dict[str, Any]:
        """What a user hands to generate() to get this kind, a fresh one each call."""
        return {arguments.cache: self.new(model, case, case.cache_length)}

    # --- going back, copying ---

    def rewind(self, cache: Any, length: int) -> None:
        """Set the cache back to its first `length` positions in place.

        Raises Unsupported where layers have forgotten them (a sliding window).
        """
        compat.rewind(cache, length)

    def empty(self, cache: Any) -> None:
        """Set the cache back to no position at all, in place."""
        self.rewind(cache, 0)

    def mark(self, cache: Any, length: int) -> Callable[[], None]:
        """A function that sets `cache`, now `length` positions long, back to this very state, in place."""
        return lambda: self.rewind(cache, length)

    def deepcopy(self, cache: Any) -> Any:
        """An independent copy, as copy.deepcopy makes it."""
        return copy.deepcopy(cache)

    def clone(self, cache: Any) -> Any:
        """An independent copy of the whole state, each tensor cloned once."""
        return self.restore(cache, {name: tensor.clone() for name, tensor in self.state(cache).items()})

    # --- contents ---

    def state(self, cache: Any) -> dict[str, torch.Tensor]:
        """Every tensor of the cache's contents and state by name (an identifier), as it lies there."""
        return compat.state_of(cache)

    def restore(self, cache: Any, tensors: dict[str, torch.Tensor]) -> Any:
        """A cache like `cache` that holds these very tensors, named as `state` names them; no copies."""
        return compat.with_state(cache, tensors)

    def tensors(self, cache: Any) -> list[torch.Tensor]:
        """Every tensor that holds the cache's contents or state."""
        return list(self.state(cache).values())

    def nbytes(self, cache: Any) -> int:
        """Bytes of the storages the cache keeps alive, shared ones once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors(cache)}
        return sum(storages.values())

    def expected(self, compiles: bool, phase: str) -> Expected:
        """What `phase` must be under a runner that compiles or not."""
        if not compiles or (phase == "generate" and not self.compiles_in_generate):
            return Expected(compiled=False, graphs=0)
        return Expected(compiled=True, graphs=1 if self.static_shape else None)


def __getattr__(name: str) -> Any:
    # `from vlmbench.caches import TensorCache` without making every import of the package load it.
    if name == "TensorCache":
        from vlmbench.caches.tensor import TensorCache

        return TensorCache
    raise AttributeError(f"module 'vlmbench.caches' has no attribute '{name}'")
