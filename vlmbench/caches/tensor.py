"""A cache that is a torch.Tensor: wrapper subclass over one keys and one values tensor a layer.

The question of transformers #35792: can a cache travel through compile and export as a plain tensor
argument and keep its speed? Each layer's storage is an inner tensor of its own, written by a direct
`index_copy_`: stacked storage written through `select` leaves copies of whole layers in the
generated code, which costs 1.65x at length 8192.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import Cache

from vlmbench.caches import CacheKind
from vlmbench.errors import Unsupported
from vlmbench.schema import Case

_aten = torch.ops.aten


class TensorCache(torch.Tensor, Cache):
    """Keys and values of all layers as one tensor of shape [L, 2, B, H, S, D].

    Inner tensors: `key_<i>` and `value_<i>` [B, H, S, D] and `length` (int64, no dimensions), the
    number of positions filled. Being a `Cache` as well makes generate() build the 4D mask and
    compile; being a Tensor makes it an ordinary graph input whose inner tensors are mutated.
    """

    is_compileable = True

    @staticmethod
    def __new__(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], length: torch.Tensor) -> TensorCache:
        first = keys[0]
        shape = (len(keys), 2, *first.shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], length: torch.Tensor) -> None:
        # Cache.__init__ would make a list of layer objects, which is what this class does without.
        self.count = len(keys)
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            setattr(self, f"key_{i}", key)
            setattr(self, f"value_{i}", value)
        self.length = length

    @classmethod
    def empty(
        cls,
        layers: int,
        batch: int,
        heads: int,
        length: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> TensorCache:
        """A cache for `layers` attention layers of `heads` key-value heads of `width`, `length` positions each."""

        def storage() -> list[torch.Tensor]:
            return [torch.zeros(batch, heads, length, width, dtype=dtype, device=device) for _ in range(layers)]

        return cls(storage(), storage(), torch.zeros((), dtype=torch.int64, device=device))

    # --- what torch asks of a wrapper subclass ---

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        names = [f"{what}_{i}" for what in ("key", "value") for i in range(self.count)]
        return [*names, "length"], self.count

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], count: int, size: Any, stride: Any) -> TensorCache:
        keys = [inner[f"key_{i}"] for i in range(count)]
        return cls(keys, [inner[f"value_{i}"] for i in range(count)], inner["length"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cache = args[0]
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default) and isinstance(cache, cls):
            return cls(*cache._map(lambda inner: func(inner)))
        if func is _aten.copy_.default and isinstance(cache, cls) and isinstance(args[1], cls):
            for name in cache.__tensor_flatten__()[0]:
                getattr(cache, name).copy_(getattr(args[1], name))
            return cache
        raise Unsupported(f"a TensorCache cannot be given to {func}: use its methods, or its inner tensors")

    def _map(self, function: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        keys = [function(getattr(self, f"key_{i}")) for i in range(self.count)]
        return keys, [function(getattr(self, f"value_{i}")) for i in range(self.count)], function(self.length)

    def _stable_hash_for_caching(self) -> str:
        # Without it AOTAutograd's cache pickles the subclass to find out whether two are alike.
        return f"{type(self).__name__}:{self.count}:{tuple(self.shape)}:{self.dtype}:{self.device}"

    def __repr__(self, **kwargs: Any) -> str:
        layers, _, batch, heads, length, width = self.shape
        return (
            f"TensorCache({layers} layers, batch {batch}, {heads} heads of {width}, {length} positions, "
            f"{self.dtype}, {self.device})"
        )

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorCache:
        # The default would copy the inner tensors twice, once with the wrapper's attributes.
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    # --- what transformers asks of a Cache ---

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write [B, H, T, D] keys and values behind what is there; the layer's whole storages come back."""
        keys, values = getattr(self, f"key_{layer_idx}"), getattr(self, f"value_{layer_idx}")
        steps = key.shape[-2]
        where = torch.arange(steps, device=key.device) + self.length
        keys.index_copy_(2, where, key)
        values.index_copy_(2, where, value)
        if layer_idx == self.count - 1:
            # In place, so that a replayed graph advances too; all layers of one forward start alike.
            self.length.add_(steps)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """Positions filled, as a tensor without dimensions: an int would be burnt into a graph."""
        return self.length.clone()

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """Position of the next query."""
        return self.length.clone()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that attention sees: the whole storage from its start."""
        return self.shape[-2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Positions there is room for (the name up to 5.19 is get_max_cache_shape)."""
        return self.shape[-2]

    get_max_cache_shape = get_max_length

    @property
    def max_cache_len(self) -> int:
        """Positions there is room for."""
        return self.shape[-2]

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.shape[2]

    @property
    def is_initialized(self) -> bool:
        """Always: storage is made with the cache."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer slides."""
        return [False] * self.count

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear-attention one."""
        return [False] * self.count

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is a stand-in."""
        return [False] * self.count

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """Views of the layers for code that reads `.layers[i].keys`; changing the list changes nothing."""
        return [
            SimpleNamespace(keys=getattr(self, f"key_{i}"), values=getattr(self, f"value_{i}"), is_initialized=True)
            for i in range(self.count)
        ]

    def reset(self) -> None:
        """Empty the cache in place; what was stored is overwritten before it can be seen."""
        self.length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (negative, as transformers counts from 5.x on)."""
        if tokens_to_remove > 0:
            raise Unsupported(f"crop({tokens_to_remove}): give the positions to remove as a negative number")
        self.length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue row `beam_idx[i]`, in place."""
        for name in self.__tensor_flatten__()[0][:-1]:
            inner = getattr(self, name)
            inner.copy_(inner.index_select(0, beam_idx.to(inner.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not possible in place: the shape is fixed. Raises Unsupported."""
        raise Unsupported("a TensorCache has a fixed batch: make one of the larger batch before the prefill")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not possible in place: the shape is fixed. Raises Unsupported."""
        raise Unsupported("a TensorCache has a fixed batch: rows cannot be dropped from it")

    def activate_past_recording(self) -> None:
        """Nothing to do: every position stays until it is overwritten."""

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: storage is made with the cache."""


class Tensor(CacheKind):
    """TensorCache of the case's length."""

    class_name = "TensorCache"

    def unsupported(self, case: Case, config: Any) -> str | None:
        """Models whose layers are not all full attention."""
        kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            return f"TensorCache holds full-attention layers only, the model has {', '.join(sorted(kinds))}"
        return None

    def new(self, model: Any, case: Case, length: int) -> TensorCache:
        """An empty TensorCache of `length` positions."""
        text = model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return TensorCache.empty(text.num_hidden_layers, case.batch, heads, length, width, model.dtype, model.device)

    def rewind(self, cache: TensorCache, length: int) -> None:
        """Set the length; positions behind it are masked until they are overwritten."""
        cache.length.fill_(length)

    def tensors(self, cache: TensorCache) -> list[torch.Tensor]:
        """The inner tensors."""
        return [getattr(cache, name) for name in cache.__tensor_flatten__()[0]]


KIND = Tensor()
