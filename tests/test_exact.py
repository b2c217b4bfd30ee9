"""Exact counters are exact: equal over five fresh processes, compiled ones too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_worker import converse

from vlmbench import kinds


def counted(cache: str, runner: str, inductor: Path) -> dict:
    case = kinds.make_case("llava-tiny", cache, runner)
    asks: list[dict] = [
        {"do": "hello", "device": "cpu", "threads": 1},
        {"do": "open", "cases": [case.to_json()]},
        {"do": "block", "case": case.id, "phase": "compile", "n": 4},
        {"do": "block", "case": case.id, "phase": "requests", "n": 3},
        {"do": "check", "case": case.id},
        {"do": "count", "case": case.id},
        {"do": "close"},
    ]
    answers = converse(asks, TORCHINDUCTOR_CACHE_DIR=str(inductor))
    count = answers[5]
    return {"metrics": count["metrics"], "ops": count["facts"]["ops"], "kernels": count["facts"].get("kernels")}


@pytest.mark.parametrize("cache", kinds.caches())
def test_eager_counters(cache: str, tmp_path: Path) -> None:
    seen = [json.dumps(counted(cache, "eager", tmp_path), sort_keys=True) for _ in range(5)]
    assert len(set(seen)) == 1, seen


@pytest.mark.slow
@pytest.mark.parametrize("cache", kinds.caches())
def test_compiled_counters(cache: str, tmp_path: Path) -> None:
    seen = [json.dumps(counted(cache, "compile", tmp_path / "warm"), sort_keys=True) for _ in range(5)]
    # Generated anew in an empty cache, the code is the same too.
    if cache == "static":
        seen.append(json.dumps(counted(cache, "compile", tmp_path / "cold"), sort_keys=True))
    assert len(set(seen)) == 1, seen
