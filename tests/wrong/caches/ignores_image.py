"""Wrong on purpose: wipes the picture out of llava-tiny's prompt (16 positions behind 16 of text)."""

from transformers import DynamicCache

from vlmbench.caches import CacheKind


class Blind(DynamicCache):
    def update(self, key, value, layer_idx, *args, **kwargs):
        if key.shape[-2] > 32:
            key, value = key.clone(), value.clone()
            key[:, :, 16:32] = 0
            value[:, :, 16:32] = 0
        return super().update(key, value, layer_idx, *args, **kwargs)


class Kind(CacheKind):
    class_name = "Blind"
    static_shape = False
    compiles_in_generate = False

    def new(self, model, case, length):
        return Blind(config=model.config)


KIND = Kind()
