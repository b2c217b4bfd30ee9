"""The command as a user types it, with real workers and inductor: three caches × two runners."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmbench import kinds
from vlmbench.check import ROOT
from vlmbench.metrics import BY_KEY
from vlmbench.schema import read_lines

MEASURE = [sys.executable, "-m", "vlmbench", "measure", "--model", "llava-tiny"]


@pytest.mark.slow
def test_three_caches_and_two_runners_give_six_ok_lines(tmp_path: Path) -> None:
    caches = [part for cache in ("dynamic", "static", "tensor") for part in ("--cache", cache)]
    command = [*MEASURE, *caches, "--runner", "eager", "--runner", "compile", "--json", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["status"] for r in records] == ["ok"] * 6, [r["reason"] for r in records]
    for record in records:
        assert {"case", "metrics", "facts", "checks", "versions", "device", "protocol"} <= set(record)
        reference = next(c for c in record["checks"] if c["name"] == "reference")
        assert reference["reference"] == ROOT
        assert 0 <= reference["error"] < reference["tolerance"] == 1e-4
        assert set(record["metrics"]) <= set(BY_KEY)
        assert record["facts"]["asked"] == {
            name: record["facts"]["observed"][name] for name in record["facts"]["asked"]
        }
        assert len(record["metrics"]["decode_seconds_per_token"]["samples"]) == 3
        compiles = kinds.RUNNERS[record["case"]["runner"]].compiles
        assert ("compile_warm_seconds" in record["metrics"]) is compiles
        requests = record["metrics"]["first_request_seconds"]["samples"]
        assert len(requests) == (2 if compiles else 3)
    by_name = {(r["case"]["cache"], r["case"]["runner"]): r["metrics"] for r in records}
    # The same operators on the same weights: compiled decode captures one graph for both static shapes.
    for cache in ("static", "tensor"):
        assert by_name[cache, "compile"]["graphs.decode"]["value"] == 1
        assert by_name[cache, "compile"]["graph_breaks.decode"]["value"] == 0
    assert by_name["dynamic", "compile"]["recompiles.decode"]["value"] == 1
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 6
    assert all(len(line) <= 20_000 for line in (tmp_path / "records.jsonl").read_bytes().splitlines())


def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(tmp_path: Path) -> None:
    command = [*MEASURE, "--cache", "dynamic", "--cache", "static", "--runner", "eager", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--processes", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ledger = tmp_path / "records.jsonl"
    end = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_bytes().endswith(b"\n")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "1 of 2 records are kept" in errors
    assert [envelope is not None for _, envelope, _ in read_lines(ledger)] == [True]
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if _mentions(p, str(tmp_path))]
    assert not left


def _mentions(environ: Path, text: str) -> bool:
    try:
        return text.encode() in environ.read_bytes()
    except OSError:
        return False
