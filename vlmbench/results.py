"""asv's results tree and the record ledgers beside it → one tidy table; alone knows their formats.

Reads any asv project's tree as found in the wild: file and folder names mean nothing (the commit is
`commit_hash`, the machine `params.machine`), numbers may be NaN or Infinity, rows end where only
nulls would follow, parameters are `repr` texts, benchmarks may be gone from `benchmarks.json`. Files
are untrusted: bounded in size, checked, never evaluated. What cannot be read is named in
`Tree.problems`, and the rest is read.

    python -c "from vlmbench.results import read_tree; print(read_tree('results').frame)"
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import stat
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from vlmbench.errors import UsageError
from vlmbench.metrics import BY_KEY
from vlmbench.schema import Record, read_lines

#: Version of asv's result and benchmark files that is read.
ASV_VERSION = 2
#: Largest JSON file accepted, in bytes; one asv result file with samples of 275 benchmarks has 2 MB.
MAX_FILE = 128 * 2**20
#: Most parameter combinations of one benchmark: a damaged list would multiply beyond memory.
MAX_COMBINATIONS = 1_000_000
#: Longest parameter text that is parsed; longer ones stay text.
MAX_LITERAL = 10_000
#: Damaged lines of one ledger that are named one by one.
MAX_LINE_PROBLEMS = 20

STATUSES = ("ok", "failed", "skipped")
#: Columns with the same value for all rows of one benchmark in one file.
_BLOCK = (
    "commit",
    "date",
    "machine",
    "env",
    "benchmark",
    "metric",
    "unit",
    "version",
    "started",
    "duration",
    "file",
)
_TIMES = ("date", "started")
_STATS = {"ci_low": "ci_99_a", "ci_high": "ci_99_b", "q25": "q_25", "q75": "q_75"}
_HUGE = 2**1000
_NUMBERS = {int, float, bool, type(None)}
_KEY_OF_TRACK = {key.replace(".", "_"): key for key in BY_KEY}


class Problem(NamedTuple):
    """A file, or a part of one, that was left out, and why."""

    path: str
    reason: str


class _Combinations(NamedTuple):
    """Parameter combinations of a benchmark in asv's order: dicts, and series names as asv prints them."""

    params: list[dict[str, Any]]
    series: list[str]


@dataclass
class Tree:
    """A results folder, read.

    `frame` has one row a commit, machine, environment, benchmark and parameter combination:
    `commit` (full hash), `date` (of the commit, UTC), `machine`, `env`, `benchmark`, `metric` (our
    key, "" for others), `unit`, `version`, `started`, `duration` (seconds the whole benchmark took),
    `file`, `series` ("benchmark(params)", as asv prints it), `params` (name → value), `value` (NaN
    unless ok), `status` ("ok", "failed", "skipped"), `ci_low`, `ci_high` (asv's 99 %), `q25`, `q75`,
    `samples` (list or None).

    `benchmarks` and `machines` hold asv's descriptions by name, `records` the newest record by
    (commit, machine, case id).
    """

    frame: pd.DataFrame
    benchmarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Damaged(Exception):
    """Why a file or one benchmark in it cannot be read; ends as a Problem."""


def read_tree(directory: Path | str) -> Tree:
    """Everything in a results folder. Raises UsageError only if there is no such folder."""
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"no results folder '{root}': run `asv run` first, or name the folder with --results")
    tree = Tree(pd.DataFrame())
    _read_benchmarks(root / "benchmarks.json", tree)
    columns = _Columns(tree)
    for path in _files(root, tree):
        if path.suffix == ".jsonl":
            _read_ledger(path, tree)
        elif path.name == "machine.json":
            _read_machine(path, tree)
        elif path != root / "benchmarks.json":
            try:
                columns.add_file(path, _load(path, ASV_VERSION))
            except _Damaged as reason:
                tree.problems.append(Problem(str(path), str(reason)))
    tree.frame = columns.frame()
    return tree


def metric_key(benchmark: str) -> str:
    """The metric key that a benchmark of this project tracks ("decode.track_graphs_decode" →
    "graphs.decode"); "" for every other benchmark."""
    name = benchmark.rpartition(".")[2]
    return _KEY_OF_TRACK.get(name.removeprefix("track_"), "") if name.startswith("track_") else ""


@lru_cache(maxsize=65536)
def _literal(text: str) -> Any:
    """The value of a `repr` text if it is a literal, else the text itself. Evaluates nothing."""
    if len(text) > MAX_LITERAL:
        return text
    try:
        with warnings.catch_warnings():
            # Odd escapes in foreign texts: a DeprecationWarning up to Python 3.11, then a SyntaxWarning.
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _files(root: Path, tree: Tree) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        tree.problems.append(Problem(str(error.filename), f"cannot be listed ({error.strerror})"))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        subfolders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name.endswith((".json", ".jsonl")))


