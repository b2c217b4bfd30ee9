"""What there is: models, cache kinds, runners, metrics and devices, as rows for people and programs.

Imports no family, no cache kind and no torch, so it answers at once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vlmbench import devices, kinds, metrics
from vlmbench.errors import unknown
from vlmbench.provenance import cpu_name, gpu_names

Row = dict[str, Any]


def models() -> list[Row]:
    """Every model: name, family, when it is measured, its own case fields and cache kinds."""
    return [
        {
            "name": model.name,
            "family": model.family,
            "measured": {"default": "always", "nightly": "nightly", "name": "by name"}[model.suite],
            "summary": model.summary,
            "case": model.case,
            "caches": list(model.caches),
            "why": model.why,
        }
        for model in kinds.models().values()
    ]


def caches() -> list[Row]:
    """Every cache kind."""
    return [{"name": kind.name, "summary": kind.summary} for kind in kinds.caches().values()]


def runners() -> list[Row]:
    """Every runner."""
    return [asdict(runner) for runner in kinds.RUNNERS.values()]


def metric_rows() -> list[Row]:
    """Every metric: unit, trust, phases, meaning."""
    return [
        {"name": m.name, "unit": m.unit, "trust": m.trust, "phases": list(m.phases), "meaning": m.meaning}
        for m in metrics.METRICS
    ]


def device_rows() -> list[Row]:
    """The devices of this machine, with their data sheets' rates where known (bytes/s, FLOP/s)."""
    rows: list[Row] = [{"name": "cpu", "hardware": cpu_name()}]
    for name in gpu_names():
        rates = devices.peak(name)
        rows.append({"name": "cuda", "hardware": name, **(asdict(rates) if rates else {})})
    return rows


LISTS = {
    "models": models,
    "caches": caches,
    "runners": runners,
    "metrics": metric_rows,
    "devices": device_rows,
}


def rows(what: str) -> list[Row]:
    """The rows of one list. Raises UsageError for a list that does not exist."""
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    return LISTS[what]()


def text(what: str) -> list[str]:
    """One list as aligned lines: the short fields in columns, the sentence last."""
    found = rows(what)
    shown = [[_short(row, name) for name in _COLUMNS[what]] for row in found]
    widths = [max(len(cells[i]) for cells in shown) for i in range(len(_COLUMNS[what]))] if shown else []
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in shown]
    return [line.rstrip() for line in lines]


_COLUMNS = {
    "models": ("name", "family", "measured", "summary"),
    "caches": ("name", "summary"),
    "runners": ("name", "summary"),
    "metrics": ("name", "unit", "trust", "phases", "meaning"),
    "devices": ("name", "hardware", "bytes_per_second", "bf16_flops"),
}


def _short(row: Row, name: str) -> str:
    value = row.get(name, "")
    if name == "measured" and row.get("caches"):
        return f"{value} ({' and '.join(row['caches'])})"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    if name == "bytes_per_second" and value:
        return f"{value / 1e9:.0f} GB/s"
    if name == "bf16_flops" and value:
        return f"{value / 1e12:.0f} TFLOP/s bf16"
    return str(value)
