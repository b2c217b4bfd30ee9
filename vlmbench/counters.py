"""Exact counters of a case, all at fixed positions, the same in every fresh process.

Eager operators are counted by a dispatch mode, compiled ones by the profiler's outermost operator
events (a compiled frame runs eagerly under a dispatch mode); Python calls by `call` events;
allocations, peak and retained bytes by the device's allocation events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from vlmbench import meters, phases
from vlmbench.phases import Session

#: The decode step that is counted: behind those that compile and settle.
POSITION = phases.SETTLED


def _ops(run: Callable[[], object], compiled: bool) -> Counter[str]:
    return meters.count_profiled(run) if compiled else meters.count_dispatched(run)


@torch.no_grad()
def count(session: Session) -> tuple[dict[str, int], dict[str, Any]]:
    """All exact metrics of a case by key, and facts: operator counts, kernels' hash, why it recompiled."""
    case = session.case
    compiles = session.kind.expected(session.compiling, "decode").compiled
    position = min(POSITION, case.new_tokens - 1)
    session.ready()
    _all_steps(session)  # a growing cache settles only by decoding
    session.take("decode")
    metrics: dict[str, int] = {}

    token = session.first

    def go_to_position() -> None:
        nonlocal token
        session.ready()
        token = session.first
        for i in range(position):
            token, _ = session.decode(token, session.cache, i)

    def one_step() -> object:
        return session.decode(token, session.cache, position)

    go_to_position()
    session.take("decode")
    decode_ops = _ops(one_step, compiles)
    metrics["aten_ops_per_token"] = decode_ops.total()
    go_to_position()
    metrics["python_calls_per_token"] = meters.count_python_calls(one_step)
    metrics["allocations_per_token"] = session.device.memory(one_step, go_to_position).allocations
    for phase in ("vision", "prefill"):
        if phase == "vision" and not case.images:
            continue
        step = phases.STEPS[phase](session)
        compiled = phase == "prefill" and case.compile_prefill
        step.reset()
        metrics[f"aten_ops.{phase}"] = _ops(step.run, compiled).total()
        step.reset()
        metrics[f"python_calls.{phase}"] = meters.count_python_calls(step.run)
    session.take("prefill")
    metrics |= _memory(session)
    facts: dict[str, Any] = {"ops": dict(decode_ops.most_common(12))}
    counted = ("prefill", "decode", "generate") if case.compile_prefill else ("decode", "generate")
    for phase, seen in session.compiled.items():
        if session.compiling and phase in counted:
            metrics |= {f"{name}.{phase}": value for name, value in seen.counts().items()}
        if seen.reasons:
            facts.setdefault("reasons", {})[phase] = seen.reasons[:4]
        if seen.kernels():
            facts.setdefault("kernels", {})[phase] = seen.kernels()
    return metrics, facts


def _all_steps(session: Session) -> None:
    """All new tokens on the session's own cache, as `ready()` left it."""
    token = session.first
    for i in range(session.case.new_tokens):
        token, _ = session.decode(token, session.cache, i)


def _memory(session: Session) -> dict[str, int]:
    """Peak bytes of prefill, decode and a whole request above what was held before; what a request leaves."""
    found: dict[str, int] = {}

    def prefill_fresh() -> object:
        cache = session.new_cache()
        return cache, session.prefill(cache)

    found["peak_bytes.prefill"] = session.device.memory(prefill_fresh).peak
    session.take("prefill")

    def decoded_and_back() -> None:
        # The blocks that decoding replaces must have been seen allocated: those of a decode before.
        session.ready()
        _all_steps(session)
        session.ready()

    found["peak_bytes.decode"] = session.device.memory(lambda: _all_steps(session), decoded_and_back).peak
    session.take("decode")
    found["cache_bytes"] = session.kind.nbytes(session.cache)
    request = session.device.memory(session.generate, session.generate)
    found["peak_bytes.generate"] = request.peak
    found["retained_bytes"] = request.retained
    session.take("generate")
    return found
