"""Records for people (one row a case, as they come) and for programs (one JSON object a line).

Seconds and bytes are scaled here and nowhere else. `±` is half the range over the median of values
of fresh processes. Speeds are said relative to the dynamic cache of the same model and runner.

    vlmbench measure --model llava-tiny
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmbench import stats
from vlmbench.compare import in_words
from vlmbench.kinds import RUNNERS
from vlmbench.metrics import tokens_per_second
from vlmbench.schema import Case, Record

if TYPE_CHECKING:
    from rich.console import Console

#: The cache kind that others are compared with: what transformers uses when nobody asks.
REFERENCE = "dynamic"
#: The metric they are compared by.
COMPARED = "decode_seconds_per_token"
#: Tables stay within this many columns.
WIDTH = 100

#: What a row can see besides its own record: the reference record, if it has come.
Cell = Callable[[Record, Record | None], str]


@dataclass(frozen=True)
class Column:
    """A column: its title in two lines, its width, its text, and whether only compiling gives any."""

    title: tuple[str, str]
    width: int
    cell: Cell
    compiling: bool = False


def json_object(record: Record) -> dict[str, Any]:
    """The record as `--json` prints it: its fields, the case's id in front."""
    return {"id": record.case.id, **record.to_json()}


def json_line(record: Record) -> str:
    """`json_object` in one line of strict JSON."""
    return json.dumps(json_object(record), separators=(",", ":"), allow_nan=False)


def value(record: Record, key: str) -> float:
    """A metric's value; NaN where the record has none."""
    found = record.metrics.get(key, {}).get("value")
    return math.nan if found is None else float(found)


def number(amount: float) -> str:
    """Three significant digits without an exponent; empty for NaN."""
    if math.isnan(amount):
        return ""
    if amount == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(amount))))
    return f"{amount:.{digits}f}" if digits < 7 else f"{amount:.0e}"


def relative(record: Record, reference: Record | None) -> str:
    """The case's decode speed in words, as in "1.12x slower"; empty where there is nothing to compare."""
    if record.case.cache == REFERENCE:
        return "reference" if not math.isnan(value(record, COMPARED)) else ""
    if reference is None:
        return ""
    return in_words(value(record, COMPARED) / (value(reference, COMPARED) or math.nan), "seconds")


def _milliseconds(key: str, spread: bool = False) -> Cell:
    def cell(record: Record, reference: Record | None) -> str:
        text = number(value(record, key) * 1e3)
        around = stats.spread(record.metrics.get(key, {}).get("samples") or [])
        return f"{text} ±{around * 100:.0f}%" if spread and text and not math.isnan(around) else text

    return cell


def _tokens(record: Record, reference: Record | None) -> str:
    return number(tokens_per_second(value(record, COMPARED), record.case.batch))


def _compile(record: Record, reference: Record | None) -> str:
    both = [number(value(record, f"compile_{which}_seconds")) for which in ("cold", "warm")]
    return "/".join(text or "-" for text in both) if any(both) else ""


def _megabytes(key: str) -> Cell:
    """The largest of a metric's values over its phases, in MB."""

    def cell(record: Record, reference: Record | None) -> str:
        found = [value(record, k) for k in record.metrics if k == key or k.startswith(f"{key}.")]
        return number(max(found) / 1e6) if found else ""

    return cell


def _graphs(record: Record, reference: Record | None) -> str:
    counts = [value(record, f"{name}.decode") for name in ("graphs", "graph_breaks", "recompiles")]
    if all(math.isnan(count) for count in counts):
        return ""
    return "/".join("-" if math.isnan(count) else f"{count:.0f}" for count in counts)


COLUMNS: tuple[Column, ...] = (
    Column(("decode", "ms/token"), 10, _milliseconds(COMPARED, spread=True)),
    Column(("", "tok/s"), 6, _tokens),
    Column(("vision", "ms"), 6, _milliseconds("vision_seconds")),
    Column(("prefill", "ms"), 7, _milliseconds("prefill_seconds")),
    Column(("generate", "ms"), 8, _milliseconds("generate_seconds")),
    Column(("compile s", "cold/warm"), 9, _compile, compiling=True),
    Column(("cache", "MB"), 6, _megabytes("cache_bytes")),
    Column(("peak", "MB"), 6, _megabytes("peak_bytes")),
    Column(("", "g/b/r"), 5, _graphs, compiling=True),
    Column(("decode v", REFERENCE), 12, relative),
)
LEGEND = {
    "±": "±: half the range over the median of fresh processes",
    "tok/s": "tok/s: tokens decoded a second, all rows of the batch together",
    "g/b/r": "g/b/r: graphs, graph breaks and recompiles of decode",
}


