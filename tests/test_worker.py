"""The worker as a process: its protocol, and an environment that has only what it may need."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vlmbench
from vlmbench import kinds

PACKAGE = Path(vlmbench.__file__).parent
CASE = kinds.make_case("llava-tiny", "tensor", "eager", new_tokens=8)


def converse(requests: list[dict | str], *python: str, **environment: str) -> list[dict]:
    """The answers of a worker to some requests."""
    lines = "".join((r if isinstance(r, str) else json.dumps({"id": i, **r})) + "\n" for i, r in enumerate(requests))
    done = subprocess.run(
        [*(python or (sys.executable,)), "-m", "vlmbench.worker"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_mistakes_are_answered_and_the_worker_goes_on() -> None:
    hello = {"do": "hello", "device": "cpu", "threads": 1}
    short = {**CASE.to_json(), "cache_length": 48, "new_tokens": 8}
    longer = {**CASE.to_json(), "cache_length": 56, "cache": "static"}
    answers = converse(
        [
            "not json",
            {"do": "dance"},
            {**hello, "device": "tpu"},
            hello,
            {"do": "block", "case": CASE.id, "phase": "decode", "n": 1},
            {"do": "open", "cases": [{**CASE.to_json(), "dtype": "float8"}]},
            {"do": "open", "cases": [CASE.to_json(), short, longer]},
            {"do": "block", "case": CASE.id, "phase": "sing", "n": 1},
            {"do": "block", "case": CASE.id, "phase": "compile", "n": 4},
            {"do": "block", "case": CASE.id, "phase": "decode", "n": 2},
            {"do": "close"},
        ]
    )
    assert [a["ok"] for a in answers] == [False] * 3 + [True] + [False] * 2 + [True] + [False] * 2 + [True] * 2
    reasons = [a["error"]["reason"] if not a["ok"] else "" for a in answers]
    assert "unknown verb 'dance': valid are hello, open" in reasons[1]
    assert "unknown device 'tpu'" in reasons[2]
    assert "not open: open are none" in reasons[4]
    assert "unknown dtype 'float8': valid are float32, bfloat16, float16" in reasons[5]
    assert "unknown phase 'sing'" in reasons[7]
    assert answers[8]["error"]["kind"] == "unsupported"
    opened = answers[6]["cases"]
    assert "facts" in opened[CASE.id]
    failed = next(a["error"] for a in opened.values() if "error" in a)
    assert failed["kind"] == "usage" and "give --cache-length 56 or more" in failed["reason"]
    assert len(answers[9]["samples"]) == 2 * CASE.new_tokens
    assert answers[10]["rss_bytes"] > 100_000_000


def _closure(names: list[str]) -> set[str]:
    """Distributions these need, extras left out."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        names += [re.match(r"[\w.-]+", text)[0] for text in wanted if "extra ==" not in text]
    return found


def test_it_runs_where_only_torch_transformers_numpy_and_pillow_are(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in _closure(["torch", "transformers", "numpy", "pillow"]):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    (site / "vlmbench").symlink_to(PACKAGE)
    # -S: no site-packages at all, only what was linked above.
    alone = [sys.executable, "-S"]
    for absent in ("asv", "pandas", "plotly"):
        done = subprocess.run(
            [*alone, "-c", f"import {absent}"], env={"PYTHONPATH": str(site)}, capture_output=True, check=False
        )
        assert done.returncode == 1, absent
    answers = converse(
        [
            {"do": "hello", "device": "cpu", "threads": 1},
            {"do": "open", "cases": [CASE.to_json()]},
            {"do": "check", "case": CASE.id},
            {"do": "count", "case": CASE.id},
            {"do": "block", "case": CASE.id, "phase": "decode", "n": 1},
            {"do": "close"},
        ],
        *alone,
        PYTHONPATH=str(site),
    )
    assert all(a["ok"] for a in answers), answers
    assert all(c["passed"] for c in answers[2]["checks"])


def test_it_ends_when_its_parent_is_killed_in_the_middle_of_a_block(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, json, time
worker = subprocess.Popen([sys.executable, "-m", "vlmbench.worker"], stdin=subprocess.PIPE, start_new_session=True)
ask = lambda **request: (worker.stdin.write((json.dumps(request) + chr(10)).encode()), worker.stdin.flush())
ask(do="hello", device="cpu", threads=1)
ask(do="open", cases=[{CASE.to_json()!r}])
ask(do="block", case={CASE.id!r}, phase="decode", n=100_000)
print(worker.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    with (tmp_path / "out").open("w") as out:
        parent = subprocess.Popen(
            [sys.executable, "-c", script], stdout=out, stderr=subprocess.DEVNULL, env=environment
        )
        pid = _within(30, lambda: (tmp_path / "out").read_text().splitlines()[:1])[0]
        # Two answers behind it, it is in the block.
        _within(60, lambda: (tmp_path / "out").read_text().count('"ok": true') >= 2)
        parent.kill()
        parent.wait()
    assert _within(
        20, lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


def _within(seconds: float, found: Callable[[], Any]) -> Any:
    end = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < end, "too late"
        time.sleep(0.2)
    return answer
