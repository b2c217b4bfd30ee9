"""transformers' StaticCache: all positions allocated at once, written in place by index_copy_.

Made for torch.compile: every decode step has the same shapes, and attention reads the whole length.
"""

from __future__ import annotations

from typing import Any

from vlmbench import compat
from vlmbench.caches import CacheKind
from vlmbench.schema import Case


class Static(CacheKind):
    """StaticCache of the case's length."""

    class_name = "StaticCache"

    def new(self, model: Any, case: Case, length: int) -> Any:
        """An empty StaticCache of `length` positions."""
        return compat.static_cache(model.config, case.batch, length, case.device, model.dtype)


KIND = Static()
