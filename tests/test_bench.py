"""scripts/bench: what is measured already, the machine's entry, rows as they come, what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vlmbench import bench, kinds, provenance, suite
from vlmbench.errors import UsageError
from vlmbench.metrics import BY_KEY
from vlmbench.schema import Case, Envelope, Record, append_line, encode_line

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MACHINE = "box"
CASES = [kinds.make_case("llava-tiny", cache, "eager") for cache in ("dynamic", "static")]
KEYS = ("decode_seconds_per_token", "cache_bytes")


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(provenance, "detect_device", lambda: "cpu")


def _record(case: Case, status: Any = "ok") -> Record:
    entry = {"unit": "seconds", "value": 0.002, "samples": [0.002, 0.003, 0.001]}
    metrics = {KEYS[0]: entry, KEYS[1]: {"unit": "bytes", "value": 4096}}
    if status == "ok":
        return Record(case, status, metrics=metrics)
    return Record(case, status, reason="step 3 differs", metrics={KEYS[1]: metrics[KEYS[1]]})


def _add(root: Path, record: Record, run: str = "r1") -> None:
    envelope = Envelope("record", run, "vlmbench", COMMIT, MACHINE, record.case.id)
    append_line(_ledger(root), encode_line(envelope, record.to_json()))


def _add_suite(root: Path, cases: list[Case]) -> None:
    envelope = Envelope(suite.SUITE_LINE, "r1", "vlmbench", COMMIT, MACHINE, suite.SUITE_LINE)
    append_line(_ledger(root), encode_line(envelope, {"cases": [case.id for case in cases]}))


def _ledger(root: Path) -> Path:
    return suite.records_file(root, MACHINE, COMMIT, "virtualenv-py3.11")


def _write_asv(root: Path, value: float | None = 4096.0, keys: tuple[str, ...] = KEYS) -> None:
    """asv's files for these cases: a number, NaN (skipped) or None (failed) in every series."""
    params = [["'llava-tiny'"], ["'dynamic'", "'static'"], ["'eager'"]]
    names = ["model", "cache", "runner"]
    benchmarks = {
        f"all.track_{key}": {
            "name": f"all.track_{key}",
            "unit": BY_KEY[key].unit,
            "params": params,
            "param_names": names,
        }
        for key in KEYS
    }
    results = {f"all.track_{key}": [[value] * 2, params, "1"] for key in keys}
    folder = root / "results"
    folder.mkdir(exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps({**benchmarks, "version": 2}))
    asv = {
        "commit_hash": COMMIT,
        "env_name": "virtualenv-py3.11",
        "date": 0,
        "params": {"machine": MACHINE},
        "result_columns": ["result", "params", "version"],
        "results": results,
        "version": 2,
    }
    _ledger(root).with_suffix(".json").write_text(json.dumps(asv))


def _measured(root: Path) -> None:
    for case in CASES:
        _add(root, _record(case))
    _add_suite(root, CASES)
    _write_asv(root)


def test_a_commit_with_all_records_and_series_is_measured(tmp_path: Path) -> None:
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT) == "its suite has not been measured whole"
    _measured(tmp_path)
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT) == ""
    assert bench.unmeasured(tmp_path, "other", COMMIT) != ""
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT[::-1]) != ""


def test_what_an_interrupted_run_leaves_is_not_measured(tmp_path: Path) -> None:
    _add(tmp_path, _record(CASES[0]))
    _add_suite(tmp_path, CASES)
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT) == "llava-tiny/static/eager has no record"
    _add(tmp_path, _record(CASES[1]))
    _write_asv(tmp_path, keys=KEYS[:1])
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT) == "all.track_cache_bytes has not run"
    _write_asv(tmp_path, value=float("nan"))
    assert "has no decode_seconds_per_token in asv's results" in bench.unmeasured(tmp_path, MACHINE, COMMIT)


def test_a_broken_case_does_not_keep_a_commit_from_being_measured(tmp_path: Path) -> None:
    _write_asv_for_broken(tmp_path)
    assert bench.unmeasured(tmp_path, MACHINE, COMMIT) == ""


def _write_asv_for_broken(root: Path) -> None:
    for case in CASES:
        _add(root, _record(case, "broken"))
    _add_suite(root, CASES)
    _write_asv(root, value=None)


