"""Every family × cache kind × runner on its tiny model: the proofs hold and the counters are there."""

from __future__ import annotations

import pytest
from sessions import capture_only, open_session

from vlmbench import check, counters, kinds
from vlmbench.errors import UsageError
from vlmbench.schema import Case

TINY = [model.name for model in kinds.models().values() if model.suite == "default"]


def cases(runner: str) -> list[Case]:
    rows = [kinds.models()[name] for name in TINY]
    return [kinds.make_case(m.name, cache, runner) for m in rows for cache in m.caches or kinds.caches()]


def failures(checks: list[dict]) -> list[str]:
    return [f"{c['name']}: {c['detail']}" for c in checks if not c["passed"]]


@pytest.mark.parametrize("case", cases("eager"), ids=lambda case: case.id)
def test_eager(case: Case) -> None:
    session = open_session(case)
    checks, proof, facts = check.run(session)
    assert failures(checks) == []
    assert [c["name"] for c in checks] == ["finite", "image", "reference", "repeat", "generate", "asked"]
    assert facts["observed"]["generate_compiled"] is False
    assert len(proof["tokens"]) == case.new_tokens
    metrics, _ = counters.count(session)
    assert metrics["aten_ops_per_token"] > 50
    assert metrics["retained_bytes"] == 0
    assert metrics["cache_bytes"] >= 2 * 2 * session.length * 32 * 4


@pytest.mark.parametrize("case", cases("compile"), ids=lambda case: case.id)
def test_capture(case: Case) -> None:
    with capture_only():
        session = open_session(case)
        checks, _, facts = check.run(session)
        assert failures(checks) == []
        assert facts["observed"]["decode_compiled"] is True
        assert facts["observed"]["generate_compiled"] is session.kind.compiles_in_generate
        metrics, _ = counters.count(session)
    assert metrics["graph_breaks.decode"] == 0
    assert metrics["captured_ops.decode"] > 50
    if session.kind.static_shape:
        assert metrics["graphs.decode"] == 1
        assert metrics["recompiles.decode"] == 0
    else:
        # Its length changes: one graph for the first length, one for all others.
        assert metrics["graphs.decode"] == 2
        assert metrics["recompiles.decode"] == 1


@pytest.mark.parametrize("cache", kinds.caches())
@pytest.mark.parametrize(
    "workload",
    [
        dict(batch=3),
        dict(images=2, cache_length=160),
        dict(images=0),
        dict(dtype="bfloat16"),
        dict(attention="eager"),
        dict(prompt_tokens=3, new_tokens=1),
    ],
    ids=str,
)
def test_workloads(cache: str, workload: dict) -> None:
    for model in ("llava-tiny", "qwen2_vl-tiny", "smolvlm-tiny"):
        session = open_session(kinds.make_case(model, cache, "eager", **workload))
        checks, _, _ = check.run(session)
        assert failures(checks) == [], model
        metrics, _ = counters.count(session)
        assert ("aten_ops.vision" in metrics) is (workload.get("images", 1) > 0)


def test_compiled_prefill_is_counted() -> None:
    with capture_only():
        session = open_session(kinds.make_case("llava-tiny", "static", "compile", compile_prefill=True))
        checks, _, _ = check.run(session)
        assert failures(checks) == []
        metrics, _ = counters.count(session)
    assert metrics["graphs.prefill"] >= 1


def test_a_cache_too_short_for_the_prompt_names_the_length_needed() -> None:
    with pytest.raises(UsageError, match=r"48 positions .16 of them for images. \+ 32: give --cache-length 80 or more"):
        open_session(kinds.make_case("llava-tiny", "static", "eager", cache_length=64))
