"""Wrong on purpose: declared as compiled by generate(), but says of itself that it cannot be."""

from transformers import StaticCache

from vlmbench.caches import CacheKind


class Shy(StaticCache):
    @property
    def is_compileable(self):
        return False


class Kind(CacheKind):
    class_name = "Shy"

    def new(self, model, case, length):
        return Shy(config=model.config, max_cache_len=length)


KIND = Kind()
