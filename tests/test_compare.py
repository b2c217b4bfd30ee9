"""Verdicts: the exact distribution, the rules, and seeded simulations of false alarms and power."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from vlmbench.compare import ALPHA, MAX_VALUES, MIN_VALUES, _cut, _u_counts, in_words, percent, verdict
from vlmbench.errors import UsageError
from vlmbench.metrics import BY_KEY, TIMING_FLOOR

DECODE = BY_KEY["decode_seconds_per_token"]
GRAPHS = BY_KEY["graphs.decode"]
RETAINED = BY_KEY["retained_bytes"]
STEADY = [1.0, 1.0001, 1.0002, 0.9999, 0.9998]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 3), (5, 5)])
def test_u_counts_equal_all_orders_counted_one_by_one(n: int, m: int) -> None:
    counted = Counter(sum(first) - n * (n - 1) // 2 for first in combinations(range(n + m), n))
    assert _u_counts(n, m) == [counted[u] for u in range(n * m + 1)]
    assert sum(_u_counts(n, m)) == math.comb(n + m, n)


@pytest.mark.parametrize(("n", "m"), [(5, 5), (5, 9), (8, 8), (12, 8)])
def test_cut_agrees_with_scipys_exact_test(n: int, m: int) -> None:
    k = _cut(min(n, m), max(n, m), ALPHA)

    def p(u: int) -> float:
        """Two-sided p of two sets without ties whose statistic is `u`."""
        head = [float(i) for i in range(n)]
        base = [n + float(j) for j in range(m)]
        full, rest = divmod(u, m)
        head = [*head[: n - full], *(n + m + float(i) for i in range(full))]
        if rest:
            head[n - full - 1] = base[rest - 1] + 0.5
        found = stats.mannwhitneyu(head, base, method="exact")
        assert found.statistic == u
        return float(found.pvalue)

    assert p(k - 1) <= ALPHA < p(k)


def test_fewest_values_follow_from_alpha() -> None:
    assert 2 / math.comb(2 * MIN_VALUES, MIN_VALUES) <= ALPHA < 2 / math.comb(2 * MIN_VALUES - 2, MIN_VALUES - 1)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 4), (4, 40), (40, 4)])
def test_few_values_are_never_decided(n: int, m: int) -> None:
    for factor in (1.0, 1.001, 10.0):
        found = verdict([1.0] * n, [factor] * m, DECODE)
        assert found.state == "unknown"
        assert f"{n} against {m} values: at least 5" in found.reason
        assert found.ratio == pytest.approx(factor)
        assert math.isnan(found.low)


def test_separated_values_are_decided_in_the_right_direction() -> None:
    slower = [1.2 * v for v in STEADY]
    found = verdict(STEADY, slower, DECODE)
    assert found.state == "regression"
    assert found.ratio == pytest.approx(1.2, rel=1e-3)
    assert 1 + TIMING_FLOOR < found.low <= found.ratio <= found.high
    assert verdict(slower, STEADY, DECODE).state == "improvement"


def test_a_sure_change_below_the_floor_is_the_same() -> None:
    assert verdict(STEADY, [1.002 * v for v in STEADY], DECODE).state == "same"
    assert verdict(STEADY, STEADY, DECODE).state == "same"


def test_both_directions_have_the_same_floor() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        base, head = np.exp(rng.normal(0, 0.004, (2, 6))) * [[1.0], [1.006]]
        there, back = verdict(list(base), list(head), DECODE), verdict(list(head), list(base), DECODE)
        assert there.ratio == pytest.approx(1 / back.ratio)
        assert {there.state, back.state} in ({"regression", "improvement"}, {"same"}, {"unknown"})


def test_unknown_says_what_stays_possible() -> None:
    rng = np.random.default_rng(2)
    found = verdict(list(np.exp(rng.normal(0, 0.1, 8))), list(np.exp(rng.normal(0, 0.1, 8))), DECODE)
    assert found.state == "unknown"
    assert percent(found.low) in found.reason
    assert percent(found.high) in found.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_timing_that_is_none_is_broken(bad: float) -> None:
    assert verdict(STEADY, [*STEADY, bad], DECODE).state == "broken"


def test_nothing_measured_is_unknown() -> None:
    assert verdict([], STEADY, DECODE).reason == "no value on base"
    assert verdict(STEADY, [], DECODE).reason == "no value on head"


@pytest.mark.parametrize(
    ("base", "head", "state", "ratio"),
    [
        ([4], [4], "same", 1.0),
        ([1_000_000], [1_000_001], "regression", 1.000001),
        ([4], [3], "improvement", 0.75),
        ([0], [0], "same", 1.0),
        ([0], [3], "regression", math.inf),
        ([3], [0], "improvement", 0.0),
        ([3, 3, 3], [4, 4, 4], "regression", 4 / 3),
        ([3, 4], [5, 6], "regression", 5.5 / 3.5),
        ([3, 4], [3, 4], "unknown", 1.0),
        ([3, 3], [3, 4], "unknown", 3.5 / 3),
    ],
)
def test_exact_counters(base: list[float], head: list[float], state: str, ratio: float) -> None:
    found = verdict(base, head, GRAPHS)
    assert (found.state, found.ratio) == (state, pytest.approx(ratio))


def test_exact_bytes_may_be_negative() -> None:
    found = verdict([-512], [0], RETAINED)
    assert found.state == "regression"
    assert math.isnan(found.ratio)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(UsageError, match="alpha is 2"):
        verdict(STEADY, STEADY, DECODE, alpha=2)
    with pytest.raises(UsageError, match="one per fresh process"):
        verdict([1.0] * (MAX_VALUES + 1), STEADY, DECODE)


def test_a_smaller_alpha_needs_more_values() -> None:
    far = [2 * v for v in STEADY]
    assert verdict(STEADY, far, DECODE).state == "regression"
    assert "at least 7 a side" in verdict(STEADY, far, DECODE, alpha=0.001).reason


def decided(seed: int, n: int, factor: float, noise: tuple[float, float], trials: int, wild: float = 0.0) -> Counter:
    """States over many pairs of sets; `noise` is each side's spread between processes, `wild` the chance
    that a process takes twice as long."""
    rng = np.random.default_rng(seed)
    states: Counter = Counter()
    for _ in range(trials):
        base, head = (np.exp(rng.normal(0, s, n)) * (1 + (rng.random(n) < wild)) for s in noise)
        states[verdict(list(base), list(factor * head), DECODE).state] += 1
    return states


@pytest.mark.parametrize(
    ("n", "noise", "wild"),
    [(3, (0.1, 0.1), 0), (5, (0.1, 0.1), 0), (8, (0.1, 0.1), 0), (8, (0.1, 0.1), 0.1), (20, (0.1, 0.1), 0)],
)
def test_false_alarms_under_process_spread(n: int, noise: tuple[float, float], wild: float) -> None:
    trials = 2000
    states = decided(n, n, 1.0, noise, trials, wild)
    # ALPHA and three standard errors of the simulation.
    assert trials - states["unknown"] <= trials * ALPHA + 3 * math.sqrt(trials * ALPHA)
    assert states["same"] == 0


def test_false_alarms_when_only_one_side_is_noisy() -> None:
    # Unequal spread breaks the assumption of a pure shift; the rate rises, but stays small.
    assert decided(7, 8, 1.0, (0.05, 0.15), 2000)["unknown"] >= 2000 * (1 - 2.5 * ALPHA)


@pytest.mark.parametrize(("n", "factor", "power"), [(8, 1.3, 0.9), (8, 1.25, 0.75), (12, 1.2, 0.8), (20, 1.15, 0.8)])
def test_power_under_process_spread(n: int, factor: float, power: float) -> None:
    states = decided(11, n, factor, (0.1, 0.1), 500)
    assert states["regression"] >= 500 * power
    assert states["improvement"] == 0
    assert decided(12, n, 1 / factor, (0.1, 0.1), 500)["improvement"] >= 500 * power


def test_steady_series_can_be_the_same_and_resolve_small_changes() -> None:
    assert decided(13, 8, 1.0, (0.001, 0.001), 300)["same"] >= 290
    assert decided(14, 8, 1.02, (0.003, 0.003), 300)["regression"] >= 290


@pytest.mark.parametrize("n", [5, 8])
def test_interval_covers_the_true_ratio(n: int) -> None:
    rng = np.random.default_rng(n)
    inside = 0
    for _ in range(1000):
        base, head = np.exp(rng.normal(0, 0.1, (2, n)))
        found = verdict(list(base), list(1.1 * head), DECODE)
        inside += found.low <= 1.1 <= found.high
    assert inside >= 1000 * (1 - ALPHA) - 10


@pytest.mark.parametrize(
    ("ratio", "unit", "words"),
    [
        (1.12, "seconds", "1.12x slower"),
        (1 / 1.05, "seconds", "1.05x faster"),
        (1.003, "seconds", "0.3 % slower"),
        (1.000001, "count", "0.0001 % more"),
        (1.5, "count", "1.50x more"),
        (0.5, "count", "2.00x fewer"),
        (12.34, "bytes", "12.3x larger"),
        (1 / 300, "bytes", "300x smaller"),
        (2.0, "unit", "2.00x larger"),
        (1.0, "seconds", "equal"),
        (math.inf, "count", "new"),
        (0.0, "count", "gone"),
        (math.nan, "count", ""),
    ],
)
def test_words(ratio: float, unit: str, words: str) -> None:
    assert in_words(ratio, unit) == words


def test_percent() -> None:
    assert [percent(r) for r in (1.123, 0.997, 1.0)] == ["+12 %", "-0.3 %", "+0.0 %"]
