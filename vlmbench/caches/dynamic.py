"""transformers' DynamicCache: grows by concatenation, the default of generate().

Its shapes change with every token, so a compiled decode step recompiles until Dynamo has made the
length symbolic, and generate() never compiles it.
"""

from __future__ import annotations

from typing import Any

from vlmbench import compat
from vlmbench.caches import CacheKind
from vlmbench.schema import Case


class Dynamic(CacheKind):
    """DynamicCache, told the model's layer types."""

    class_name = "DynamicCache"
    static_shape = False
    compiles_in_generate = False

    def new(self, model: Any, case: Case, length: int) -> Any:
        """An empty DynamicCache; `length` is no limit for it."""
        return compat.dynamic_cache(model.config)

    def generate_arguments(self, model: Any, case: Case, arguments: compat.Arguments) -> dict[str, Any]:
        """Nothing: generate() makes one by itself."""
        return {}


KIND = Dynamic()
