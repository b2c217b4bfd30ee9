"""Wrong on purpose: wipes the values of every fifth token it is given."""

from transformers import DynamicCache

from vlmbench.caches import CacheKind


class Dropping(DynamicCache):
    def update(self, key, value, layer_idx, *args, **kwargs):
        keys, values = super().update(key, value, layer_idx, *args, **kwargs)
        if key.shape[-2] == 1 and keys.shape[-2] % 5 == 0:
            values[:, :, -1] = 0
        return keys, values


class Kind(CacheKind):
    class_name = "Dropping"
    static_shape = False
    compiles_in_generate = False

    def new(self, model, case, length):
        return Dropping(config=model.config)


KIND = Kind()
