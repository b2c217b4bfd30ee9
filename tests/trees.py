"""asv results trees for tests, written with asv's own code, and git repositories with known commits."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asv.results import Results
from asv.runner import BenchmarkResult

from vlmbench.schema import Case, Envelope, Record, append_line, encode_line

NAN = float("nan")
PARAMS = [["'llava-tiny'"], ["'dynamic'", "'static'"], ["'eager'", "'compile'"]]
NAMES = ["model", "cache", "runner"]


def describe(
    name: str,
    params: Sequence[Sequence[str]] = (),
    names: Sequence[str] = (),
    unit: str = "seconds",
    version: str = "1",
) -> dict[str, Any]:
    """An entry of benchmarks.json."""
    params = [list(axis) for axis in params]
    return {
        "name": name,
        "params": params,
        "param_names": list(names),
        "unit": unit,
        "version": version,
        "type": "track",
    }


def write_benchmarks(root: Path, *entries: Mapping[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {str(entry["name"]): entry for entry in entries}
    (root / "benchmarks.json").write_text(json.dumps({**data, "version": 2}))


def write_results(
    root: Path,
    commit: str,
    values: Mapping[str, Sequence[Any]],
    entries: Sequence[Mapping[str, Any]],
    *,
    machine: str = "box",
    env: str = "virtualenv-py3.11",
    date: int = 1_700_000_000_000,
    record_samples: bool = True,
) -> Path:
    """One result file by asv's own code. A value is a number, None, NaN or a list of samples."""
    results = Results({"machine": machine, "python": "3.11"}, {}, commit, date, "3.11", env, {})
    described = {entry["name"]: entry for entry in entries}
    for name, given in values.items():
        samples = [value if isinstance(value, list) else None for value in given]
        number = [1 if isinstance(value, list) else None for value in given]
        result = [value[0] if isinstance(value, list) else value for value in given]
        done = BenchmarkResult(result, samples, number, 0, "", None)
        results.add_result(described[name], done, duration=1.5, record_samples=record_samples)
    (root / machine).mkdir(parents=True, exist_ok=True)
    (root / machine / "machine.json").write_text(json.dumps({"machine": machine, "cpu": "x", "version": 1}))
    results.save(str(root))
    return root / results._filename


def write_record(root: Path, commit: str, record: Record, *, machine: str = "box", file: str = "records") -> Path:
    """Append one record to a ledger beside asv's files."""
    path = root / machine / f"{file}.jsonl"
    envelope = Envelope("record", "run1", "vlmbench", commit, machine, record.case.id)
    append_line(path, encode_line(envelope, record.to_json()))
    return path


def record(cache: str = "dynamic", runner: str = "eager", **given: Any) -> Record:
    """A record of llava-tiny; `batch` goes to the case, everything else to the record."""
    case = Case("llava-tiny", cache, runner, batch=given.pop("batch", 1))
    return Record(case, given.pop("status", "ok"), **given)


def git(repo: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(repo), *settings, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make_repo(path: Path, subjects: Sequence[str]) -> list[str]:
    """A repository on branch main with one empty commit a subject; their hashes, oldest first."""
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    hashes = []
    for subject in subjects:
        git(path, "commit", "-q", "--allow-empty", "-m", subject)
        hashes.append(git(path, "rev-parse", "HEAD"))
    return hashes
