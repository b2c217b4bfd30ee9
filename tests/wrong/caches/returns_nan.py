"""Wrong on purpose: NaN among the values from the tenth decode step on."""

from transformers import DynamicCache

from vlmbench.caches import CacheKind


class Poisoned(DynamicCache):
    def update(self, key, value, layer_idx, *args, **kwargs):
        keys, values = super().update(key, value, layer_idx, *args, **kwargs)
        if keys.shape[-2] >= 58:
            values[:, :, 0, 0] = float("nan")
        return keys, values


class Kind(CacheKind):
    class_name = "Poisoned"
    static_shape = False
    compiles_in_generate = False

    def new(self, model, case, length):
        return Poisoned(config=model.config)


KIND = Kind()
