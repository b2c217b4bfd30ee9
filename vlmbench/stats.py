"""Pure functions over samples: medians with spread. No I/O, no records.

A process's samples are one value to any test between runs: processes differ by 8 to 14 % on a
shared machine while samples within one agree, so only values of fresh processes are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def median(values: Sequence[float]) -> float:
    """Median of the finite values; NaN when there is none."""
    finite = [v for v in values if math.isfinite(v)]
    return float(np.median(finite)) if finite else math.nan


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile `q` in [0, 1] of the values; NaN when there is none."""
    return float(np.quantile(np.asarray(values, dtype=float), q)) if len(values) else math.nan


def spread(values: Sequence[float]) -> float:
    """Half the range over the median: what "±" means in the project's tables. NaN below two values."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2 or median(finite) == 0:
        return math.nan
    return (max(finite) - min(finite)) / 2 / abs(median(finite))


def block_median(steps: Sequence[float], blocks: int) -> float:
    """Median over `blocks` equal consecutive blocks of each block's mean step; NaN for no steps.

    A mean hides no cost that falls on single steps, the median drops a block that a neighbour hit.
    """
    if not len(steps):
        return math.nan
    parts = np.array_split(np.asarray(steps, dtype=float), max(1, min(blocks, len(steps))))
    return float(np.median([part.mean() for part in parts]))
