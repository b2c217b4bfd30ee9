"""From what the processes of a case gave to its record. Pure: no process, no clock, no file.

A series in seconds has one value a process, because samples within a process agree while processes
differ. Exact counters come from the first process. A case whose proof failed keeps its counters and
publishes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from vlmbench import metrics, stats
from vlmbench.errors import UsageError
from vlmbench.kinds import RUNNERS
from vlmbench.schema import Case, Envelope, Record, Status, encode_line

#: Decode steps kept in a record's `raw`, for each process; the first and last ones survive thinning.
RAW_STEPS = 128
#: Longest reason kept, in characters: one sentence, not a listing.
MAX_REASON = 600
#: Calls of the compiled step and of generate() that the worker's blocks of these names make.
COMPILE_CALLS = 4
REQUESTS = ("first_request_seconds", "second_request_seconds", "third_request_seconds")


@dataclass
class Run:
    """What one fresh process gave.

    `role` is "cold" (empty inductor cache), "warm" (that of the cold one) or "plain" (nothing to
    compile). `samples` holds seconds by block; `blocks` how many decode blocks or repeats those are.
    `status` and `reason` say how it ended.
    """

    role: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    walls: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    phase_facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    rss_bytes: float | None = None
    build_seconds: float | None = None
    status: Status = "ok"
    reason: str = ""

    def end(self, status: Status, reason: str) -> None:
        """Say how it ended, unless that is known already."""
        if self.status == "ok":
            self.status, self.reason = status, reason


def failed_check(checks: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on the first check that did not pass; empty when all did.

    No check at all is a failure: a number is only published with its proof.
    """
    if not checks:
        return "no check was made, so no number is published"
    failed = [check for check in checks if check.get("passed") is not True]
    if not failed:
        return ""
    check = failed[0]
    step = f" at step {check['step']}" if check.get("step") is not None else ""
    size = ""
    if check.get("error") is not None:
        size = f", error {check['error']:.3g}"
        if check.get("tolerance") is not None:
            size += f" against a tolerance of {check['tolerance']:.3g}"
    detail = f": {check['detail']}" if check.get("detail") else ""
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"check '{check.get('name', '?')}' failed{step}{size}{detail}{more}"


def assemble(case: Case, runs: Sequence[Run], planned: int = 0) -> Record:
    """The record of a case from its processes, in the order they ran; at least one.

    `planned` is how many there were to be, had there been time for all.
    """
    first = runs[0]
    ended = next((run for run in runs if run.status != "ok"), first)
    record = Record(
        case=case,
        status=ended.status,
        reason=ended.reason[:MAX_REASON],
        facts=_facts(runs, planned if ended.status == "ok" else 0),
        checks=list(first.checks),
        versions=dict(first.versions),
        device=dict(first.device),
        raw=[_raw(run) for run in runs],
        proof=dict(first.proof),
    )
    for key, value in first.counts.items():
        if key in metrics.BY_KEY:
            record.metrics[key] = _entry(key, value, [value])
    if record.status != "ok":
        return record
    for key, values in _seconds(case, runs).items():
        if values:
            record.metrics[key] = _entry(key, stats.median(values), values)
    resident = [run.rss_bytes for run in runs if run.rss_bytes is not None]
    if resident:
        record.metrics["rss_bytes"] = _entry("rss_bytes", max(resident), resident)
    return record


def _seconds(case: Case, runs: Sequence[Run]) -> dict[str, list[float]]:
    """Every series in seconds: one value for each process that gave it."""

    def each(block: str, value: Callable[[list[float]], float], *roles: str) -> list[float]:
        wanted = [run for run in runs if not roles or run.role in roles]
        return [value(run.samples[block]) for run in wanted if block in run.samples]

    series = {
        "vision_seconds": each("vision", stats.median),
        "prefill_seconds": each("prefill", stats.median),
        "decode_seconds_per_token": [
            stats.block_median(run.samples["decode"], run.blocks["decode"]) for run in runs if "decode" in run.samples
        ],
        "decode_seconds_p99": each("decode", lambda steps: stats.quantile(steps, 0.99)),
        "generate_seconds": each("generate", stats.median),
    }
    positions = runs[0].facts.get("prompt_positions")
    if isinstance(positions, int) and positions > 0:
        series["prefill_seconds_per_token"] = [value / positions for value in series["prefill_seconds"]]
    for index, name in enumerate(REQUESTS):
        series[name] = each("requests", itemgetter(index), "warm", "plain")
    if RUNNERS[case.runner].compiles:
        series["compile_cold_seconds"] = each("compile", sum, "cold")
        series["compile_warm_seconds"] = each("compile", sum, "warm")
    return series


