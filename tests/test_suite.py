"""The suite that asv runs: one record a case, each metric read from it, records beside asv's files."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from asv_runner.benchmarks.mark import SkipNotImplemented

import benchmarks
from vlmbench import kinds, launch, measure, provenance, suite
from vlmbench.errors import Unsupported, VlmbenchError
from vlmbench.metrics import BY_KEY
from vlmbench.schema import PROTOCOL, Case, Envelope, Record, append_line, encode_line, read_lines

MODEL, CACHE = "llava-tiny", "static"


class FakeMeasure:
    """Stands for measure_all: appends one record a case, and counts how often it was asked."""

    def __init__(self, **record: Any) -> None:
        self.record = {"status": "ok", "metrics": _metrics(), **record}
        self.asked: list[list[str]] = []
        self.given: dict[str, Any] = {}

    def __call__(self, cases: list[Case], launcher: Any, **given: Any) -> list[Record]:
        self.asked.append([case.id for case in cases])
        self.given = given
        for case in cases:
            record = Record(case=case, **self.record)
            envelope = Envelope("record", given["run"], given["subject"], given["commit"], given["machine"], case.id)
            append_line(given["ledger"], encode_line(envelope, record.to_json()))
            given["on_record"](record)
        return []


class NoLauncher:
    """Stands for LocalLauncher: nothing may be started."""

    def __init__(self, **given: Any) -> None:
        pass

    def __enter__(self) -> NoLauncher:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _metrics() -> dict[str, Any]:
    seconds = {"unit": "seconds", "value": 2.0, "samples": [1.0, 2.0, 9.0]}
    return {"decode_seconds_per_token": seconds, "cache_bytes": {"unit": "bytes", "value": 4096}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMeasure:
    return _install(monkeypatch, FakeMeasure(), tmp_path)


def _install(monkeypatch: pytest.MonkeyPatch, fake: FakeMeasure, tmp_path: Path) -> FakeMeasure:
    monkeypatch.setattr(measure, "measure_all", fake)
    monkeypatch.setattr(launch, "LocalLauncher", NoLauncher)
    for name in ("PREFETCH", "JOBS", "RIGOROUS"):
        monkeypatch.delenv(f"VLMBENCH_{name}", raising=False)
    monkeypatch.setenv("VLMBENCH_MACHINE", "box")
    monkeypatch.setenv("VLMBENCH_DEVICE", "cpu")
    monkeypatch.setenv("ASV_CONF_DIR", str(tmp_path / "project"))
    monkeypatch.setenv("ASV_COMMIT", "0123456789abcdef")
    monkeypatch.setenv("ASV_ENV_NAME", "virtualenv-py3.11")
    return fake


def _published(tmp_path: Path, commit: str = "01234567") -> Path:
    return tmp_path / "project" / "results" / "box" / f"{commit}-virtualenv-py3.11.jsonl"


def test_a_case_is_measured_once_for_all_its_metrics(fake: FakeMeasure, tmp_path: Path) -> None:
    seconds = suite.benchmark("decode_seconds_per_token")(str(tmp_path), MODEL, CACHE, "eager")
    count = suite.benchmark("cache_bytes")(str(tmp_path), MODEL, CACHE, "eager")
    assert seconds == {"samples": [1.0, 2.0, 9.0], "number": 1}
    assert count == 4096
    assert fake.asked == [[f"{MODEL}/{CACHE}/eager"]]


def test_threads_that_need_the_same_case_measure_it_once(fake: FakeMeasure, tmp_path: Path) -> None:
    case = kinds.make_case(MODEL, CACHE, "eager")
    # The signal handler needs the main thread; the lock is what is tested.
    with suite._locked(tmp_path / "x"):
        waiting = threading.Thread(target=lambda: suite._locked(tmp_path / "x").__enter__(), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert suite._line(tmp_path / suite.LEDGER, case) is None


def test_a_case_whose_name_begins_another_is_not_taken_for_it(fake: FakeMeasure, tmp_path: Path) -> None:
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    suite.record_for(tmp_path, MODEL, CACHE, "compile")
    assert fake.asked == [[f"{MODEL}/{CACHE}/eager"], [f"{MODEL}/{CACHE}/compile"]]


def test_a_damaged_line_in_the_ledger_is_measured_again(fake: FakeMeasure, tmp_path: Path) -> None:
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    ledger = tmp_path / suite.LEDGER
    ledger.write_bytes(ledger.read_bytes()[:-20])
    with ledger.open("ab") as file:
        file.write(b"\n")
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    assert len(fake.asked) == 2


def test_what_the_case_does_not_have_is_skipped(fake: FakeMeasure, tmp_path: Path) -> None:
    with pytest.raises(SkipNotImplemented, match=r"llava-tiny/static/eager has no retained_bytes"):
        suite.benchmark("retained_bytes")(str(tmp_path), MODEL, CACHE, "eager")


def test_unsupported_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, FakeMeasure(status="unsupported", reason="no such kernel", metrics={}), tmp_path)
    with pytest.raises(SkipNotImplemented, match="no such kernel"):
        suite.benchmark("cache_bytes")(str(tmp_path), MODEL, CACHE, "eager")


def test_broken_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, FakeMeasure(status="broken", reason="step 3 differs by 0.5", metrics={}), tmp_path)
    with pytest.raises(VlmbenchError, match="llava-tiny/static/eager is broken: step 3 differs by"):
        suite.benchmark("cache_bytes")(str(tmp_path), MODEL, CACHE, "eager")


def test_a_model_narrowed_to_some_caches_says_why(fake: FakeMeasure, tmp_path: Path) -> None:
    narrowed = next(m for m in kinds.models().values() if m.suite == "default" and m.caches)
    other = next(c for c in kinds.caches() if c not in narrowed.caches)
    with pytest.raises(Unsupported, match=narrowed.why[:20]):
        suite.record_for(tmp_path, narrowed.name, other, "eager")
    assert fake.asked == []


def test_what_an_older_commit_does_not_have_is_skipped(fake: FakeMeasure, tmp_path: Path) -> None:
    with pytest.raises(SkipNotImplemented, match="unknown cache 'ring'"):
        suite.benchmark("cache_bytes")(str(tmp_path), MODEL, "ring", "eager")
    assert fake.asked == []


def test_records_are_published_beside_asvs_file(fake: FakeMeasure, tmp_path: Path) -> None:
    for runner in ("eager", "compile"):
        suite.record_for(tmp_path, MODEL, CACHE, runner)
    lines = list(read_lines(_published(tmp_path)))
    assert [e.case for _, e, _ in lines if e] == [f"{MODEL}/{CACHE}/compile", f"{MODEL}/{CACHE}/eager"]
    assert {(e.commit, e.machine, e.subject) for _, e, _ in lines if e} == {("0123456789abcdef", "box", "vlmbench")}
    assert list(_published(tmp_path).parent.iterdir()) == [_published(tmp_path)]


def test_a_rerun_replaces_its_cases_and_keeps_the_others(fake: FakeMeasure, tmp_path: Path) -> None:
    for number, runner in enumerate(("eager", "compile", "eager")):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        suite.record_for(scratch, MODEL, CACHE, runner)
    runs = {e.case.split("/")[2]: e.run for _, e, _ in read_lines(_published(tmp_path)) if e}
    assert set(runs) == {"eager", "compile"}
    assert runs["eager"].endswith("-2")
    assert runs["compile"].endswith("-1")


def test_a_damaged_line_is_dropped_when_publishing(fake: FakeMeasure, tmp_path: Path) -> None:
    _published(tmp_path).parent.mkdir(parents=True)
    _published(tmp_path).write_text('{"schema": 1, "cut of')
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    assert [bool(e) for _, e, _ in read_lines(_published(tmp_path))] == [True]


def test_the_device_is_looked_for_once_a_run(
    fake: FakeMeasure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLMBENCH_DEVICE")
    seen: list[str] = []
    monkeypatch.setattr(provenance, "detect_device", lambda: seen.append("asked") or "cuda")
    for runner in ("eager", "compile"):
        assert suite.record_for(tmp_path, MODEL, CACHE, runner).case.device == "cuda"
    assert seen == ["asked"]


def test_nothing_is_published_outside_a_commit(
    fake: FakeMeasure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ASV_COMMIT")
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    assert not (tmp_path / "project").exists()


def test_the_folder_of_results_is_asvs(tmp_path: Path) -> None:
    (tmp_path / "asv.conf.json").write_text('{"results_dir": "elsewhere"}')
    assert suite.records_file(tmp_path, "box", "0123456789", "e") == tmp_path / "elsewhere/box/01234567-e.jsonl"


def test_prefetch_measures_the_whole_suite_at_once(
    fake: FakeMeasure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert suite.setup_cache() == str(tmp_path)
    assert fake.asked == []
    monkeypatch.setenv("VLMBENCH_PREFETCH", "1")
    monkeypatch.setenv("VLMBENCH_JOBS", "2")
    monkeypatch.setenv("VLMBENCH_RIGOROUS", "1")
    suite.setup_cache()
    assert fake.asked == [[case.id for case in kinds.default_cases()]]
    assert fake.given["jobs"] == 2
    assert fake.given["effort"].processes == suite.RIGOROUS
    suite.record_for(tmp_path, MODEL, CACHE, "eager")
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("known", "name"), [({"lab": {}}, "lab"), ({"lab": {}, "node": {}}, "node"), ({"a": {}, "b": {}}, "own")]
)
def test_the_machine_is_the_one_asv_takes(
    known: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(provenance, "machine_name", lambda: "own")
    monkeypatch.delenv("VLMBENCH_MACHINE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(suite.platform, "node", lambda: "node")
    (tmp_path / ".asv-machine.json").write_text(json.dumps({**known, "version": 1}))
    assert suite.machine() == name


def _tracks() -> dict[str, Any]:
    found = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        loaded = importlib.import_module(f"benchmarks.{module.name}")
        assert loaded.setup_cache is suite.setup_cache
        found.update({f"{module.name}.{n}": f for n, f in vars(loaded).items() if n.startswith("track_")})
    return found


def test_every_metric_has_one_benchmark() -> None:
    names = [name.partition(".")[2] for name in _tracks()]
    assert sorted(names) == sorted("track_" + key.replace(".", "_") for key in BY_KEY)
    for name, track in _tracks().items():
        assert track.__name__ == name.partition(".")[2]
        assert track.version == PROTOCOL
        assert track.unit in ("seconds", "bytes", "count")


def test_parameters_follow_the_listing() -> None:
    track = _tracks()["decode.track_decode_seconds_per_token"]
    assert track.params[1:] == [list(kinds.caches()), list(kinds.RUNNERS)]
    assert {case.model for case in kinds.default_cases()} == set(track.params[0])
    assert _tracks()["graph.track_graphs_decode"].params[2] == ["compile"]


def test_a_benchmark_process_imports_only_what_it_reads_with() -> None:
    heavy = ("numpy", "pandas", "rich", "torch", "typer", "vlmbench.measure")
    code = f"import sys, benchmarks.decode; print([m for m in {heavy} if m in sys.modules])"
    root = Path(benchmarks.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: Starts a process that measures, says its id, and waits to be killed.
_ASV = """
import subprocess, sys, time
code = "import time; from vlmbench import suite\\nwith suite._ended_with_asv(): time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("killed", ["asv", "bench"])
def test_what_measures_ends_when_asv_or_bench_is_killed(killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setenv(suite.BENCH_VARIABLE, str(bench.pid))
    root = Path(benchmarks.__file__).parent.parent
    asv = subprocess.Popen(
        [sys.executable, "-c", _ASV],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert asv.stdout is not None
        child = int(asv.stdout.readline())
        time.sleep(1.5)
        assert suite._alive(child)
        (asv if killed == "asv" else bench).kill()
        if killed == "bench":
            bench.wait(30)
        # With bench gone asv is interrupted; the real one passes that on before it ends.
        assert asv.wait(30) != 0
        deadline = time.monotonic() + 30
        while suite._alive(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not suite._alive(child)
    finally:
        asv.kill()
        bench.kill()
