"""Cache kinds: one file each, named as on the command line.

A kind file has a `KIND` object of a subclass of `CacheKind`. Adding a file runs it through every
family, phase and check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    compiles with it by itself where compiling is on.
    """

    class_name: str
    static_shape = True
    compiles_in_generate = True

    def unsupported(self, case: Case, config: Any) -> str | None:
        """Why this kind cannot serve `case`, known before anything runs; None if it can."""
        return None

    def new(self, model: Any, case: Case, length: int) -> Any:
        """A fresh, empty cache of `length` positions on the model's device and in its dtype."""
        raise NotImplementedError(type(self).__name__)

    def generate_arguments(self, model: Any, case: Case, arguments: compat.Arguments) -> dict[str, Any]:
        """What a user hands to generate() to get this kind, a fresh one each call."""
        return {arguments.cache: self.new(model, case, case.cache_length)}

    def rewind(self, cache: Any, length: int) -> None:
        """Set the cache back to its first `length` positions in place."""
        compat.rewind(cache, length)

    def tensors(self, cache: Any) -> list[torch.Tensor]:
        """Every tensor that holds the cache's contents or state."""
        return compat.tensors_of(cache)

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
