"""The reader: real asv files, odd ones and damaged ones; nothing is evaluated, nothing silently skipped."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trees import NAMES, NAN, PARAMS, describe, record, write_benchmarks, write_record, write_results

from vlmbench import results
from vlmbench.errors import UsageError
from vlmbench.metrics import BY_KEY
from vlmbench.results import metric_key, read_tree

COMMIT = "a" * 40
DECODE = describe("decode.track_decode_seconds_per_token", PARAMS, NAMES)
GRAPHS = describe("graph.track_graphs_decode", PARAMS, NAMES, unit="count")
PLAIN = describe("other.time_plain")


def hand_written(root: Path, rows: dict[str, Any], name: str = "any name.json", **changes: Any) -> Path:
    """A result file as another program might write it; a change of None leaves the key out."""
    columns = ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"]
    data = {
        "commit_hash": COMMIT,
        "env_name": "env",
        "date": 1_700_000_000_000,
        "params": {"machine": "box"},
        "result_columns": [*columns, "stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples"],
        "results": rows,
        "version": 2,
        **changes,
    }
    path = root / "folder" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_benchmarks(tmp_path, DECODE, GRAPHS, PLAIN)
    return tmp_path


def test_asvs_own_files(root: Path) -> None:
    samples = [0.01, 0.012, 0.011]
    values = {
        DECODE["name"]: [samples, None, NAN, [0.02]],
        GRAPHS["name"]: [NAN, 1, NAN, 2],
        PLAIN["name"]: [0.5],
    }
    path = write_results(root, COMMIT, values, [DECODE, GRAPHS, PLAIN])
    tree = read_tree(root)
    assert tree.problems == []
    assert len(tree.frame) == 9
    assert tree.machines["box"]["cpu"] == "x"
    assert tree.benchmarks[PLAIN["name"]]["type"] == "track"
    rows = tree.frame[tree.frame["benchmark"] == DECODE["name"]]
    assert list(rows["status"]) == ["ok", "failed", "skipped", "ok"]
    assert list(rows["params"])[1] == {"model": "llava-tiny", "cache": "dynamic", "runner": "compile"}
    first = rows.iloc[0]
    assert (first["commit"], first["machine"], first["env"]) == (COMMIT, "box", "virtualenv-py3.11")
    assert first["date"] == pd.Timestamp(1_700_000_000_000, unit="ms", tz="UTC")
    assert (first["value"], first["q25"], first["q75"]) == (0.011, 0.0105, 0.0115)
    assert first["samples"] == samples
    assert first["ci_low"] < 0.01 < 0.012 < first["ci_high"]
    # One value has no interval: asv writes infinite bounds.
    assert (rows.iloc[3]["ci_low"], rows.iloc[3]["ci_high"]) == (-math.inf, math.inf)
    assert (first["metric"], first["unit"], first["version"]) == ("decode_seconds_per_token", "seconds", "1")
    assert first["series"] == DECODE["name"] + "('llava-tiny', 'dynamic', 'eager')"
    assert first["duration"] == 1.5
    assert first["file"] == str(path)
    assert math.isnan(rows.iloc[1]["value"])
    assert rows.iloc[1]["samples"] is None
    plain = tree.frame[tree.frame["benchmark"] == PLAIN["name"]].iloc[0]
    assert (plain["params"], plain["series"], plain["metric"]) == ({}, PLAIN["name"], "")


def test_combinations_come_in_asvs_order(root: Path) -> None:
    axes = [["1", "2"], ["'x'", "'y'", "'z'"]]
    entry = describe("b.time_grid", axes, ["n", "k"])
    write_benchmarks(root, entry)
    write_results(root, COMMIT, {"b.time_grid": [11, 12, 13, 21, 22, 23]}, [entry])
    frame = read_tree(root).frame
    found = {(p["n"], p["k"]): v for p, v in zip(frame["params"], frame["value"], strict=True)}
    assert found == {(n, k): 10 * n + i for n in (1, 2) for i, k in enumerate("xyz", 1)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1, 'a, b')", (1, "a, b")),
        ("None", None),
        ("'it''s, (odd)'", "its, (odd)"),
        ("1e-3", 0.001),
        ("[1, {2: b'x'}]", [1, {2: b"x"}]),
        ("True", True),
        ("1+2j", 1 + 2j),
        ("<class 'int'>", "<class 'int'>"),
        ("float32", "float32"),
        ("", ""),
        ("'\\d'", "\\d"),
        ("(" * 5000, "(" * 5000),
        ("'" + "x" * 20_000 + "'", "'" + "x" * 20_000 + "'"),
    ],
)
def test_parameters_are_any_literal_or_text(root: Path, text: str, value: Any) -> None:
    hand_written(root, {"b.time_x": [[1.0], [[text]]]})
    assert read_tree(root).frame["params"][0] == {"param1": value}


def test_reading_never_evaluates_code(root: Path, tmp_path: Path) -> None:
    mark = tmp_path / "evaluated"
    texts = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"open({str(mark)!r}, 'w')",
        "[].__class__",
        "f'{1}'",
    ]
    hand_written(root, {f"b.{text}": [[1.0] * len(texts), [texts]] for text in texts})
    frame = read_tree(root).frame
    assert not mark.exists()
    assert [p["param1"] for p in frame["params"][: len(texts)]] == texts


def test_short_rows_and_missing_fields(root: Path) -> None:
    rows = {"b.all_failed": [None, [["1", "2"]]], "b.bare": [[1.0]], "b.scalar": [2], "b.nothing": []}
    hand_written(root, rows, date=None, params={}, env_name=None)
    tree = read_tree(root)
    frame = tree.frame.set_index("series")
    assert tree.problems == []
    assert list(frame.loc[["b.all_failed(1)", "b.all_failed(2)", "b.nothing"], "status"]) == ["failed"] * 3
    assert (frame.loc["b.bare", "value"], frame.loc["b.scalar", "value"]) == (1.0, 2.0)
    assert frame["date"].isna().all()
    assert set(frame["machine"]) == {"folder"}
    assert set(frame["env"]) == {""}


@pytest.mark.parametrize("date", [1e300, -1e300, 10**400, "today", True, [], {}])
def test_an_impossible_date_is_none(root: Path, date: Any) -> None:
    hand_written(root, {"b.x": [[1.0], [], ["odd"], date]}, date=date)
    tree = read_tree(root)
    assert tree.problems == []
    assert tree.frame[["date", "started"]].isna().all().all()


def test_infinity_is_a_failure_and_unknown_columns_are_passed_over(root: Path) -> None:
    hand_written(
        root,
        {"b.x": [[math.inf, True, 3], [["1", "2", "3"]], "extra"]},
        result_columns=["result", "params", "new"],
    )
    frame = read_tree(root).frame
    assert list(frame["status"]) == ["failed", "ok", "ok"]
    assert list(frame["value"])[1:] == [1.0, 3.0]


def test_the_field_counts_and_not_the_folder(root: Path) -> None:
    hand_written(root, {"b.x": [[1.0]]}, params={"machine": "the real one"})
    hand_written(root / "deep" / "er", {"b.x": [[2.0]]}, commit_hash="b" * 40)
    frame = read_tree(root).frame
    assert set(frame["machine"]) == {"the real one", "box"}
    assert set(frame["commit"]) == {COMMIT, "b" * 40}


def test_of_two_files_for_one_run_the_later_counts(root: Path) -> None:
    old, new, other = 1_700_000_000_000, 1_700_000_009_000, 1_700_000_005_000
    hand_written(root, {"b.x": [[2.0], [], "1", new], "b.only": [[7.0], [], "1", new]}, name="a.json")
    hand_written(root, {"b.x": [[1.0], [], "1", old]}, name="b.json")
    hand_written(root, {"b.x": [[9.0], [], "1", other]}, name="c.json", env_name="another")
    frame = read_tree(root).frame
    assert sorted(frame["value"]) == [2.0, 7.0, 9.0]


def test_parameter_names_must_fit(root: Path) -> None:
    write_benchmarks(root, describe("b.two", names=["x", "x"]), describe("b.few", names=["x"]))
    hand_written(root, {"b.two": [[1.0], [["1"], ["2"]]], "b.few": [[1.0], [["1"], ["2"]]]})
    assert list(read_tree(root).frame["params"]) == [{"param1": 1, "param2": 2}] * 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "row is not a list"),
        ([[1.0, 2.0], [["1"]]], "result has 2 values for 1"),
        ([["1.5"]], "result is not a list of numbers"),
        ([[1.0], "params"], "params are not lists"),
        ([[1.0], [["1"], "2"]], "params are not lists"),
        ([None, [[str(i) for i in range(1000)]] * 9], "parameter combinations exceed"),
        ([[10**400]], "too large for a float"),
        ([[1.0], [], "1", 0, 0, {"a": 1}], "ci_99_a is not a list of numbers"),
        ([[1.0], [], "1", 0, 0, None, None, None, None, None, None, [["x"]]], "samples are not lists"),
        (
            [[1.0], [], "1", 0, 0, None, None, None, None, None, None, [None, None]],
            "samples are not a list of 1",
        ),
    ],
)
def test_a_damaged_benchmark_is_named_and_the_others_are_read(root: Path, row: Any, reason: str) -> None:
    path = hand_written(root, {"b.bad": row, "b.good": [[1.0]]})
    tree = read_tree(root)
    assert list(tree.frame["benchmark"]) == ["b.good"]
    [problem] = tree.problems
    assert problem.path == str(path)
    assert problem.reason.startswith("b.bad: ")
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "not an asv result"),
        (b'{"version": 1, "results": {}}', "asv format 1: this reads 2, `asv update`"),
        (b'{"version": 3}', "asv format 3"),
        (b'{"commit_hash": 5, "results": {}, "result_columns": []}', "not an asv result"),
        (b'{"commit_hash": "a", "results": {"b": ' + b"9" * 5000 + b"}}", "not JSON"),
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_read(root: Path, content: bytes, reason: str) -> None:
    hand_written(root, {"b.good": [[1.0]]})
    bad = root / "folder" / "bad.json"
    bad.write_bytes(content)
    tree = read_tree(root)
    assert len(tree.frame) == 1
    [problem] = tree.problems
    assert problem.path == str(bad)
    assert reason in problem.reason


def test_huge_files_and_pipes_are_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE", 10_000)
    hand_written(root, {"b.good": [[1.0]]})
    (root / "folder" / "huge.json").write_bytes(b" " * 10_001)
    os.mkfifo(root / "folder" / "pipe.json")
    os.mkfifo(root / "folder" / "pipe.jsonl")
    (root / "folder" / "gone.json").symlink_to(root / "nowhere")
    tree = read_tree(root)
    assert len(tree.frame) == 1
    assert {Path(path).name: reason for path, reason in tree.problems} == {
        "huge.json": "larger than 10000 bytes",
        "pipe.json": "not a regular file",
        "pipe.jsonl": "not a regular file",
        "gone.json": "cannot be read (No such file or directory)",
    }


def test_a_tree_without_benchmarks_json_is_read_and_says_so(root: Path) -> None:
    hand_written(root, {"b.x": [[1.0], [["1"]]]})
    (root / "benchmarks.json").unlink()
    tree = read_tree(root)
    assert list(tree.frame["params"]) == [{"param1": 1}]
    assert "units and parameter names are unknown" in tree.problems[0].reason


def test_an_empty_tree_has_the_columns(tmp_path: Path, root: Path) -> None:
    empty = read_tree(root).frame
    assert len(empty) == 0
    hand_written(root, {"b.x": [[1.0]]})
    assert list(read_tree(root).frame.columns) == list(empty.columns)


def test_no_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no results folder.*asv run.*--results"):
        read_tree(tmp_path / "absent")


def test_newest_record_wins_and_damaged_lines_are_named(root: Path) -> None:
    path = write_record(root, COMMIT, record(reason="old"))
    write_record(root, COMMIT, record(reason="new"))
    write_record(root, COMMIT, record(batch=2))
    write_record(root, "b" * 40, record())
    with path.open("a") as file:
        file.write("not a line\n{}\n")
    tree = read_tree(root)
    assert set(tree.records) == {
        (COMMIT, "box", "llava-tiny/dynamic/eager"),
        (COMMIT, "box", "llava-tiny/dynamic/eager+batch=2"),
        ("b" * 40, "box", "llava-tiny/dynamic/eager"),
    }
    assert tree.records[COMMIT, "box", "llava-tiny/dynamic/eager"].reason == "new"
    assert [path for path, _ in tree.problems] == [f"{path}:5", f"{path}:6"]


def test_a_ledger_of_rubbish_is_not_named_line_by_line(root: Path) -> None:
    (root / "box").mkdir()
    (root / "box" / "rubbish.jsonl").write_text("x\n" * 1000)
    problems = read_tree(root).problems
    assert len(problems) == results.MAX_LINE_PROBLEMS + 1
    assert problems[-1].reason == "980 more damaged lines"


def test_every_metric_is_found_by_its_benchmarks_name() -> None:
    for key in BY_KEY:
        assert metric_key(f"file.track_{key.replace('.', '_')}") == key
    for name in ("file.track_other", "file.decode_seconds_per_token", "time_x", "", "f.track_"):
        assert metric_key(name) == ""
