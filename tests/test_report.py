"""Tables asserted as text, JSON lines as objects."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from vlmbench.report import WIDTH, RowPrinter, json_line, number, print_records, relative
from vlmbench.schema import Case, Record


def record(cache: str = "dynamic", runner: str = "eager", decode: float = 1e-3, **fields: object) -> Record:
    """An ok record whose decode takes that long."""
    case = Case(str(fields.pop("model", "llava-tiny")), cache, runner, **fields)  # type: ignore[arg-type]
    made = Record(case, "ok")
    samples = [decode * 0.98, decode, decode * 1.02]
    made.metrics["decode_seconds_per_token"] = {"unit": "seconds", "value": decode, "samples": samples}
    made.metrics["prefill_seconds"] = {"unit": "seconds", "value": 0.0201, "samples": [0.0201]}
    made.metrics["cache_bytes"] = {"unit": "bytes", "value": 65536, "samples": [65536]}
    made.metrics["peak_bytes.prefill"] = {"unit": "bytes", "value": 2e6, "samples": [2e6]}
    made.metrics["peak_bytes.decode"] = {"unit": "bytes", "value": 1e6, "samples": [1e6]}
    return made


def compiled(cache: str, decode: float) -> Record:
    """The same with a compiling runner."""
    made = record(cache, "compile", decode)
    for name, value in (("compile_cold_seconds", 21.4), ("compile_warm_seconds", 3.3)):
        made.metrics[name] = {"unit": "seconds", "value": value, "samples": [value]}
    for name, value in (("graphs", 2), ("graph_breaks", 1), ("recompiles", 0)):
        made.metrics[f"{name}.decode"] = {"unit": "count", "value": value, "samples": [value]}
    return made


def broken(cache: str, reason: str) -> Record:
    """A broken record."""
    return Record(Case("llava-tiny", cache, "eager"), "broken", reason)


def printed(*records: Record, streaming: bool = False) -> str:
    """The table as text."""
    console = Console(file=io.StringIO(), width=WIDTH)
    if streaming:
        printer = RowPrinter(console, [r.case for r in records])
        for r in records:
            printer.row(r)
        printer.finish()
    else:
        print_records(console, records)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_table() -> None:
    text = printed(record(), record("static", decode=1.12e-3), compiled("dynamic", 5e-4), compiled("static", 4e-4))
    assert text == (
        "llava-tiny\n"
        "                    decode        prefill compile s  cache   peak           decode v\n"
        "                  ms/token  tok/s      ms cold/warm     MB     MB g/b/r      dynamic\n"
        "dynamic eager     1.00 ±2%   1000    20.1           0.0655   2.00          reference\n"
        "dynamic compile  0.500 ±2%   2000    20.1 21.4/3.30 0.0655   2.00 2/1/0    reference\n"
        "static eager      1.12 ±2%    893    20.1           0.0655   2.00       1.12x slower\n"
        "static compile   0.400 ±2%   2500    20.1 21.4/3.30 0.0655   2.00 2/1/0 1.25x faster\n"
        "\n"
        "±: half the range over the median of fresh processes\n"
        "tok/s: tokens decoded a second, all rows of the batch together\n"
        "g/b/r: graphs, graph breaks and recompiles of decode\n"
    )


def test_columns_nobody_fills_are_left_out() -> None:
    text = printed(record(), record("static"))
    assert "compile" not in text and "g/b/r" not in text and "vision" not in text and "generate" not in text


def test_rows_come_one_by_one() -> None:
    console = Console(file=io.StringIO(), width=WIDTH)
    printer = RowPrinter(console, [Case("llava-tiny", "dynamic", "eager")] * 2)
    printer.row(record())
    first = console.file.getvalue()  # type: ignore[attr-defined]
    assert "dynamic eager" in first and "compile" not in first
    printer.row(record("static"))
    assert console.file.getvalue().startswith(first)  # type: ignore[attr-defined]


def test_a_row_before_its_reference_is_compared_at_the_end() -> None:
    text = printed(record("static", decode=2e-3), record(), streaming=True)
    assert "\nllava-tiny static eager: decode 2.00x slower than dynamic\n" in text


def test_each_model_and_workload_has_a_heading() -> None:
    text = printed(record(), record(cache_length=8192, batch=4), record("static", model="qwen2_vl-tiny"))
    assert [line for line in text.splitlines() if line.startswith(("llava", "qwen"))] == [
        "llava-tiny",
        "llava-tiny  batch=4  cache_length=8192",
        "qwen2_vl-tiny",
    ]
    # Four rows a step are four tokens a step.
    assert "4000" in text
    # Another model's dynamic cache is no reference.
    assert text.rstrip().splitlines()[-4].rstrip().endswith("2.00")


def test_a_row_that_is_not_ok_says_why_and_stays_narrow() -> None:
    unsupported = Record(Case("llava-tiny", "tensor", "eager"), "unsupported", "needs a GPU")
    text = printed(record(), broken("static", "hung: no answer to 'block decode' " + "and so on " * 30), unsupported)
    assert "static eager   broken: hung: no answer to 'block decode'" in text
    assert "tensor eager   unsupported: needs a GPU" in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_only_broken_records() -> None:
    text = printed(broken("static", ""))
    # No number is shown, so no sign is explained.
    assert "broken: no reason given" in text and "±" not in text


def test_markup_in_a_reason_is_text() -> None:
    assert "[bold]x[/bold] [/]" in printed(broken("static", "[bold]x[/bold] [/]"))


def test_a_full_table_fits() -> None:
    made = compiled("dynamic", 123.4e-3)
    for name in ("vision_seconds", "generate_seconds"):
        made.metrics[name] = {"unit": "seconds", "value": 12.345, "samples": [12.345]}
    assert max(len(line) for line in printed(made).splitlines()) <= WIDTH


@pytest.mark.parametrize(
    ("amount", "text"),
    [(1234.5, "1234"), (123.45, "123"), (12.345, "12.3"), (1.2345, "1.23"), (0.012345, "0.0123"), (0, "0")],
)
def test_numbers_have_three_digits(amount: float, text: str) -> None:
    assert number(amount) == text
    assert number(math.nan) == ""


def test_speed_in_words() -> None:
    assert relative(record("static", decode=1.12e-3), record()) == "1.12x slower"
    assert relative(record("static", decode=5e-4), record()) == "2.00x faster"
    assert relative(record("static"), None) == ""
    assert relative(broken("static", "x"), record()) == ""


def test_json_lines() -> None:
    made = record("static")
    made.metrics["generate_seconds"] = {"unit": "seconds", "value": math.nan, "samples": [math.inf]}
    line = json_line(made)
    data = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "\n" not in line
    assert data["id"] == "llava-tiny/static/eager" and data["case"]["cache"] == "static"
    assert {"status", "reason", "metrics", "facts", "checks", "versions", "device", "protocol"} <= set(data)
    assert set(data["metrics"]["decode_seconds_per_token"]) == {"unit", "value", "samples"}
    assert data["metrics"]["generate_seconds"] == {"unit": "seconds", "value": None, "samples": [None]}
