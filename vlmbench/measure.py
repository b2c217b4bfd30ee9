"""Drives worker processes through a case, and through many cases, to records.

One case is measured in several fresh processes (docs/architecture.md, "From case to record"): the
first with an empty inductor cache, the others with the first one's. Each finished record is on disk
before the next case starts, so a crash or Ctrl-C costs at most the case being measured.

    vlmbench measure --model llava-tiny --cache static --runner compile
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmbench.assemble import COMPILE_CALLS, REQUESTS, Run, assemble, failed_check, fitted_line
from vlmbench.errors import Unsupported, UsageError, WorkerFailed
from vlmbench.kinds import RUNNERS
from vlmbench.launch import Launcher, Worker, worker_environment, worker_error
from vlmbench.schema import PROTOCOL, Case, Envelope, Record, append_line

PHASES = ("vision", "prefill", "decode", "generate")

#: Told what is being done, in a few words.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured, and the longest any answer may take. Never part of a case's identity.

    Repeats and decode blocks are upper bounds: a phase stops when it has taken `phase_seconds` in a
    process, but not before its first. A case that would take more than `case_seconds`, cold compiling
    not counted, gets fewer values where it has one already: later processes leave out requests, then
    generate, and at last are left out themselves. Limits in seconds; every one of them is generous,
    as it only has to tell slow from hung.
    """

    processes: int = 3
    repeats: int = 3
    decode_blocks: int = 5
    phase_seconds: float = 10.0
    case_seconds: float = 150.0
    start_limit: float = 120.0
    open_limit: float = 600.0
    compile_limit: float = 600.0
    check_limit: float = 600.0
    block_limit: float = 300.0
    #: Added to a limit for each new token of the case.
    token_limit: float = 1.0

    @classmethod
    def rigorous(cls) -> Effort:
        """Eight processes: with fewer asv's own test can flag nothing."""
        return cls(processes=8, case_seconds=math.inf)


def measure(
    case: Case,
    launcher: Launcher,
    *,
    processes: int | None = None,
    folder: Path,
    effort: Effort = Effort(),
    progress: Progress | None = None,
    core: int | None = None,
    lock: Path | None = None,
    compile_threads: int | None = None,
) -> Record:
    """The record of one case from `processes` fresh processes, all of which then run in full whatever
    time they take; unless given, from at most `effort.processes`.

    Timed blocks are pinned to `core` and hold `lock`. The private inductor cache is made under
    `folder` and removed. Nothing a worker does raises here: it becomes the record's status and reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inductor = Path(tempfile.mkdtemp(prefix="inductor-", dir=folder.absolute()))
    if processes is not None:
        effort = replace(effort, processes=processes, case_seconds=math.inf)
    plan = _Plan(case, effort, core, lock, progress or (lambda text: None))
    environment = worker_environment(case.threads, inductor, compile_threads)
    try:
        while (run := plan.next_run()) is not None:
            _process(plan, run, launcher, environment)
            if run.status != "ok":
                break
    finally:
        shutil.rmtree(inductor, ignore_errors=True)
    return assemble(case, plan.runs, effort.processes)


class _Plan:
    """What is to be asked of the next process, given what the ones before gave and took."""

    def __init__(self, case: Case, effort: Effort, core: int | None, lock: Path | None, progress: Progress) -> None:
        self.case = case
        self.effort = effort
        self.core = core
        self.lock = lock
        self.runs: list[Run] = []
        self._progress = progress
        self._started = time.monotonic()

    def next_run(self) -> Run | None:
        """A new run, `left_out` filled in; None when there are enough or no time is left."""
        left = self.effort.processes - len(self.runs)
        if left < 1:
            return None
        role = "plain"
        if RUNNERS[self.case.runner].compiles:
            role = "warm" if self.runs else "cold"
        run = Run(role)
        given = [other for other in self.runs if other.role == role]
        if given:
            remaining = self.effort.case_seconds - self._spent()
            run.left_out, expected = _too_much(given, remaining / left)
            if expected > remaining:
                return None
        self.runs.append(run)
        return run

    def blocks(self, run: Run) -> Iterable[str]:
        """The blocks to ask for, in order; `check` and `count` stand where they belong."""
        compiles = run.role != "plain"
        proof = ["check", "count"] if run is self.runs[0] else []
        order = ["requests", *(["compile"] if compiles else []), *proof, *PHASES]
        if run.role == "cold":
            order = ["compile", "requests", *proof, *PHASES]
        known = self.runs[0].skipped
        return [block for block in order if block not in run.left_out and block not in known]

    def says(self, what: str) -> None:
        """Report progress."""
        self._progress(f"process {len(self.runs)}/{self.effort.processes}: {what}")

    def limit(self, seconds: float) -> float:
        """A limit with the allowance for the case's tokens."""
        return seconds + self.effort.token_limit * self.case.new_tokens

    def _spent(self) -> float:
        """Seconds this case has taken, without what was compiled with an empty inductor cache."""
        cold = [run.walls.get(block, 0) for run in self.runs if run.role == "cold" for block in ("compile", "requests")]
        return time.monotonic() - self._started - sum(cold)