def _load(path: Path, version: int | None = None) -> dict[str, Any]:
    """The object in a JSON file. Raises _Damaged, also for another asv version than the one wanted."""
    try:
        # A named pipe would block for ever when opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _Damaged("not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise _Damaged(f"larger than {MAX_FILE} bytes")
        data = json.loads(text)
    except OSError as error:
        raise _Damaged(f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"not JSON ({error})") from None
    if not isinstance(data, dict):
        raise _Damaged("not a JSON object")
    if version is not None and data.get("version", version) != version:
        raise _Damaged(f"asv format {data['version']!r}: this reads {version}, `asv update` renews older ones")
    return data


def _read_benchmarks(path: Path, tree: Tree) -> None:
    try:
        data = _load(path, ASV_VERSION)
    except _Damaged as reason:
        tree.problems.append(Problem(str(path), f"{reason}; units and parameter names are unknown"))
        return
    tree.benchmarks = {name: entry for name, entry in data.items() if isinstance(entry, dict)}


def _read_machine(path: Path, tree: Tree) -> None:
    try:
        data = _load(path)
    except _Damaged as reason:
        tree.problems.append(Problem(str(path), str(reason)))
        return
    name = data.get("machine")
    tree.machines[name if isinstance(name, str) else path.parent.name] = data


def _read_ledger(path: Path, tree: Tree) -> None:
    """Records of one ledger, later lines replacing earlier ones. Other kinds of line are others' to read."""
    damaged = 0
    try:
        # Lines are bounded and read one at a time, so a ledger needs no bound of its own.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _Damaged("not a regular file")
        for number, envelope, payload in read_lines(path):
            reason = payload if isinstance(payload, str) else ""
            if envelope is not None and envelope.kind == "record" and isinstance(payload, dict):
                try:
                    tree.records[envelope.commit, envelope.machine, envelope.case] = Record.from_json(payload)
                except UsageError as error:
                    reason = str(error)
            if reason:
                damaged += 1
                if damaged <= MAX_LINE_PROBLEMS:
                    tree.problems.append(Problem(f"{path}:{number}", reason))
    except OSError as error:
        tree.problems.append(Problem(str(path), f"cannot be read ({error.strerror})"))
    except _Damaged as reason:
        tree.problems.append(Problem(str(path), str(reason)))
    if damaged > MAX_LINE_PROBLEMS:
        tree.problems.append(Problem(str(path), f"{damaged - MAX_LINE_PROBLEMS} more damaged lines"))


