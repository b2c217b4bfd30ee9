"""The one table of metrics: name, unit, trust, meaning.

Every metric is lower-is-better (seconds, bytes, counts), because asv reads larger as worse; tokens
per second are derived where people read. A metric with phases is stored once a phase under the key
`name.phase`, one without under its bare name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["seconds", "bytes", "count"]
Trust = Literal["exact", "timing", "memory"]

#: Smallest relative change of a timing that anyone would act on; below it nothing is a regression.
TIMING_FLOOR = 0.005
#: The same for the resident set, which the operating system rounds and shares.
RSS_FLOOR = 0.02


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    `trust` is "exact" (the same on every run), "timing" (needs pairs or several processes) or
    "memory" (a reading of the operating system, nearly stable). `floor` is the relative change
    below which a difference is of no practical interest; 0 for exact counters.
    """

    name: str
    unit: Unit
    trust: Trust
    meaning: str
    phases: tuple[str, ...] = ()
    floor: float = 0.0

    def keys(self) -> tuple[str, ...]:
        """The names under which values of this metric are stored."""
        return tuple(f"{self.name}.{phase}" for phase in self.phases) or (self.name,)


def _seconds(name: str, meaning: str) -> Metric:
    return Metric(name, "seconds", "timing", meaning, floor=TIMING_FLOOR)


def _count(name: str, meaning: str, *phases: str) -> Metric:
    return Metric(name, "count", "exact", meaning, phases)


_COMPILED = ("prefill", "decode", "generate")

METRICS: tuple[Metric, ...] = (
    _seconds("vision_seconds", "image to features: the vision tower and projector, once for all images"),
    _seconds("prefill_seconds", "prompt with images to first token, on an empty cache"),
    _seconds("prefill_seconds_per_token", "prefill_seconds over all prompt positions, image tokens included"),
    _seconds("decode_seconds_per_token", "one decode step: median over blocks of a block's mean"),
    _seconds("decode_seconds_p99", "99th percentile of single decode steps"),
    _seconds("generate_seconds", "the model's own generate(), end to end, in a warm process"),
    _seconds("first_request_seconds", "first generate() in a fresh process, inductor cache warm"),
    _seconds("second_request_seconds", "second generate(), with a shorter prompt and fewer tokens"),
    _seconds("third_request_seconds", "third generate(), the first request again"),
    _seconds("compile_cold_seconds", "first four compiled decode calls, private empty inductor cache"),
    _seconds(
        "compile_warm_seconds",
        "first four compiled decode calls behind three requests, fresh process, same inductor cache",
    ),
    _count("graphs", "graphs captured by Dynamo", *_COMPILED),
    _count("graph_breaks", "graph breaks met while capturing", *_COMPILED),
    _count("recompiles", "frames compiled again because a guard failed", *_COMPILED),
    _count("captured_ops", "operations in the captured graphs", *_COMPILED),
    _count("guards", "guards on the captured frames", *_COMPILED),
    _count("aten_ops_per_token", "top-level operators of one decode step at a fixed position"),
    _count("python_calls_per_token", "Python function calls of one decode step at a fixed position"),
    _count("allocations_per_token", "allocations of one decode step at a fixed position"),
    _count("aten_ops", "top-level operators of the whole phase", "vision", "prefill"),
    _count("python_calls", "Python function calls of the whole phase", "vision", "prefill"),
    Metric("cache_bytes", "bytes", "exact", "storage the cache holds after prompt and new tokens"),
    Metric(
        "peak_bytes",
        "bytes",
        "exact",
        "most allocated bytes at once during the phase, above what was held before",
        ("prefill", "decode", "generate"),
    ),
    Metric("retained_bytes", "bytes", "exact", "bytes still held after a request and its outputs are dropped"),
    Metric("rss_bytes", "bytes", "memory", "largest resident set of the process", floor=RSS_FLOOR),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
BY_KEY: dict[str, Metric] = {key: metric for metric in METRICS for key in metric.keys()}  # noqa: SIM118


def tokens_per_second(seconds_per_token: float, batch: int = 1) -> float:
    """Tokens per second of a batch from seconds per step, for people only; never stored."""
    return batch / seconds_per_token if seconds_per_token > 0 else float("nan")