def _too_much(given: Sequence[Run], allowed: float) -> tuple[list[str], float]:
    """Blocks that the next process is to leave out to take at most `allowed` seconds, and what it
    will take then, going by processes of its kind.

    Only what they have given already: a metric with fewer values is less certain, one without any
    is missing.
    """
    # Blocks left out before keep what they took when they were last asked for.
    walls = {block: wall for run in given for block, wall in run.walls.items()}
    expected = sum(wall for block, wall in walls.items() if block not in ("check", "count"))
    out: list[str] = []
    for block in ("requests", "generate"):
        if expected > allowed and block in walls:
            out.append(block)
            expected -= walls[block]
    return out, expected


def _process(plan: _Plan, run: Run, launcher: Launcher, environment: dict[str, str]) -> None:
    """Fill `run` from one fresh process; the process has ended afterwards, whatever happened."""
    try:
        plan.says("start")
        worker = launcher.start(environment)
    except WorkerFailed as error:
        run.end("broken", str(error))
        return
    try:
        _open(plan, run, worker)
        for block in plan.blocks(run):
            plan.says(block)
            started = time.monotonic()
            _BLOCKS.get(block, _phase)(plan, run, worker, block)
            run.walls[block] = time.monotonic() - started
            if run.status != "ok" and block != "check":
                return
        if run.status == "ok":
            run.rss_bytes = _take(worker.close(), "close", "rss_bytes", int, float)
    except Unsupported as error:
        run.end("unsupported", str(error))
    except (UsageError, WorkerFailed) as error:
        run.end("broken", str(error))
    finally:
        worker.kill()


def _open(plan: _Plan, run: Run, worker: Worker) -> None:
    """Say hello and build the model; raises what the worker says about the case."""
    case, started = plan.case, time.monotonic()
    hello = worker.ask(
        "hello",
        plan.effort.start_limit,
        device=case.device,
        threads=case.threads,
        core=plan.core,
        lock=str(plan.lock) if plan.lock else None,
    )
    if str(hello.get("protocol")) != PROTOCOL:
        raise WorkerFailed(
            f"the worker speaks protocol {hello.get('protocol')!r}, this version {PROTOCOL!r}: "
            "its vlmbench is another one"
        )
    run.versions = _take(hello, "hello", "versions", dict)
    run.device = _take(hello, "hello", "device", dict)
    plan.says("open")
    answer = worker.ask("open", plan.effort.open_limit, cases=[case.to_json()])
    run.build_seconds = _take(answer, "open", "build_seconds", int, float)
    opened = _take(answer, "open", "cases", dict).get(case.id)
    if not isinstance(opened, dict):
        raise WorkerFailed(f"the worker's answer to 'open' lacks the case '{case.id}'")
    if "error" in opened:
        error = opened["error"] if isinstance(opened["error"], dict) else {"reason": str(opened["error"])}
        raise worker_error(*(str(error.get(name) or "") for name in ("kind", "reason", "where")))
    run.facts.update(_take(opened, "open", "facts", dict))
    run.walls["open"] = time.monotonic() - started


def _check(plan: _Plan, run: Run, worker: Worker, block: str) -> None:
    answer = worker.ask("check", plan.limit(plan.effort.check_limit), case=plan.case.id)
    run.checks = _take(answer, block, "checks", list)
    run.proof = _take(answer, block, "proof", dict)
    run.facts.update(_take(answer, block, "facts", dict))
    if reason := failed_check(run.checks):
        run.end("broken", reason)


def _count(plan: _Plan, run: Run, worker: Worker, block: str) -> None:
    try:
        answer = worker.ask("count", plan.limit(plan.effort.check_limit), case=plan.case.id)
    except Unsupported as error:
        run.skipped[block] = str(error)
        return
    run.counts = _take(answer, block, "metrics", dict)
    run.facts.update(_take(answer, block, "facts", dict))


def _calls(plan: _Plan, run: Run, worker: Worker, block: str) -> None:
    """The first calls of a fresh process, all of them: `compile` or `requests`."""
    n = COMPILE_CALLS if block == "compile" else len(REQUESTS)
    samples = _ask_block(plan, run, worker, block, n, plan.effort.compile_limit)
    if samples and len(samples) != n:
        raise WorkerFailed(f"the worker gave {len(samples)} samples for {n} calls of '{block}'")