class _Columns:
    """Collects the table column by column.

    Millions of rows repeat few names: what all rows of a benchmark in a file share is kept once and
    spread at the end, and parameter combinations are parsed once per tree.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.blocks: list[tuple[Any, ...]] = []
        self.lengths: list[int] = []
        self.numbers = {name: array("d") for name in ("value", *_STATS)}
        self.failed = array("b")
        self.ids = array("l")
        self.samples: list[list[float] | None] = []
        self.series: dict[str, int] = {}
        self.params: list[dict[str, Any]] = []
        self.combinations: dict[tuple[Any, ...], list[int]] = {}

    def add_file(self, path: Path, data: Mapping[str, Any]) -> None:
        """Rows of one result file. Raises _Damaged if it is none; a damaged benchmark in it is a problem."""
        commit, results, names = (data.get(key) for key in ("commit_hash", "results", "result_columns"))
        if not (isinstance(commit, str) and commit and isinstance(results, dict) and isinstance(names, list)):
            raise _Damaged("not an asv result: commit_hash, results or result_columns are missing or wrong")
        environment = data.get("params")
        machine = environment.get("machine") if isinstance(environment, dict) else None
        head = (
            commit,
            _number(data.get("date")),
            machine if isinstance(machine, str) else path.parent.name,
            data["env_name"] if isinstance(data.get("env_name"), str) else "",
        )
        for benchmark, row in results.items():
            try:
                if not isinstance(row, list):
                    raise _Damaged("its row is not a list")
                self._add(head, benchmark, dict(zip(names, row, strict=False)), str(path))
            except _Damaged as reason:
                self.tree.problems.append(Problem(str(path), f"{benchmark}: {reason}"))

    def _add(self, head: tuple[Any, ...], benchmark: str, row: Mapping[str, Any], file: str) -> None:
        described = self.tree.benchmarks.get(benchmark, {})
        result = row.get("result")
        ids = self._combinations(benchmark, row.get("params"), described.get("param_names"))
        if result is not None and not isinstance(result, list):
            result = [result]
        values = _numbers("result", result, len(ids))
        columns = {name: _numbers(key, row.get(f"stats_{key}"), len(ids)) for name, key in _STATS.items()}
        samples = _samples(row.get("samples"), len(ids))
        # Everything is checked: from here on nothing may fail, or columns would differ in length.
        unit, version = described.get("unit"), row.get("version")
        block = (benchmark, metric_key(benchmark), unit if isinstance(unit, str) else "", str(version or ""))
        times = (_number(row.get("started_at")), _number(row.get("duration")))
        self.blocks.append((*head, *block, *times, file))
        self.lengths.append(len(ids))
        self.ids.extend(ids)
        self.failed.extend([True] * len(ids) if result is None else [value is None for value in result])
        self.numbers["value"].extend(values)
        for name, column in columns.items():
            self.numbers[name].extend(column)
        self.samples.extend(samples)

    def _combinations(self, benchmark: str, params: Any, names: Any) -> list[int]:
        """Series numbers of a benchmark's combinations, in asv's product order."""
        axes = [] if params is None else params
        if not isinstance(axes, list) or not all(isinstance(axis, list) for axis in axes):
            raise _Damaged("its params are not lists")
        key = (benchmark, *(tuple(str(value) for value in axis) for axis in axes))
        if key not in self.combinations:
            made = _product(benchmark, key[1:], names)
            for name, params_of in zip(made.series, made.params, strict=True):
                if name not in self.series:
                    self.series[name] = len(self.series)
                    self.params.append(params_of)
            self.combinations[key] = [self.series[name] for name in made.series]
        return self.combinations[key]

    def frame(self) -> pd.DataFrame:
        """The table. Of two files with the same commit, machine and environment the later run counts."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        table: dict[str, Any] = {}
        for i, name in enumerate(_BLOCK):
            column = [block[i] for block in self.blocks]
            if name in _TIMES:
                times = pd.to_datetime(pd.Series(column, dtype=float), unit="ms", utc=True, errors="coerce")
                table[name] = times.array.take(rows)
            elif name == "duration":
                table[name] = np.array(column, dtype=float)[rows]
            else:
                table[name] = pd.Categorical(column).take(rows)
        params = np.empty(len(self.params), dtype=object)
        params[:] = self.params
        ids = np.array(self.ids, dtype=np.int64)
        table["series"] = pd.Categorical.from_codes(ids, categories=pd.Index(list(self.series), dtype=object))
        table["params"] = params[ids]
        value = np.array(self.numbers["value"])
        # An infinite result is no measurement; asv writes NaN for a skip and null for a failure.
        failed = np.array(self.failed, dtype=bool) | np.isinf(value)
        status = np.where(failed, 1, np.where(np.isnan(value), 2, 0))
        table["value"] = np.where(status == 0, value, np.nan)
        table["status"] = pd.Categorical.from_codes(status, categories=list(STATUSES))
        table.update({name: np.array(self.numbers[name]) for name in _STATS})
        samples = np.empty(len(self.samples), dtype=object)
        samples[:] = self.samples
        table["samples"] = samples
        frame = pd.DataFrame(table)
        names = ["commit", "machine", "env"]
        runs = frame.drop_duplicates([*names, "file"])
        if runs.duplicated(names).any():
            frame = frame.sort_values("started", kind="stable", na_position="first")
            frame = frame.drop_duplicates([*names, "series"], keep="last").sort_index().reset_index(drop=True)
        return frame


def _product(benchmark: str, axes: Sequence[Sequence[str]], names: Any) -> _Combinations:
    """All combinations of the `repr` texts in `axes`, named by `names`, or param1, param2 as asv does."""
    size = math.prod(len(axis) for axis in axes)
    if size > MAX_COMBINATIONS:
        raise _Damaged(f"{size} parameter combinations exceed {MAX_COMBINATIONS}")
    fits = isinstance(names, list) and len(names) == len(axes) == len({str(name) for name in names})
    shown = [str(name) for name in names] if fits else [f"param{i + 1}" for i in range(len(axes))]
    made = _Combinations([], [])
    for values in itertools.product(*axes):
        made.params.append(dict(zip(shown, (_literal(value) for value in values), strict=True)))
        made.series.append(f"{benchmark}({', '.join(values)})" if values else benchmark)
    return made


def _numbers(name: str, values: Any, length: int) -> list[float]:
    """Numbers of one column, null as NaN. Raises _Damaged for anything else or another length."""
    if values is None:
        return [nan] * length
    if not isinstance(values, list) or not (kinds := set(map(type, values))) <= _NUMBERS:
        raise _Damaged(f"its {name} is not a list of numbers")
    if len(values) != length:
        raise _Damaged(f"its {name} has {len(values)} values for {length} parameter combinations")
    if int in kinds and any(type(value) is int and abs(value) >= _HUGE for value in values):
        raise _Damaged(f"its {name} holds a number too large for a float")
    return [nan if value is None else value for value in values] if type(None) in kinds else values


def _samples(values: Any, length: int) -> list[list[float] | None]:
    if values is None:
        return [None] * length
    if not isinstance(values, list) or len(values) != length:
        raise _Damaged(f"its samples are not a list of {length}")
    for entry in values:
        if entry is not None and not (isinstance(entry, list) and set(map(type, entry)) <= {int, float}):
            raise _Damaged("its samples are not lists of numbers")
    return values


def _number(value: Any) -> float:
    """A JSON number as a float, NaN for anything else."""
    return float(value) if type(value) in (int, float) and abs(value) < _HUGE else nan
