"""Wrong on purpose: ends the process at the first decode step, as a native crash would."""

import os
import signal

from transformers import DynamicCache

from vlmbench.caches import CacheKind


class Deadly(DynamicCache):
    def update(self, key, value, layer_idx, *args, **kwargs):
        if key.shape[-2] == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().update(key, value, layer_idx, *args, **kwargs)


class Kind(CacheKind):
    class_name = "Deadly"
    static_shape = False
    compiles_in_generate = False

    def new(self, model, case, length):
        return Deadly(config=model.config)


KIND = Kind()