def _phase(plan: _Plan, run: Run, worker: Worker, phase: str) -> None:
    """One repeat (or decode block), then as many more as fit into the phase's time."""
    n = plan.effort.decode_blocks if phase == "decode" else plan.effort.repeats
    started = time.monotonic()
    samples = _ask_block(plan, run, worker, phase, 1, plan.effort.block_limit)
    # The wall clock counts resets too, but also the wait for another job's timed blocks.
    took = sum(samples) if plan.lock else max(sum(samples), time.monotonic() - started)
    more = min(n - 1, int(plan.effort.phase_seconds / took) - 1) if samples else 0
    if more > 0:
        _ask_block(plan, run, worker, phase, more, plan.effort.block_limit)


def _ask_block(plan: _Plan, run: Run, worker: Worker, phase: str, n: int, limit: float) -> list[float]:
    """The samples of one block, also added to the run; empty when the phase is unsupported."""
    try:
        answer = worker.ask("block", plan.limit(limit), case=plan.case.id, phase=phase, n=n)
    except Unsupported as error:
        run.skipped[phase] = str(error)
        return []
    samples = _take(answer, f"block {phase}", "samples", list)
    if not samples or not all(isinstance(s, int | float) and math.isfinite(s) and s > 0 for s in samples):
        raise WorkerFailed(f"the worker gave no usable seconds for '{phase}': {str(samples)[:80]}")
    run.samples.setdefault(phase, []).extend(samples)
    run.blocks[phase] = run.blocks.get(phase, 0) + n
    if facts := answer.get("facts"):
        run.phase_facts[phase] = facts
    return samples


_BLOCKS: dict[str, Callable[[_Plan, Run, Worker, str], None]] = {
    "check": _check,
    "count": _count,
    "compile": _calls,
    "requests": _calls,
}


def _take(answer: dict[str, Any], asked: str, name: str, *kinds: type) -> Any:
    """A field of an answer. Raises WorkerFailed when it is missing or of another type."""
    value = answer.get(name)
    if not isinstance(value, kinds):
        raise WorkerFailed(f"the worker's answer to '{asked}' has no proper '{name}': {value!r:.80}")
    return value


def measure_all(
    cases: Sequence[Case],
    launcher: Launcher,
    *,
    folder: Path,
    ledger: Path,
    run: str,
    subject: str,
    commit: str,
    machine: str,
    jobs: int = 1,
    processes: int | None = None,
    effort: Effort = Effort(),
    on_record: Callable[[Record], None] | None = None,
    on_progress: Callable[[Case, str], None] | None = None,
) -> list[Record]:
    """Measure the cases, `jobs` at once, and append each record to `ledger` when it is finished.

    Jobs start workers and compile at the same time; their timed blocks hold one lock, so never two
    at once, and each job has a core of its own. `run`, `subject`, `commit` and `machine` go into the
    envelope. `on_record` and `on_progress` are called from the jobs' threads, one call at a time.
    Returns the records in the order of the cases. KeyboardInterrupt, or any error that is not the
    case's (a full disk), ends all workers and is raised again; finished records stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cores = available_cores()
    lock = folder.absolute() / "timed.lock" if jobs > 1 else None
    compile_threads = max(1, len(cores) // jobs) if jobs > 1 else None
    # Highest first: core 0 serves most interrupts.
    slots = [cores[-1 - i % len(cores)] for i in range(jobs)]
    # Jobs share the machine, so each may take longer.
    effort = replace(effort, case_seconds=effort.case_seconds * jobs)
    stop, order, told = threading.Event(), threading.Lock(), threading.Lock()

    def progress(case: Case, text: str) -> None:
        if on_progress is not None:
            with told:
                on_progress(case, text)

    def one(case: Case) -> Record | None:
        with order:
            core = slots.pop()
        try:
            if stop.is_set():
                return None
            record = measure(
                case,
                launcher,
                processes=processes,
                folder=folder,
                effort=effort,
                progress=lambda text: progress(case, text),
                core=core if case.threads == 1 else None,
                lock=lock,
                compile_threads=compile_threads,
            )
            with told:
                # A worker that was ended from outside makes no broken record.
                if stop.is_set():
                    return None
                append_line(ledger, fitted_line(Envelope("record", run, subject, commit, machine, case.id), record))
                if on_record is not None:
                    on_record(record)
            return record
        except BaseException:
            stop.set()
            raise
        finally:
            with order:
                slots.append(core)

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="case")
    futures = [pool.submit(one, case) for case in cases]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        records = [future.result() for future in futures if future.done()]
    except BaseException:
        stop.set()
        launcher.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if lock is not None:
            lock.unlink(missing_ok=True)
    return [record for record in records if record is not None]


def available_cores() -> list[int | None]:
    """The cores this process may run on; [None] where the system does not say."""
    try:
        return [*sorted(os.sched_getaffinity(0))]
    except AttributeError:
        return [None]