class RowPrinter:
    """Prints records as rows while they come, under a heading for each model and workload.

    `cases` are those that will come: they say how wide the first column is and whether there is
    anything to compile. Give `columns` to print fewer.
    """

    def __init__(self, console: Console, cases: Sequence[Case], columns: Sequence[Column] | None = None) -> None:
        self._console = console
        if columns is None:
            compiling = any(RUNNERS[case.runner].compiles for case in cases)
            columns = [column for column in COLUMNS if compiling or not column.compiling]
        self._columns = columns
        self._first = max([14, *(len(_short(case)) for case in cases)])
        self._heading = ""
        self._numbers = False
        self._references: dict[tuple[str, str], Record] = {}
        self._waiting: list[Record] = []

    def row(self, record: Record) -> None:
        """Print one record; a heading first where model or workload change."""
        group = _group(record.case)
        if group != self._heading:
            self._print("" if self._heading else None, group, bold=True)
            if not self._heading:
                self._print(self._line("", [column.title[0] for column in self._columns]))
                self._print(self._line("", [column.title[1] for column in self._columns]))
            self._heading = group
        name = _short(record.case)
        if record.status != "ok":
            text = f"{name:<{self._first}} {record.status}: {record.reason or 'no reason given'}"
            wrapped = textwrap.wrap(text, WIDTH, subsequent_indent=" " * (self._first + 1))
            self._print("\n".join(wrapped), style="red" if record.status == "broken" else "dim")
            return
        self._numbers = True
        if record.case.cache == REFERENCE:
            self._references[group, record.case.runner] = record
        reference = self._references.get((group, record.case.runner))
        if reference is None:
            self._waiting.append(record)
        self._print(self._line(name, [column.cell(record, reference) for column in self._columns]))

    def finish(self) -> None:
        """Print the comparisons of rows that came before their reference, and what the signs mean."""
        for record in self._waiting:
            group = _group(record.case)
            if words := relative(record, self._references.get((group, record.case.runner))):
                self._print(f"{group} {_short(record.case)}: decode {words} than {REFERENCE}")
        if self._numbers:
            shown = " ".join(title for column in self._columns for title in column.title)
            notes = [text for sign, text in LEGEND.items() if sign == "±" or sign in shown]
            self._print("", *notes, style="dim")

    def _line(self, name: str, cells: Sequence[str]) -> str:
        fields = [f"{cell:>{column.width}}" for cell, column in zip(cells, self._columns, strict=True)]
        return " ".join([f"{name:<{self._first}}", *fields]).rstrip()

    def _print(self, *lines: str | None, bold: bool = False, style: str = "") -> None:
        for line in lines:
            if line is not None:
                self._console.print(
                    line, style="bold" if bold else style, markup=False, highlight=False, soft_wrap=True
                )


def print_records(console: Console, records: Sequence[Record]) -> None:
    """All records as rows; columns that are empty in every one are left out."""
    used = [column for column in COLUMNS if any(column.cell(r, r) for r in records if r.status == "ok")]
    printer = RowPrinter(console, [record.case for record in records], used)
    references = [record for record in records if record.case.cache == REFERENCE]
    order = {id(record): i for i, record in enumerate(records)}
    # The reference of a group comes first, so that its rows can be compared with it.
    groups = list(dict.fromkeys(_group(record.case) for record in records))
    for record in sorted(records, key=lambda r: (groups.index(_group(r.case)), r not in references, order[id(r)])):
        printer.row(record)
    printer.finish()


def _short(case: Case) -> str:
    return f"{case.cache} {case.runner}"


def _group(case: Case) -> str:
    """The case's id without cache kind and runner: what a heading says."""
    extra = case.id.removeprefix(f"{case.model}/{case.cache}/{case.runner}")
    return case.model + extra.replace("+", "  ")
