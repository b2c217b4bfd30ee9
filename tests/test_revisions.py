"""Two revisions of a tree that asv itself wrote, in a real repository."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trees import (
    NAMES,
    NAN,
    PARAMS,
    describe,
    git,
    make_repo,
    record,
    write_benchmarks,
    write_record,
    write_results,
)

from vlmbench import commits, differences
from vlmbench.differences import Comparison, Series, human, summary
from vlmbench.errors import UsageError
from vlmbench.revisions import compare_revisions, render

DECODE = describe("decode.track_decode_seconds_per_token", PARAMS, NAMES)
GRAPHS = describe("graph.track_graphs_decode", PARAMS, NAMES, unit="count")
FOREIGN = describe("io.time_read", [["(1, 2)"]], ["shape"])
ENTRIES = [DECODE, GRAPHS, FOREIGN]
BASE = [0.00100, 0.00101, 0.00102, 0.00099, 0.00098]

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("git") / "repo"
    make_repo(path, ["first", "second <b>", "third"])
    git(path, "tag", "v1", "HEAD~2")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_benchmarks(tmp_path / "results", *ENTRIES)
    return tmp_path / "results"


@pytest.fixture
def write(root: Path, repo: Path) -> Write:
    def write(revision: str, values: dict[str, list[Any]], **given: Any) -> Path:
        commit = commits.resolve(revision, repo)
        assert commit
        return write_results(root, commit, values, given.pop("entries", ENTRIES), **given)

    return write


def slower(factor: float) -> list[float]:
    return [factor * value for value in BASE]


def shown(comparison: Comparison, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(comparison))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return text


def by_label(comparison: Comparison) -> dict[str, Series]:
    return {series.label: series for series in comparison.series}


def test_directions_words_and_tokens(root: Path, repo: Path, write: Write) -> None:
    write("v1", {DECODE["name"]: [BASE, BASE, BASE, BASE], GRAPHS["name"]: [NAN, 1, NAN, 2]})
    write("HEAD", {DECODE["name"]: [slower(1.2), slower(0.5), BASE, [0.001]], GRAPHS["name"]: [NAN, 1, NAN, 3]})
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    found = by_label(comparison)
    worse = found["decode_seconds_per_token llava-tiny dynamic eager"]
    assert (worse.group, worse.words) == ("regression", "1.20x slower")
    assert (worse.before, worse.after) == (0.001, 0.0012)
    assert (worse.tokens_before, worse.tokens_after) == pytest.approx((1000, 1 / 0.0012))
    better = found["decode_seconds_per_token llava-tiny dynamic compile"]
    assert (better.group, better.words) == ("improvement", "2.00x faster")
    few = found["decode_seconds_per_token llava-tiny static compile"]
    assert (few.group, few.reason) == ("unknown", "5 against 1 values: at least 5 a side are needed")
    assert found["decode_seconds_per_token llava-tiny static eager"].group == "unknown"
    assert found["graphs.decode llava-tiny dynamic compile"].group == "same"
    assert found["graphs.decode llava-tiny static compile"].words == "1.50x more"
    assert found["graphs.decode llava-tiny dynamic eager"].reason == "skipped on both"
    assert comparison.counts() == {
        "broken": 0,
        "regression": 2,
        "improvement": 1,
        "unknown": 2,
        "unmeasured": 2,
        "same": 1,
    }
    graphs = comparison.only(["graphs"])
    assert {series.metric for series in graphs.series} == {"graphs.decode"}
    assert comparison.only(["graphs.decode"]).series == graphs.series
    with pytest.raises(UsageError, match=r"unknown metric 'graph': valid are vision_seconds, .* did you mean 'graphs'"):
        comparison.only(["graph"])


def test_table_is_sorted_and_fits(root: Path, repo: Path, write: Write) -> None:
    write(
        "v1",
        {DECODE["name"]: [BASE, BASE, BASE, BASE], GRAPHS["name"]: [NAN, 1, NAN, 2], FOREIGN["name"]: [2.0]},
    )
    write(
        "HEAD",
        {DECODE["name"]: [slower(1.2), slower(0.5), slower(3), None], GRAPHS["name"]: [NAN, 1, NAN, 2]},
    )
    text = shown(compare_revisions(root, "v1", "HEAD", repo=repo))
    order = ["1 broken, 2 regressions", "Broken", "Regressions: 2", "Improvements: 1", "Not measured"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.index("1.20x slower") > text.index("3.00x slower", places[2])
    assert "(largest: decode_seconds_per_token llava-tiny static eager, 3.00x slower)" in " ".join(text.split())
    assert "1000 → 333" in text
    assert "1 ms" in text
    assert "io.time_read" in text.split("Not measured")[1]


def test_json_is_strict_and_complete(root: Path, repo: Path, write: Write) -> None:
    write("v1", {DECODE["name"]: [BASE, BASE, NAN, BASE], FOREIGN["name"]: [2.0]})
    write("HEAD", {DECODE["name"]: [slower(1.2), BASE, NAN, None], FOREIGN["name"]: [2.5]})
    data = compare_revisions(root, "v1", "HEAD", repo=repo).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["head"]["subject"] == "third"
    assert data["base"]["name"] == "v1"
    assert data["machines"] == ["box"]
    assert [s["group"] for s in data["series"]] == [
        "broken",
        "regression",
        "unknown",
        "unknown",
        "unmeasured",
    ]
    first = data["series"][1]
    assert first["params"] == {"model": "llava-tiny", "cache": "dynamic", "runner": "eager"}
    assert (first["verdict"], first["words"], first["unit"]) == ("regression", "1.20x slower", "seconds")
    assert first["ratio"] == pytest.approx(1.2)
    assert first["interval"][0] < 1.2 < first["interval"][1]


def test_samples_come_from_the_record_that_the_value_is_of(root: Path, repo: Path, write: Write) -> None:
    for revision, factor in (("v1", 1.0), ("HEAD", 1.2)):
        values = slower(factor)
        write(revision, {DECODE["name"]: [values, values, NAN, NAN]}, record_samples=False)
        commit = commits.resolve(revision, repo) or ""
        mine = {"unit": "seconds", "value": factor * 0.001, "samples": values}
        other = {"unit": "seconds", "value": 0.5, "samples": [0.5] * 5}
        versions = {"torch": "2.12" if revision == "v1" else "2.13"}
        key = "decode_seconds_per_token"
        write_record(root, commit, record(metrics={key: other}, batch=1))
        write_record(root, commit, record(metrics={key: mine}, batch=4, versions=versions))
        write_record(root, commit, record(runner="compile", metrics={key: other}))
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    found = by_label(comparison)
    series = found["decode_seconds_per_token llava-tiny dynamic eager"]
    assert series.group == "regression"
    # Tokens of the whole batch, which only the record knows.
    assert series.tokens_before == pytest.approx(4000)
    assert found["decode_seconds_per_token llava-tiny dynamic compile"].group == "unknown"
    assert comparison.notes == ("torch 2.12 → 2.13",)
    assert "Note: torch 2.12 → 2.13" in shown(comparison)


def test_unmeasured_series_are_named_with_the_records_reason(root: Path, repo: Path, write: Write) -> None:
    write("v1", {DECODE["name"]: [None, NAN, NAN, BASE], GRAPHS["name"]: [1, 1, 1, 1]})
    write("HEAD", {DECODE["name"]: [BASE, NAN, NAN, None], FOREIGN["name"]: [1.0]})
    head = commits.resolve("HEAD", repo) or ""
    base = commits.resolve("v1", repo) or ""
    for commit in (head, base):
        write_record(root, commit, record(runner="compile", status="unsupported", reason="no compiler here"))
    write_record(root, head, record(cache="static", runner="compile", status="broken", reason="step 3 off by 0.5"))
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    found = by_label(comparison)
    name = "decode_seconds_per_token llava-tiny"
    assert found[f"{name} dynamic eager"].reason == f"v1 ({base[:8]}) failed"
    assert found[f"{name} dynamic compile"].reason == "skipped: no compiler here on both"
    broken = found[f"{name} static compile"]
    assert (broken.group, broken.verdict.state) == ("broken", "broken")
    assert broken.reason == f"HEAD ({head[:8]}) failed: step 3 off by 0.5"
    assert found["graphs.decode llava-tiny dynamic eager"].reason == f"HEAD ({head[:8]}) not measured"
    text = shown(comparison)
    assert "step 3 off by 0.5" in " ".join(text.split())
    for part in ("io.time_read", "no compiler here", "graphs.decode"):
        assert part in text


def test_another_version_of_a_benchmark_is_not_compared(root: Path, repo: Path, write: Write) -> None:
    write("v1", {DECODE["name"]: [BASE] * 4})
    write("HEAD", {DECODE["name"]: [BASE] * 4}, entries=[{**DECODE, "version": "2"}])
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    assert comparison.counts()["unmeasured"] == 4
    assert "version 1 and 2 of the benchmark: not comparable" in comparison.series[0].reason


def test_foreign_benchmarks_have_a_ratio_and_no_verdict(root: Path, repo: Path, write: Write) -> None:
    write("v1", {FOREIGN["name"]: [[1.0, 1.01, 0.99, 1.0, 1.02]]})
    write("HEAD", {FOREIGN["name"]: [[2.0, 2.01, 1.99, 2.0, 2.02]]})
    [series] = compare_revisions(root, "v1", "HEAD", repo=repo).series
    assert (series.group, series.words, series.unit) == ("unknown", "2.00x slower", "seconds")
    assert "not independent" in series.reason
    assert series.params == {"shape": (1, 2)}


def test_environments_are_paired_by_name_or_if_there_is_one(root: Path, repo: Path, write: Write) -> None:
    write("v1", {FOREIGN["name"]: [1.0]}, env="torch2.12")
    write("HEAD", {FOREIGN["name"]: [3.0]}, env="torch2.13")
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    assert [series.words for series in comparison.series] == ["3.00x slower"]
    assert comparison.notes == ("environment torch2.12 → torch2.13 on box",)
    write("HEAD", {FOREIGN["name"]: [2.0]}, env="torch2.12")
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    assert sorted(s.group for s in comparison.series) == ["unknown", "unmeasured"]


def test_machines(root: Path, repo: Path, write: Write) -> None:
    for machine in ("one", "two"):
        write("v1", {FOREIGN["name"]: [1.0]}, machine=machine)
        write("HEAD", {FOREIGN["name"]: [1.0]}, machine=machine)
    write("HEAD", {FOREIGN["name"]: [1.0]}, machine="three")
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    assert comparison.machines == ("one", "two")
    base = commits.resolve("v1", repo) or ""
    assert comparison.notes == (f"machine 'three' has not measured v1 ({base[:8]})",)
    assert len(compare_revisions(root, "v1", "HEAD", repo=repo, machine="two").series) == 1
    with pytest.raises(UsageError, match="unknown machine 'tow': valid are one, three, two; did you mean 'two'"):
        compare_revisions(root, "v1", "HEAD", repo=repo, machine="tow")
    with pytest.raises(UsageError, match=rf"measured both: machine 'three' has not.*`asv run {base[:8]}\^!`"):
        compare_revisions(root, "v1", "HEAD", repo=repo, machine="three")


@pytest.mark.parametrize("name", ["v1", "HEAD~2", "main~2", "first hash", "short hash"])
def test_revisions_are_whatever_git_knows(root: Path, repo: Path, write: Write, name: str) -> None:
    first = git(repo, "rev-parse", "v1")
    write("v1", {FOREIGN["name"]: [1.0]})
    write("HEAD", {FOREIGN["name"]: [1.0]})
    given = {"first hash": first, "short hash": first[:7]}.get(name, name)
    assert compare_revisions(root, given, "HEAD", repo=repo).base.commit == first


def test_without_a_repository_the_trees_hashes_serve(root: Path, repo: Path, write: Write, tmp_path: Path) -> None:
    write("v1", {FOREIGN["name"]: [1.0]})
    write("HEAD", {FOREIGN["name"]: [1.0]})
    first, last = git(repo, "rev-parse", "v1"), git(repo, "rev-parse", "HEAD")
    comparison = compare_revisions(root, first[:10], last, repo=tmp_path)
    assert (comparison.base.commit, comparison.base.subject) == (first, "")
    assert str(comparison.base) == first[:8]


@pytest.mark.parametrize("name", ["nonsense", "", "--all", "-h", "x;touch y", "a\0b", "v1..HEAD", "HEAD^{tree}"])
def test_unknown_revisions_list_those_with_results(root: Path, repo: Path, write: Write, name: str) -> None:
    write("v1", {FOREIGN["name"]: [1.0]})
    write("HEAD", {FOREIGN["name"]: [1.0]})
    with pytest.raises(UsageError) as caught:
        compare_revisions(root, name, "HEAD", repo=repo)
    text = str(caught.value)
    assert f"revision '{name}' is unknown to the repository" in text
    assert f"\n  {git(repo, 'rev-parse', 'v1')[:8]} 2023-11-14 first" in text
    assert "third" in text
    assert "second" not in text


def test_a_revision_without_results_says_how_to_get_them(root: Path, repo: Path, write: Write) -> None:
    write("HEAD", {FOREIGN["name"]: [1.0]})
    short = git(repo, "rev-parse", "HEAD~1")[:8]
    with pytest.raises(UsageError, match=rf"'HEAD~1' \({short}\) has no results in .*`asv run {short}\^!`"):
        compare_revisions(root, "HEAD~1", "HEAD", repo=repo)
    with pytest.raises(UsageError, match="same commit"):
        compare_revisions(root, "main", "HEAD", repo=repo)


def test_an_empty_tree_says_so(root: Path, repo: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no results.*asv run"):
        compare_revisions(root, "v1", "HEAD", repo=repo)


def test_long_listings_are_cut(root: Path, repo: Path) -> None:
    for i in range(25):
        write_results(root, f"{i:040x}", {FOREIGN["name"]: [1.0]}, ENTRIES, date=1_700_000_000_000 + i, env=str(i))
    with pytest.raises(UsageError, match="and 15 older"):
        compare_revisions(root, "nonsense", "HEAD", repo=repo)


def test_names_cannot_draw_on_the_terminal(root: Path, repo: Path, write: Write) -> None:
    evil = describe("b.time_\x1b[31mred\u202e[bold]", [["'[link=x]\\x07'"]], ["p"])
    write_benchmarks(root, evil)
    for revision in ("v1", "HEAD"):
        write(revision, {evil["name"]: [1.0]}, entries=[evil])
    (root / "box" / "bad\x1b.json").write_text("{")
    text = shown(compare_revisions(root, "v1", "HEAD", repo=repo))
    assert "[bold]" in text.replace("\n", "")
    assert "[link=x]" in text
    assert "Left out:" in text
    assert not set("\x1b\x07\u202e") & set(text)


def test_undecided_series_are_cut_on_the_terminal_only(
    root: Path, repo: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "MAX_UNDECIDED", 1)
    write("v1", {DECODE["name"]: [0.1, 0.1, 0.1, 0.1]})
    write("HEAD", {DECODE["name"]: [0.1, 0.1, 0.3, 0.1]})
    comparison = compare_revisions(root, "v1", "HEAD", repo=repo)
    text = shown(comparison)
    assert "3.00x slower" in text
    assert "and 3 smaller ones: --json has all" in text
    assert "no difference shown, 4 without enough evidence" in summary(comparison)


def test_what_chance_alone_would_flag_is_said(root: Path, repo: Path, write: Write) -> None:
    axes = [[str(i) for i in range(100)]]
    entry = describe("x.track_decode_seconds_per_token", axes, ["n"])
    write_benchmarks(root, entry)
    for revision in ("v1", "HEAD"):
        write(revision, {entry["name"]: [BASE] * 100}, entries=[entry])
    assert "Of the 100 timings judged, about 1 differ by chance" in summary(
        compare_revisions(root, "v1", "HEAD", repo=repo)
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00123, "seconds", "1.23 ms"),
        (1e-12, "seconds", "1e-12"),
        (4200.0, "seconds", "4200 s"),
        (0.00099996, "seconds", "1 ms"),
        (1_000_001, "count", "1000001"),
        (123456789, "bytes", "123.5 MB"),
        (-2048, "bytes", "-2.048 kB"),
        (0, "bytes", "0"),
        (12, "count", "12"),
        (12.5, "count", "12.5"),
        (None, "seconds", "-"),
    ],
)
def test_values_for_people(value: float | None, unit: str, text: str) -> None:
    assert human(value, unit) == text
