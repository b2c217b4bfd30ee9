"""Models with random weights, built fast and the same everywhere.

The weights of a tensor depend on its name and shape alone, not on a release's own initialisation, so
that base and head of a comparison compute with identical numbers. Filling copies from one block of
normal numbers, which costs memory bandwidth instead of a random draw for each weight.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from typing import Any

import torch

from vlmbench import compat

#: Length of a copy and range of its start offset: two rows agree only if their offsets do.
_CHUNK = 1 << 20
#: Largest number of bytes of one tensor that the fingerprint reads in full; of larger ones a stride.
_HASHED = 1 << 22


def build(cls: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    """A model of class `cls` in evaluation mode with filled weights.

    Raises Unsupported where the attention implementation or the class cannot be had.
    """
    with compat.no_init():
        model = compat.from_config(cls, config, dtype, attention)
    model.tie_weights()
    fill(model)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Overwrite every parameter: norms with ones, matrices with N(0, 1/fan_in), other vectors small.

    1/fan_in keeps activations of order one through any depth, so that logits differ clearly and the
    picture reaches them.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(2 * _CHUNK, generator=generator)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and name.endswith("weight"):
            parameter.fill_(1)
            continue
        fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 2500
        scaled = (block / math.sqrt(fan_in)).to(parameter.dtype)
        flat = parameter.view(-1)
        # A generator of its own for each tensor: a release that adds one changes no other.
        own = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        starts = torch.randint(_CHUNK, (-(-flat.numel() // _CHUNK),), generator=own).tolist()
        for i, start in enumerate(starts):
            piece = flat[i * _CHUNK : (i + 1) * _CHUNK]
            piece.copy_(scaled[start : start + piece.numel()])


def count(model: torch.nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """Hash of all weights (of tensors above 4 MiB: of evenly spaced parts), 16 hex digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() * flat.element_size() // _HASHED)
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(flat[::stride].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