def test_the_machine_is_added_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "home/.asv-machine.json"
    other = {"machine": "lab", "os": "mine"}
    path.write_text(json.dumps({"lab": other, "version": 1}))
    for _ in range(2):
        bench.register_machine(MACHINE)
    known = json.loads(path.read_text())
    assert known["lab"] == other
    assert known[MACHINE]["machine"] == MACHINE
    known[MACHINE]["cpu"] = "as somebody wants it called"
    path.write_text(json.dumps(known))
    bench.register_machine(MACHINE)
    assert json.loads(path.read_text()) == known


def test_rows_come_while_asv_runs_and_old_ones_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    _add(tmp_path, _record(CASES[0]), run="old")
    seen = {("old", CASES[0].id)}
    log = tmp_path / "log"
    log.write_text("· Creating environments\n")
    asv = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    for case in CASES:
        _add(tmp_path, _record(case))
    console = Console(width=120)
    assert bench.watch(tmp_path, console, MACHINE, COMMIT, asv, log, seen) == 2
    out = capsys.readouterr().out
    assert out.count("dynamic eager") == 1
    assert out.count("static eager") == 1


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.chdir(root)
    subprocess.run(["git", "init", "-q", "-b", "main"], check=True)
    _git_commit("first")
    monkeypatch.setenv(provenance.MACHINE_VARIABLE, MACHINE)
    monkeypatch.setattr(bench, "LOOK", 0.01)
    return root


def _git_commit(subject: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", subject], check=True)


def _fake_asv(monkeypatch: pytest.MonkeyPatch, code: str) -> list[tuple[str, ...]]:
    called: list[tuple[str, ...]] = []

    def command(*arguments: str) -> list[str]:
        called.append(arguments)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(bench, "_command", command)
    return called


def test_a_failing_asv_shows_the_end_of_its_log(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fake_asv(monkeypatch, "print('no such [wheel]'); raise SystemExit(1)")
    assert bench.main([]) == 1
    out = capsys.readouterr().out
    assert "asv failed" in out
    assert "no such [wheel]" in out


def test_an_interrupt_ends_asv_before_us(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import os, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    open("ended", "w").close()
"""
    _fake_asv(monkeypatch, code)

    def interrupted(*given: Any) -> int:
        time.sleep(0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "watch", interrupted)
    assert bench.main([]) == 130
    assert (repository / "ended").exists()
    assert "interrupted: finished records are kept" in capsys.readouterr().err


def test_measured_commits_are_not_measured_again_but_compared(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "switch", "-q", "-c", "change"], check=True)
    _git_commit("second")
    called = _fake_asv(monkeypatch, "print('|   | n/a  | n/a | n/a | skipped |'); print('|   | 1 | 2 | 2.0 | kept |')")
    monkeypatch.setattr(bench, "unmeasured", lambda root, machine, commit: "")
    head = bench._commit("HEAD", repository)
    envelope = Envelope("record", "r", "vlmbench", head, MACHINE, CASES[0].id)
    path = suite.records_file(repository, MACHINE, head, "e")
    append_line(path, encode_line(envelope, _record(CASES[0], "broken").to_json()))
    assert bench.main([]) == 1
    assert [arguments[0] for arguments in called] == ["compare"]
    assert called[0][-2:] == (bench._commit("main", repository), head)
    out = capsys.readouterr().out
    assert out.count("measured already") == 2
    assert "kept" in out
    assert "skipped" not in out
    assert "llava-tiny/dynamic/eager is broken: step 3 differs" in out


def test_on_main_the_last_measured_commit_is_compared_with(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench._commit("HEAD", repository)
    for subject in ("second", "third"):
        _git_commit(subject)
    called = _fake_asv(monkeypatch, "pass")
    monkeypatch.setattr(bench, "unmeasured", lambda root, machine, commit: "")
    assert bench.main([]) == 0
    assert called == []
    stored = suite.records_file(repository, MACHINE, first, "e").with_suffix(".json")
    stored.parent.mkdir(parents=True)
    stored.write_text("{}")
    assert bench.main([]) == 0
    assert [arguments[-2:] for arguments in called] == [(first, bench._commit("HEAD", repository))]


def test_wrong_uses_say_so(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--against", "no-such"]) == 2
    assert "'no-such' is no commit" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no commit"):
        bench._commit("HEAD~7", repository)
    assert bench.main(["--jobs", "-1"]) == 2
