"""Accelerators by name → peak rates from their data sheets; None where nobody has looked them up.

Rates are dense (no sparsity). Sources: NVIDIA data sheets "A10" (2021), "A100" (2021, SXM and PCIe),
"H100" (2023, SXM), "H200" (2024, SXM), "L4" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Memory bandwidth in bytes/s and dense bf16 matrix rate in FLOP/s."""

    bytes_per_second: float
    bf16_flops: float


#: Keys are matched as whole words of the NVML name, longest first.
PEAKS: dict[str, Peak] = {
    "A10": Peak(600e9, 125e12),
    "A100-PCIE-40GB": Peak(1555e9, 312e12),
    "A100-SXM4-40GB": Peak(1555e9, 312e12),
    "A100 80GB PCIe": Peak(1935e9, 312e12),
    "A100-SXM4-80GB": Peak(2039e9, 312e12),
    "H100 80GB HBM3": Peak(3350e9, 989e12),
    "H200": Peak(4800e9, 989e12),
    "L4": Peak(300e9, 121e12),
}


def peak(name: str) -> Peak | None:
    """Peak rates of the accelerator whose NVML name contains a known one; None if unknown."""
    words = f" {name} "
    for key in sorted(PEAKS, key=len, reverse=True):
        if f" {key} " in words:
            return PEAKS[key]
    return None