def _entry(key: str, value: float, samples: Sequence[float]) -> dict[str, Any]:
    unit = metrics.BY_KEY[key].unit
    digits = 6 if unit == "seconds" else 17
    return {"unit": unit, "value": _round(value, digits), "samples": [_round(v, digits) for v in samples]}


def _round(value: float, digits: int) -> float:
    if isinstance(value, int) or not math.isfinite(value) or digits > 16:
        return value
    return float(f"{value:.{digits}g}")


def _facts(runs: Sequence[Run], planned: int) -> dict[str, Any]:
    """What the first process observed, and how much was measured."""
    first = runs[0]
    facts = dict(first.facts)
    facts["processes"] = len(runs)
    facts["repeats"] = {block: [run.blocks.get(block, 0) for run in runs] for block in first.blocks}
    if first.phase_facts:
        facts["phases"] = first.phase_facts
    skipped = {block: reason[:MAX_REASON] for run in runs for block, reason in run.skipped.items()}
    if skipped:
        facts["skipped"] = skipped
    left_out = [f"{block} in process {n}" for n, run in enumerate(runs, 1) for block in run.left_out]
    left_out += [f"process {n}" for n in range(len(runs) + 1, planned + 1)]
    if left_out:
        facts["left_out"] = f"to stay within the case's time: {', '.join(left_out)}"
    stray = sorted(set(first.counts) - set(metrics.BY_KEY))
    if stray:
        facts["unknown_metrics"] = stray[:20]
    return facts


def _raw(run: Run) -> dict[str, Any]:
    raw: dict[str, Any] = {"role": run.role, "samples": {}}
    for block, samples in run.samples.items():
        raw["samples"][block] = [_round(v, 4) for v in thin(samples, RAW_STEPS)]
    if run.build_seconds is not None:
        raw["build_seconds"] = _round(run.build_seconds, 4)
    if run.rss_bytes is not None:
        raw["rss_bytes"] = run.rss_bytes
    return raw


def thin(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of the values, evenly spaced, the first and last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def fitted_line(envelope: Envelope, record: Record) -> str:
    """The record's line, made to fit schema.MAX_LINE by thinning first `raw`, then `proof` and facts.

    What was cut is said in `facts["trimmed"]`; the record is changed accordingly, so that what people
    see is what is stored. Raises UsageError when even the bare record does not fit.
    """
    trimmed = []
    for name, cut in (("", None), *_CUTS):
        if cut is not None:
            cut(record)
            trimmed.append(name)
            record.facts["trimmed"] = ", ".join(trimmed)
        try:
            return encode_line(envelope, record.to_json())
        except UsageError:
            continue
    return encode_line(envelope, record.to_json())


def _thin_raw(most: int) -> Callable[[Record], None]:
    def cut(record: Record) -> None:
        for raw in record.raw:
            raw["samples"] = {block: thin(values, most) for block, values in raw["samples"].items()}

    return cut


def _drop_raw(record: Record) -> None:
    record.raw = []


def _drop_phase_facts(record: Record) -> None:
    record.facts.pop("phases", None)


def _drop_proof(record: Record) -> None:
    short = {name: value for name, value in record.proof.items() if isinstance(value, str | int | float)}
    record.proof = short


def _drop_large_facts(record: Record) -> None:
    record.facts = {name: value for name, value in record.facts.items() if len(str(value)) <= 500}
    record.checks = [{**check, "detail": str(check.get("detail", ""))[:200]} for check in record.checks[:20]]


_CUTS: tuple[tuple[str, Callable[[Record], None]], ...] = (
    ("raw thinned to 32 samples a block", _thin_raw(32)),
    ("raw thinned to 8 samples a block", _thin_raw(8)),
    ("raw dropped", _drop_raw),
    ("facts of phases dropped", _drop_phase_facts),
    ("logits of the proof dropped", _drop_proof),
    ("facts above 500 characters dropped", _drop_large_facts),
)
