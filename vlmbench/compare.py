"""Two sets of values of one series → a verdict, from one interval and one floor.

The values of a timing are one per fresh process: values within a process agree while processes
differ by 8 to 14 %, so only fresh processes are independent. Whether a change is there and whether
anyone would act on it are two questions; one interval of the ratio head / base answers both:

- regression: the whole interval lies above 1 + floor (a minimum-effect test, Murphy & Myors 1999);
- improvement: it lies below 1 / (1 + floor);
- same: it lies inside the two (an equivalence test, Schuirmann 1987);
- unknown: anything else, with what stayed possible. Absence of evidence is never "same".

The interval is Hodges and Lehmann's for a shift, here of the logarithms: order statistics of all
head - base differences, cut where the exact null distribution of Mann and Whitney's U (1947) says
(Hollander & Wolfe, Nonparametric Statistical Methods, 4.3). It needs no normality, one wild process
cannot move it far, and ties only make it wider. It covers the true ratio with at least 1 - ALPHA.
With 5 against 5 values the smallest two-sided p is 2/252 = 0.8 %, with 4 against 4 it is 2.9 %:
below MIN_VALUES a side nothing can be decided, however large the change looks.

What the interval cannot see: two sides measured hours apart also differ by what the machine did in
between. Only pairs measured together cancel that. And of 100 unchanged series, ALPHA lets about one
look changed; a caller that needs a bound over all of them passes a smaller `alpha`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from vlmbench.errors import UsageError
from vlmbench.metrics import Metric
from vlmbench.stats import median

State = Literal["regression", "improvement", "same", "unknown", "broken"]

#: Chance that an unchanged series is called changed, per series.
ALPHA = 0.01
#: Fewest values a side: the smallest n with 2 / C(2n, n) <= ALPHA.
MIN_VALUES = 5
#: Most values a side: more are samples within a process, which are not independent.
MAX_VALUES = 100


@dataclass(frozen=True)
class Verdict:
    """What two sets of values say: a state, head / base with its interval, and why it is unknown.

    `ratio`, `low` and `high` are NaN where none can be given; `ratio` is infinite from zero.
    """

    state: State
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""


def verdict(base: Sequence[float], head: Sequence[float], metric: Metric, *, alpha: float = ALPHA) -> Verdict:
    """Compare the values of one series; all metrics are lower-is-better.

    Values are in the metric's unit, one per fresh process for anything but exact counters. Raises
    UsageError for an `alpha` outside (0, 1) and for more than MAX_VALUES values a side.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha is {alpha}: it must lie between 0 and 1, {ALPHA} by default")
    if max(len(base), len(head)) > MAX_VALUES:
        raise UsageError(
            f"{len(base)} against {len(head)} values of {metric.name}: at most {MAX_VALUES} a side; "
            "give one per fresh process"
        )
    for side, values in (("base", base), ("head", head)):
        if not values:
            return Verdict("unknown", reason=f"no value on {side}")
        wrong = [v for v in values if not math.isfinite(v) or (metric.trust != "exact" and v <= 0)]
        if wrong:
            return Verdict("broken", reason=f"{side} holds {wrong[0]}, which is no measurement")
    return _exact(base, head) if metric.trust == "exact" else _noisy(base, head, metric.floor, alpha)


def _exact(base: Sequence[float], head: Sequence[float]) -> Verdict:
    ratio = _ratio(median(base), median(head))
    if min(head) > max(base):
        return Verdict("regression", ratio)
    if max(head) < min(base):
        return Verdict("improvement", ratio)
    if min(base) == max(base) == min(head) == max(head):
        return Verdict("same", 1.0)
    # A counter that varies has lost its trust: say so rather than average it.
    return Verdict("unknown", ratio, reason="an exact counter varies between processes of one side")


def _noisy(base: Sequence[float], head: Sequence[float], floor: float, alpha: float) -> Verdict:
    ratio = _ratio(median(base), median(head))
    n, m = len(base), len(head)
    cut = _cut(min(n, m), max(n, m), alpha)
    if min(n, m) < MIN_VALUES or cut == 0:
        need = max(MIN_VALUES, next(k for k in range(2, 2000) if alpha * math.comb(2 * k, k) >= 2))
        return Verdict("unknown", ratio, reason=f"{n} against {m} values: at least {need} a side are needed")
    differences = np.sort(np.subtract.outer(np.log(head), np.log(base)), axis=None)
    ratio = math.exp(float(np.median(differences)))
    low, high = math.exp(float(differences[cut - 1])), math.exp(float(differences[n * m - cut]))
    state: State = "unknown"
    if low > 1 + floor:
        state = "regression"
    elif high < 1 / (1 + floor):
        state = "improvement"
    elif 1 / (1 + floor) <= low and high <= 1 + floor:
        state = "same"
    reason = f"anything from {percent(low)} to {percent(high)} is possible" if state == "unknown" else ""
    return Verdict(state, ratio, low, high, reason)


@lru_cache(maxsize=256)
def _cut(n: int, m: int, alpha: float) -> int:
    """Largest k with 2 P(U < k) <= alpha, exactly, for n against m values; 0 if even U = 0 is too likely."""
    allowed, total, below = alpha / 2, math.comb(n + m, n), 0
    for k, count in enumerate(_u_counts(n, m)):
        below += count
        if below > allowed * total:
            return k
    return n * m


def _u_counts(n: int, m: int) -> list[int]:
    """How many of the C(n + m, n) orders give U = 0, 1, ..., n m.

    The coefficients of the Gaussian binomial, product over i of (1 - q^(m+i)) / (1 - q^i), in whole
    numbers, since C(2n, n) passes 64 bits at n = 34.
    """
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return counts


def _ratio(base: float, head: float) -> float:
    if base == head:
        return 1.0
    if base > 0 and head >= 0:
        return head / base
    return math.inf if base == 0 and head > 0 else math.nan


_DIRECTION = {"seconds": ("slower", "faster"), "bytes": ("larger", "smaller"), "count": ("more", "fewer")}


def in_words(ratio: float, unit: str) -> str:
    """A ratio head / base for people: "1.12x slower", "0.3 % faster", "equal"; "" where there is none."""
    worse, better = _DIRECTION.get(unit, ("larger", "smaller"))
    if math.isnan(ratio):
        return ""
    if ratio == 1:
        return "equal"
    if ratio in (0, math.inf):
        return "gone" if ratio == 0 else "new"
    factor, word = (ratio, worse) if ratio > 1 else (1 / ratio, better)
    if factor < 1.01:
        return f"{(factor - 1) * 100:.1g} % {word}"
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}x {word}"


def percent(ratio: float) -> str:
    """A ratio as a signed change: "+12 %", "-0.3 %"."""
    change = (ratio - 1) * 100
    return f"{change:+.{0 if abs(change) >= 10 else 1}f} %"
