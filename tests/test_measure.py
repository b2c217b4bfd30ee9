"""From processes to a record: what is asked in which order, what is published, and what ends a case."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import COUNTS, SECONDS, CheckFails, FakeLauncher, open_error

from vlmbench import measure as measuring
from vlmbench.assemble import Run, assemble, failed_check, fitted_line, thin
from vlmbench.errors import Unsupported, UsageError, WorkerFailed
from vlmbench.launch import LocalLauncher
from vlmbench.measure import Effort, measure, measure_all
from vlmbench.metrics import BY_KEY
from vlmbench.schema import MAX_LINE, Case, Envelope, Record, decode_line, read_lines

EAGER = Case("llava-tiny", "static", "eager")
COMPILE = Case("llava-tiny", "static", "compile")
PHASES = ["vision", "prefill", "decode", "generate"]


def blocks(launcher: FakeLauncher, process: int) -> list[str]:
    """What was asked of a process between opening and closing, repeats as one."""
    asked = [what for index, what in launcher.log if index == process and what not in ("hello", "open", "close")]
    return [what for i, what in enumerate(asked) if i == 0 or asked[i - 1] != what]


def seconds(record: Record) -> set[str]:
    """Names of the timings that a record publishes."""
    return {key for key in record.metrics if BY_KEY[key].trust == "timing"}


def test_a_compiled_case(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    record = measure(COMPILE, launcher, folder=tmp_path)
    assert (record.status, record.reason) == ("ok", "")
    assert blocks(launcher, 0) == ["compile", "requests", "check", "count", *PHASES]
    assert blocks(launcher, 1) == blocks(launcher, 2) == ["requests", "compile", *PHASES]
    assert [raw["role"] for raw in record.raw] == ["cold", "warm", "warm"]
    values = {key: entry["value"] for key, entry in record.metrics.items()}
    lengths = {key: len(entry["samples"]) for key, entry in record.metrics.items()}
    assert values["decode_seconds_per_token"] == pytest.approx(SECONDS["decode"], rel=0.1)
    assert values["decode_seconds_p99"] >= values["decode_seconds_per_token"]
    assert values["prefill_seconds_per_token"] == pytest.approx(values["prefill_seconds"] / 48, rel=1e-4)
    assert values["compile_cold_seconds"] == pytest.approx(sum(SECONDS["compile"]), rel=0.1)
    assert values["second_request_seconds"] == pytest.approx(SECONDS["requests"][1], rel=0.1)
    # One value a fresh process; requests and warm compile only where the inductor cache was warm.
    assert lengths["decode_seconds_per_token"] == lengths["vision_seconds"] == lengths["rss_bytes"] == 3
    assert lengths["first_request_seconds"] == lengths["compile_warm_seconds"] == 2
    assert lengths["compile_cold_seconds"] == 1
    assert {key: values[key] for key in COUNTS} == COUNTS
    assert values["rss_bytes"] == 100_000_002
    assert all(entry["unit"] == BY_KEY[key].unit for key, entry in record.metrics.items())
    assert record.facts["kernels"] == "f00d" and record.facts["asked"] == record.facts["observed"]
    assert record.facts["repeats"]["decode"] == [5, 5, 5]
    assert record.versions["torch"] == "2.13.0"
    assert record.device == {"type": "cpu", "name": "fake"}


def test_an_eager_case_compiles_nothing(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    record = measure(EAGER, launcher, folder=tmp_path)
    assert blocks(launcher, 0) == ["requests", "check", "count", *PHASES]
    assert blocks(launcher, 1) == ["requests", *PHASES]
    assert not any(name.startswith("compile") for name in record.metrics)
    assert len(record.metrics["first_request_seconds"]["samples"]) == 3


def test_processes_share_one_private_inductor_cache_which_goes(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Watching(FakeLauncher):
        def start(self, environment: Any) -> Any:
            seen.append(Path(environment["TORCHINDUCTOR_CACHE_DIR"]).is_dir())
            return super().start(environment)

    launcher = Watching()
    measure(COMPILE, launcher, folder=tmp_path, processes=2)
    measure(COMPILE, launcher, folder=tmp_path, processes=1)
    used = [environment["TORCHINDUCTOR_CACHE_DIR"] for environment in launcher.environments]
    assert seen == [True] * 3
    assert used[0] == used[1] != used[2]
    assert list(tmp_path.iterdir()) == []


def test_one_process_gives_no_warm_numbers(tmp_path: Path) -> None:
    record = measure(COMPILE, FakeLauncher(), folder=tmp_path, processes=1)
    assert "compile_cold_seconds" in record.metrics
    assert not {"compile_warm_seconds", "first_request_seconds"} & set(record.metrics)


def test_a_failed_check_publishes_counters_and_no_time(tmp_path: Path) -> None:
    launcher = FakeLauncher(failures={("static", "check"): CheckFails("the last token was dropped")})
    record = measure(COMPILE, launcher, folder=tmp_path)
    assert record.status == "broken"
    assert record.reason == (
        "check 'logits' failed at step 3, error 0.5 against a tolerance of 0.0001: the last token was dropped"
    )
    assert set(record.metrics) == set(COUNTS)
    assert blocks(launcher, 0) == ["compile", "requests", "check", "count"]
    assert len(launcher.workers) == 1 and launcher.workers[0].ended
    assert record.raw[0]["samples"]["compile"]


def test_no_check_is_a_failed_one() -> None:
    assert "no check was made" in failed_check([])
    assert failed_check([{"name": "a", "passed": True}]) == ""
    assert failed_check([{"name": "a", "passed": None}, {"name": "b", "passed": False}]).endswith("(and 1 more)")


@pytest.mark.parametrize("what", ["hello", "check", "count", "requests", "decode", "close"])
def test_a_worker_that_fails_breaks_the_case(tmp_path: Path, what: str) -> None:
    launcher = FakeLauncher(failures={("*", what): WorkerFailed("worker killed by SIGKILL")})
    record = measure(EAGER, launcher, folder=tmp_path)
    assert (record.status, record.reason) == ("broken", "worker killed by SIGKILL")
    assert seconds(record) == set()
    assert all(worker.ended for worker in launcher.workers)


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    launcher = FakeLauncher(failures={("*", "generate"): WorkerFailed("hung")}, process=1)
    record = measure(EAGER, launcher, folder=tmp_path)
    assert record.status == "broken"
    assert len(record.raw) == 2
    assert set(record.raw[0]["samples"]) == {"requests", *PHASES}
    assert "generate" not in record.raw[1]["samples"] and record.raw[1]["samples"]["decode"]
    assert set(record.metrics) == set(COUNTS)


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("unsupported", "unsupported", "no images"),
        ("usage", "broken", "no images"),
        ("failed", "broken", "no images"),
        ("memory", "broken", "out of memory: no images"),
    ],
)
def test_a_case_that_cannot_be_opened(tmp_path: Path, kind: str, status: str, reason: str) -> None:
    launcher = FakeLauncher(failures={("*", "open"): open_error(kind, "no images")})
    record = measure(EAGER, launcher, folder=tmp_path)
    assert (record.status, record.reason) == (status, reason)
    assert record.metrics == {} and len(launcher.workers) == 1


def test_usage_errors_of_a_worker_are_no_exception(tmp_path: Path) -> None:
    launcher = FakeLauncher(failures={("*", "hello"): UsageError("no CUDA device here")})
    record = measure(EAGER, launcher, folder=tmp_path)
    assert (record.status, record.reason) == ("broken", "no CUDA device here")


def test_an_unsupported_phase_is_left_out_with_its_reason(tmp_path: Path) -> None:
    launcher = FakeLauncher(failures={("static", "vision"): Unsupported("no vision tower")})
    record = measure(EAGER, launcher, folder=tmp_path)
    assert record.status == "ok"
    assert record.facts["skipped"] == {"vision": "no vision tower"}
    assert "vision_seconds" not in record.metrics and "decode_seconds_per_token" in record.metrics
    assert "vision" not in blocks(launcher, 1)


@pytest.mark.parametrize(
    ("what", "answer", "text"),
    [
        ("decode", {"samples": []}, "no usable seconds for 'decode'"),
        ("decode", {"samples": [0.1, -1]}, "no usable seconds for 'decode'"),
        ("decode", {"samples": [float("nan")]}, "no usable seconds for 'decode'"),
        ("decode", {}, "'block decode' has no proper 'samples'"),
        ("requests", {"samples": [1.0]}, "1 samples for 3 calls of 'requests'"),
        ("open", {"cases": {}, "build_seconds": 1}, "lacks the case 'llava-tiny/static/eager'"),
        ("hello", {"protocol": "0"}, "speaks protocol '0', this version '1'"),
        ("check", {"checks": [], "proof": {}, "facts": {}}, "no check was made"),
    ],
)
def test_an_answer_that_makes_no_sense(tmp_path: Path, what: str, answer: dict[str, Any], text: str) -> None:
    launcher = FakeLauncher(failures={("*", what): lambda: answer})
    record = measure(EAGER, launcher, folder=tmp_path)
    assert record.status == "broken" and text in record.reason


def test_a_launcher_that_cannot_start(tmp_path: Path) -> None:
    with LocalLauncher("/nowhere/python") as launcher:
        record = measure(EAGER, launcher, folder=tmp_path)
    assert record.status == "broken" and "cannot start a worker" in record.reason


def test_slow_phases_are_repeated_less(tmp_path: Path) -> None:
    slow = {"prefill": 4.2, "decode": 0.1, "generate": 8.0, "vision": 30.0}
    record = measure(EAGER, FakeLauncher(seconds=slow), folder=tmp_path)
    assert record.facts["repeats"] == {
        "requests": [3, 3, 3],
        "vision": [1, 1, 1],
        "prefill": [2, 2, 2],
        "decode": [3, 3, 3],
        "generate": [1, 1, 1],
    }
    assert record.metrics["decode_seconds_per_token"]["value"] == pytest.approx(0.1, rel=0.1)


def test_later_processes_of_a_very_slow_case_leave_out_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    class Slow(FakeLauncher):
        def start(self, environment: Any) -> Any:
            worker = super().start(environment)
            ask = worker.ask

            def slow(do: str, timeout: float, **args: Any) -> dict[str, Any]:
                clock[0] += {"open": 10, "requests": 24, "check": 20}.get(args.get("phase", do), 4)
                return ask(do, timeout, **args)

            worker.ask = slow  # type: ignore[method-assign]
            return worker

    effort = Effort(case_seconds=150, repeats=1, decode_blocks=1)
    record = measure(EAGER, Slow(), folder=tmp_path, effort=effort)
    assert record.facts["processes"] == 3
    assert record.status == "ok"
    assert record.facts["left_out"] == ("to stay within the case's time: requests in process 2, requests in process 3")
    assert len(record.metrics["first_request_seconds"]["samples"]) == 1
    assert len(record.metrics["generate_seconds"]["samples"]) == 3
    # A compiled case has no warm requests before its second process, which therefore keeps them.
    record = measure(COMPILE, Slow(), folder=tmp_path, effort=effort)
    assert len(record.metrics["first_request_seconds"]["samples"]) == 1
    # Nothing fits: one process is what there is. A compiled case has two kinds of process.
    record = measure(EAGER, Slow(), folder=tmp_path, effort=replace(effort, case_seconds=60))
    assert (record.status, record.facts["processes"]) == ("ok", 1)
    assert record.facts["left_out"] == "to stay within the case's time: process 2, process 3"
    record = measure(COMPILE, Slow(), folder=tmp_path, effort=replace(effort, case_seconds=60))
    assert record.facts["processes"] == 2 and "compile_warm_seconds" in record.metrics
    # A number that was asked for is kept to, and rigorous leaves out nothing.
    record = measure(EAGER, Slow(), folder=tmp_path, effort=replace(effort, case_seconds=60), processes=3)
    assert record.facts["processes"] == 3 and "left_out" not in record.facts
    record = measure(EAGER, Slow(), folder=tmp_path, effort=replace(Effort.rigorous(), repeats=1))
    assert len(record.metrics["first_request_seconds"]["samples"]) == 8 and "left_out" not in record.facts


def test_limits_grow_with_the_tokens(tmp_path: Path) -> None:
    limits: dict[str, float] = {}

    class Watching(FakeLauncher):
        def start(self, environment: Any) -> Any:
            worker = super().start(environment)
            ask = worker.ask

            def watch(do: str, timeout: float, **args: Any) -> dict[str, Any]:
                limits[args.get("phase", do)] = timeout
                return ask(do, timeout, **args)

            worker.ask = watch  # type: ignore[method-assign]
            return worker

    effort = Effort(start_limit=11, block_limit=7, token_limit=2)
    measure(replace(EAGER, new_tokens=50), Watching(), folder=tmp_path, effort=effort)
    assert limits["hello"] == 11 and limits["decode"] == 7 + 2 * 50


def test_timed_blocks_are_pinned_and_locked_as_told(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    measure(EAGER, launcher, folder=tmp_path, processes=1, core=3, lock=tmp_path / "lock", compile_threads=2)
    do, args = launcher.workers[0].asked[0]
    assert do == "hello"
    assert args == {"device": "cpu", "threads": 1, "core": 3, "lock": str(tmp_path / "lock")}
    assert launcher.environments[0]["TORCHINDUCTOR_COMPILE_THREADS"] == "2"


def test_progress_names_process_and_block(tmp_path: Path) -> None:
    told: list[str] = []
    measure(EAGER, FakeLauncher(), folder=tmp_path, processes=2, progress=told.append)
    assert told[0] == "process 1/2: start" and told[-1] == "process 2/2: generate"


@pytest.mark.parametrize("processes", [3, 8])
@pytest.mark.parametrize("new_tokens", [32, 512])
def test_a_line_fits(tmp_path: Path, processes: int, new_tokens: int) -> None:
    case = replace(COMPILE, new_tokens=new_tokens, cache_length=2048)
    record = measure(case, FakeLauncher(), folder=tmp_path, processes=processes)
    line = fitted_line(Envelope("record", "r", "s", "c", "m", case.id), record)
    assert len(line) <= MAX_LINE
    stored = Record.from_json(decode_line(line)[1])
    assert stored.metrics == record.metrics and stored.facts == record.facts
    assert len(stored.raw) == processes and "trimmed" not in stored.facts


def test_raw_samples_go_first(tmp_path: Path) -> None:
    answer = {"metrics": {}, "facts": {"ops": {f"aten.op{i}.default": i for i in range(300)}}}
    launcher = FakeLauncher(failures={("*", "count"): lambda: answer})
    record = measure(replace(EAGER, new_tokens=96), launcher, folder=tmp_path, processes=8)
    line = fitted_line(Envelope("record", "r", "s", "c", "m", EAGER.id), record)
    stored = Record.from_json(decode_line(line)[1])
    assert stored.facts["trimmed"] == "raw thinned to 32 samples a block"
    assert {len(raw["samples"]["decode"]) for raw in stored.raw} == {32}
    assert stored.metrics == record.metrics and stored.facts["ops"] == answer["facts"]["ops"]


def test_a_line_fits_whatever_the_worker_says(tmp_path: Path) -> None:
    run = Run("plain", status="broken", reason="x" * 50_000)
    run.facts = {"huge": "y" * 30_000, "small": 1}
    run.checks = [{"name": "c", "passed": False, "detail": "z" * 30_000}]
    run.proof = {"logits": [[0.123456789] * 2000] * 3, "weights": "hash"}
    run.samples = {"decode": [0.1] * 100_000}
    record = assemble(EAGER, [run])
    line = fitted_line(Envelope("record", "r", "s", "c", "m", EAGER.id), record)
    stored = Record.from_json(decode_line(line)[1])
    assert stored.proof == {"weights": "hash"}
    assert stored.facts["small"] == 1 and "raw dropped" in stored.facts["trimmed"]
    assert len(stored.reason) == 600


def test_thinning_keeps_both_ends() -> None:
    assert thin([1.0, 2.0], 8) == [1.0, 2.0]
    kept = thin([float(i) for i in range(1000)], 8)
    assert len(kept) == 8 and kept[0] == 0 and kept[-1] == 999


def test_counters_the_table_does_not_have_are_named(tmp_path: Path) -> None:
    answer = {"metrics": {"graphs.decode": 1, "new_thing": 2}, "facts": {}}
    record = measure(EAGER, FakeLauncher(failures={("*", "count"): lambda: answer}), folder=tmp_path)
    assert record.facts["unknown_metrics"] == ["new_thing"] and "new_thing" not in record.metrics


def run_all(tmp_path: Path, launcher: FakeLauncher, cases: list[Case], **more: Any) -> list[Record]:
    """measure_all with the envelope of a test."""
    envelope: dict[str, Any] = {"run": "run", "subject": "vlmbench", "commit": "abc", "machine": "here"}
    return measure_all(cases, launcher, folder=tmp_path / "run", ledger=tmp_path / "ledger.jsonl", **envelope, **more)


CASES = [
    replace(EAGER, cache=cache, runner=r) for cache in ("dynamic", "static", "tensor") for r in ("eager", "compile")
]


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_every_case_becomes_a_line(tmp_path: Path, jobs: int) -> None:
    launcher = FakeLauncher(failures={("static", "check"): CheckFails("wrong")})
    came: list[Record] = []
    records = run_all(tmp_path, launcher, CASES, jobs=jobs, on_record=came.append)
    assert [record.case for record in records] == CASES
    assert [record.status for record in records] == ["ok", "ok", "broken", "broken", "ok", "ok"]
    lines = list(read_lines(tmp_path / "ledger.jsonl"))
    assert [payload["case"]["cache"] for _, _, payload in lines] == [r.case.cache for r in came]  # type: ignore[index]
    assert all(envelope and (envelope.kind, envelope.commit) == ("record", "abc") for _, envelope, _ in lines)
    assert list((tmp_path / "run").iterdir()) == []


def test_jobs_have_a_core_each_and_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_cores", lambda: [0, 1, 2, 3])
    launcher = FakeLauncher()
    both = threading.Barrier(2, timeout=10)
    start = launcher.start

    def together(environment: Any) -> Any:
        both.wait()
        return start(environment)

    launcher.start = together  # type: ignore[method-assign]
    run_all(tmp_path, launcher, CASES[:2], jobs=2)
    hellos = [args for worker in launcher.workers for do, args in worker.asked if do == "hello"]
    assert {hello["core"] for hello in hellos} == {2, 3}
    assert {hello["lock"] for hello in hellos} == {str(tmp_path / "run" / "timed.lock")}
    assert {e["TORCHINDUCTOR_COMPILE_THREADS"] for e in launcher.environments} == {"2"}


def test_one_job_needs_no_lock_and_threads_no_core(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    run_all(tmp_path, launcher, [replace(EAGER, threads=2)])
    hello = launcher.workers[0].asked[0][1]
    assert hello["core"] is None and hello["lock"] is None and hello["threads"] == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interruption_keeps_what_is_finished(tmp_path: Path, jobs: int) -> None:
    launcher = FakeLauncher()

    def interrupt(record: Record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path, launcher, CASES, jobs=jobs, on_record=interrupt)
    assert launcher.closed and all(worker.ended for worker in launcher.workers)
    lines = list(read_lines(tmp_path / "ledger.jsonl"))
    # Cases that were ended on the way leave no record, least of all a broken one.
    assert 1 <= len(lines) <= jobs and all(payload["status"] == "ok" for _, _, payload in lines)  # type: ignore[index]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_defect_is_not_hidden_in_a_record(tmp_path: Path) -> None:
    launcher = FakeLauncher(failures={("static", "decode"): ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        run_all(tmp_path, launcher, CASES)
    assert launcher.closed


def test_a_full_disk_is_raised(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        run_all(tmp_path, FakeLauncher(), CASES)


def test_effort_is_no_part_of_the_identity(tmp_path: Path) -> None:
    short = measure(EAGER, FakeLauncher(), folder=tmp_path, effort=Effort(repeats=1), processes=1)
    long = measure(EAGER, FakeLauncher(), folder=tmp_path, effort=Effort.rigorous())
    assert short.case.id == long.case.id
    assert len(long.metrics["decode_seconds_per_token"]["samples"]) == 8
    assert json.dumps(long.to_json(), allow_nan=False)
