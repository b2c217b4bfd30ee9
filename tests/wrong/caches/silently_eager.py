"""Wrong on purpose: declared as compiled by generate(), which it tells not to compile."""

from transformers import StaticCache

from vlmbench.caches import CacheKind


class Kind(CacheKind):
    class_name = "StaticCache"

    def new(self, model, case, length):
        return StaticCache(config=model.config, max_cache_len=length)

    def generate_arguments(self, model, case, arguments):
        return {**super().generate_arguments(model, case, arguments), "disable_compile": True}


KIND = Kind()
