"""Caches that are wrong on purpose are caught, each for its own reason, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import capture_only, open_session

from vlmbench import check, kinds
from vlmbench.assemble import failed_check
from vlmbench.launch import LocalLauncher
from vlmbench.measure import Effort, measure_all

WRONG = Path(__file__).parent / "wrong"
QUICK = Effort(processes=1, repeats=1, decode_blocks=1)


@pytest.fixture(autouse=True)
def _wrong_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMBENCH_KINDS", str(WRONG))


@pytest.mark.parametrize(
    ("cache", "name", "words"),
    [
        ("drops_token", "reference", "token differs first at step"),
        ("ignores_image", "image", "it is not used"),
        ("returns_nan", "finite", "NaN or infinity in the logits from step 10 on"),
    ],
)
def test_a_wrong_cache_fails_the_check_made_for_it(cache: str, name: str, words: str) -> None:
    session = open_session(kinds.make_case("llava-tiny", cache, "eager"))
    checks, _, _ = check.run(session)
    first = next(c for c in checks if not c["passed"])
    assert first["name"] == name
    assert words in first["detail"]
    assert f"check '{name}' failed" in failed_check(checks)


def test_a_cache_that_silently_stays_eager_is_caught_by_what_was_asked_for() -> None:
    with capture_only():
        session = open_session(kinds.make_case("llava-tiny", "silently_eager", "compile"))
        checks, _, facts = check.run(session)
    failed = [c for c in checks if not c["passed"]]
    assert [c["name"] for c in failed] == ["asked"]
    assert "generate_compiled: asked True, observed False" in failed[0]["detail"]
    assert facts["observed"]["generate_compiled"] is False


def test_broken_cases_are_records_with_reasons_and_the_next_case_is_measured(tmp_path: Path) -> None:
    cases = [
        kinds.make_case("llava-tiny", cache, "eager") for cache in ("dies", "takes_all_memory", "returns_nan", "static")
    ]
    with LocalLauncher(directory=tmp_path) as launcher:
        records = measure_all(
            cases,
            launcher,
            folder=tmp_path / "work",
            ledger=tmp_path / "ledger.jsonl",
            run="r",
            subject="s",
            commit="c",
            machine="m",
            effort=QUICK,
            jobs=2,
        )
    died, memory, nan, good = records
    assert [r.status for r in records] == ["broken", "broken", "broken", "ok"]
    assert "SIGSEGV" in died.reason
    assert "memory" in memory.reason
    assert "check 'finite' failed" in nan.reason
    # Counters of a broken case are kept, its times are not.
    assert nan.metrics["aten_ops_per_token"]["value"] > 0
    assert not [key for key, entry in nan.metrics.items() if entry["unit"] == "seconds"]
    assert good.metrics["decode_seconds_per_token"]["value"] > 0
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 4
