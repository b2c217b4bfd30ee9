"""Stock asv over a clone of this repository: run, compare, show, publish, with its own environment."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlmbench import bench
from vlmbench.results import read_tree

ROOT = Path(__file__).resolve().parent.parent
MACHINE = "test-box"
#: One case, all its metrics: asv matches this against `benchmark('model', 'cache', 'runner')`.
ONE_CASE = "'llava-tiny', 'static', 'eager'"
PHASES = ("vision", "prefill", "decode", "generate", "memory")

pytestmark = pytest.mark.slow


class Project:
    """A repository of two commits with the files of this checkout, and asv run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "clone", folder / "home"
        self.home.mkdir(parents=True)
        self.folder.mkdir()
        listed = self._run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        for name in filter(None, listed.split("\0")):
            if not name.startswith("results/") and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        self._run("git", "init", "-q", "-b", "main")
        self.base = self.commit("base")
        with (self.folder / "vlmbench/__init__.py").open("a") as file:
            file.write("# A change that changes nothing.\n")
        self.head = self.commit("head")

    def commit(self, subject: str) -> str:
        self._run("git", "add", "-A")
        self._run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", subject)
        return self._run("git", "rev-parse", "HEAD").strip()

    def asv(self, *arguments: str) -> str:
        return self._run(sys.executable, "-m", "asv", *arguments)

    def _run(self, *command: str, cwd: Path | None = None) -> str:
        # asv's list of machines lies in the home folder; pip's cache stays where it is.
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "XDG_CACHE_HOME": cache,
            "VLMBENCH_DEVICE": "cpu",
        }
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("asv"))
    (made.home / ".asv-machine.json").write_text(
        json.dumps({MACHINE: {"machine": MACHINE, "os": "test"}, "version": 1})
    )
    for commit in (made.base, made.head):
        made.asv("run", f"{commit}^!", "-b", ONE_CASE, "--show-stderr", "--record-samples")
    return made


def _rows(project: Project, commit: str) -> Any:
    frame = read_tree(project.folder / "results").frame
    case = frame["params"].map(lambda p: tuple(p.values()) == ("llava-tiny", "static", "eager"))
    return frame[(frame["commit"] == commit) & (frame["machine"] == MACHINE) & case]


def test_every_phase_has_values_from_several_processes(project: Project) -> None:
    rows = _rows(project, project.head)
    assert set(rows["status"]) == {"ok"} | ({"skipped"} & set(rows["status"]))
    stored = rows[rows["status"] == "ok"]
    assert {name.partition(".")[0] for name in stored["benchmark"]} == set(PHASES)
    seconds = stored[stored["metric"] == "decode_seconds_per_token"].iloc[0]
    assert len(seconds["samples"]) == 3
    assert seconds["ci_low"] > 0 or math.isinf(seconds["ci_low"])


def test_one_record_lies_beside_asvs_file_and_holds_the_same_numbers(project: Project) -> None:
    tree = read_tree(project.folder / "results")
    assert not tree.problems
    records = {key: record for key, record in tree.records.items() if key[0] == project.head}
    assert [case for _, _, case in records] == ["llava-tiny/static/eager"]
    (record,) = records.values()
    rows = _rows(project, project.head)
    stored = {row.metric: row.value for row in rows[rows["status"] == "ok"].itertuples()}
    assert stored == pytest.approx({key: entry["value"] for key, entry in record.metrics.items()}, rel=1e-5)


def test_exact_counters_agree_between_the_commits(project: Project) -> None:
    base, head = (
        {row.metric: row.value for row in _rows(project, commit).itertuples() if row.unit == "count"}
        for commit in (project.base, project.head)
    )
    assert head == pytest.approx(base, nan_ok=True)
    assert head["aten_ops_per_token"] > 0


def test_compare_show_and_publish_work(project: Project) -> None:
    compared = project.asv("compare", "main~1", "main")
    for phase in PHASES:
        assert any(f" {phase}.track_" in line and ONE_CASE in line for line in compared.splitlines()), phase
    assert "decode.track_decode_seconds_per_token" in project.asv("show", "main")
    project.asv("publish")
    index = json.loads((project.folder / ".asv/html/index.json").read_text())
    assert "memory.track_cache_bytes" in index["benchmarks"]
    assert index["params"]["machine"] == [MACHINE]


def test_a_selection_does_not_count_as_a_measured_commit(project: Project) -> None:
    assert bench.unmeasured(project.folder, MACHINE, project.head) == "its suite has not been measured whole"
