"""Wrong on purpose: asks for a petabyte."""

import torch

from vlmbench.caches import CacheKind


class Kind(CacheKind):
    class_name = "StaticCache"

    def new(self, model, case, length):
        return torch.empty(1 << 50, dtype=torch.uint8)


KIND = Kind()
