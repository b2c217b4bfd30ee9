"""What two revisions differ in: the comparison as data, and as a table for a terminal.

Nothing here reads files or decides anything: `revisions` makes a Comparison, this shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vlmbench.compare import ALPHA, Verdict, in_words, percent
from vlmbench.errors import unknown
from vlmbench.metrics import BY_KEY, BY_NAME
from vlmbench.schema import clean

Group = Literal["broken", "regression", "improvement", "unknown", "unmeasured", "same"]

#: Order in which a reader needs them.
GROUPS: tuple[Group, ...] = ("broken", "regression", "improvement", "unknown", "unmeasured", "same")
#: Undecided series shown on a terminal; JSON has all of them.
MAX_UNDECIDED = 20
#: Seconds and bytes inside, scaled only here: (factor, suffix), largest first.
_SCALES = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}


@dataclass(frozen=True)
class Revision:
    """A commit with results: what the user called it, its full hash, date (ISO) and subject line."""

    name: str
    commit: str
    date: str = ""
    subject: str = ""

    def __str__(self) -> str:
        short = self.commit[:8]
        return short if self.commit.startswith(self.name) else f"{self.name} ({short})"


@dataclass(frozen=True)
class Series:
    """One benchmark × parameters on one machine, before and after.

    `before` and `after` are in `unit`, None where there is no value; `tokens_before`, `tokens_after`
    are tokens per second for series in seconds per token. `group` is the verdict's state, or
    "unmeasured", for which `reason` says what is missing.
    """

    machine: str
    env: str
    benchmark: str
    metric: str
    params: dict[str, Any]
    unit: str
    before: float | None
    after: float | None
    group: Group
    verdict: Verdict
    reason: str = ""
    tokens_before: float | None = None
    tokens_after: float | None = None

    @property
    def words(self) -> str:
        """The change for people: "1.12x slower"."""
        return in_words(self.verdict.ratio, self.unit)

    @property
    def label(self) -> str:
        """Metric or benchmark and the parameters' values."""
        return " ".join([self.metric or self.benchmark, *(str(value) for value in self.params.values())])

    def to_json(self) -> dict[str, Any]:
        """Plain values; `ratio` is head / base, below 1 is better."""
        data = asdict(self)
        data["verdict"] = self.verdict.state
        data["ratio"], data["interval"] = self.verdict.ratio, [self.verdict.low, self.verdict.high]
        return data | {"words": self.words}


@dataclass(frozen=True)
class Comparison:
    """Two revisions on the machines that measured both; `notes` are what a reader must know besides."""

    base: Revision
    head: Revision
    machines: tuple[str, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()

    def group(self, name: Group) -> list[Series]:
        """The series of one group, the largest change first; unmeasured ones by name."""
        found = [series for series in self.series if series.group == name]
        return sorted(found, key=_name if name == "unmeasured" else _distance)

    def counts(self) -> dict[str, int]:
        """How many series each group has, in the order of GROUPS."""
        found = Counter(series.group for series in self.series)
        return {name: found[name] for name in GROUPS}

    def only(self, names: Sequence[str]) -> Comparison:
        """The same with the series of these metrics or metric keys alone. Raises UsageError for an unknown one."""
        for name in names:
            if name not in BY_NAME and name not in BY_KEY:
                raise unknown("metric", name, BY_NAME)
        kept = [s for s in self.series if s.metric in names or s.metric.partition(".")[0] in names]
        return replace(self, series=tuple(kept))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, non-finite numbers as null."""
        groups = [series.to_json() for name in GROUPS for series in self.group(name)]
        return clean(
            {
                "base": asdict(self.base),
                "head": asdict(self.head),
                "machines": self.machines,
                "counts": self.counts(),
                "series": groups,
                "notes": self.notes,
                "problems": [{"path": path, "reason": reason} for path, reason in self.problems],
            }
        )


def _distance(series: Series) -> tuple[float, str]:
    ratio = series.verdict.ratio
    return (-abs(math.log(ratio)) if 0 < ratio < math.inf else -math.inf, series.label)


def _name(series: Series) -> tuple[float, str]:
    return (0.0, series.label)


def render(comparison: Comparison) -> RenderableType:
    """Summary sentence, what broke, one table a machine, then what was not measured, notes and damaged files.

    Fits 110 columns. Names come from files and are shown as text, whatever they hold.
    """
    parts: list[RenderableType] = [Text(_printable(summary(comparison)), style="bold")]
    broken, missing = comparison.group("broken"), comparison.group("unmeasured")
    if broken:
        parts += [
            Text(),
            Text(f"Broken, measured before: {len(broken)} series", "bold red"),
            _missing(broken),
        ]
    for machine in comparison.machines:
        table = _table(comparison, machine)
        if table.row_count:
            parts += [Text(), Text(f"Machine {_printable(machine)}"), table]
    if missing:
        parts += [Text(), Text(f"Not measured: {len(missing)} series"), _missing(missing)]
    parts.append(Text())
    for note in comparison.notes:
        parts.append(Text(_printable(f"Note: {note}")))
    for path, reason in comparison.problems:
        parts.append(Text(_printable(f"Left out: {path}: {reason}"), style="yellow"))
    return Stack(*parts)


def summary(comparison: Comparison) -> str:
    """The comparison in a sentence or two."""
    counts = comparison.counts()
    parts = [f"{counts['broken']} broken"] if counts["broken"] else []
    for found, word in (
        (comparison.group("regression"), "regression"),
        (comparison.group("improvement"), "improvement"),
    ):
        if found:
            plural = "s" if len(found) > 1 else ""
            parts.append(f"{len(found)} {word}{plural} (largest: {found[0].label}, {found[0].words})")
    if not parts:
        parts.append("no difference shown")
    rest = {"same": "the same", "unknown": "without enough evidence", "unmeasured": "not measured"}
    parts += [f"{counts[name]} {text}" for name, text in rest.items() if counts[name]]
    text = f"{comparison.base} → {comparison.head}: {', '.join(parts)}."
    judged = sum(math.isfinite(series.verdict.low) for series in comparison.series)
    if judged * ALPHA >= 0.5:
        text += f" Of the {judged} timings judged, about {round(judged * ALPHA)} differ by chance."
    return text


_TITLES: dict[Group, str] = {
    "regression": "Regressions",
    "improvement": "Improvements",
    "unknown": "Not enough evidence",
}


def _table(comparison: Comparison, machine: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("series", max_width=52, overflow="fold")
    for title in ("before", "after", "tokens/s", "change", f"{1 - ALPHA:.0%} interval"):
        table.add_column(title, justify="right", overflow="fold")
    for name, title in _TITLES.items():
        rows = [series for series in comparison.group(name) if series.machine == machine]
        if not rows:
            continue
        table.add_row(Text(f"{title}: {len(rows)}", style="bold"))
        reasons = Counter(series.reason for series in rows if not math.isfinite(series.verdict.low))
        if name == "unknown" and reasons:
            [(reason, count)] = reasons.most_common(1)
            table.add_row(Text(_printable(f"{count} of them: {reason}"), style="dim"))
        shown = rows[:MAX_UNDECIDED] if name == "unknown" else rows
        for series in shown:
            table.add_row(*_cells(series))
        if len(shown) < len(rows):
            table.add_row(Text(f"and {len(rows) - len(shown)} smaller ones: --json has all", style="dim"))
    return table


def _cells(series: Series) -> list[Text]:
    tokens = [series.tokens_before, series.tokens_after]
    both = " → ".join(_rate(value) for value in tokens) if any(tokens) else ""
    interval, found = "", series.verdict
    if math.isfinite(found.low):
        interval = f"{percent(found.low)[:-2]}…{percent(found.high)}"
    style = {"regression": "red", "improvement": "green"}.get(series.group, "")
    values = [human(value, series.unit) for value in (series.before, series.after)]
    texts = [Text(_printable(text)) for text in (series.label, *values, both)]
    return [*texts, Text(series.words, style=style), Text(interval)]


def _missing(missing: list[Series]) -> Table:
    """Series without a value, those with one reason together: their metrics, then their parameters.

    A case that cannot run takes all its series with it: one line says so, and names them.
    """
    metrics: dict[tuple[str, str, str], list[str]] = {}
    for series in missing:
        where = " ".join(str(value) for value in series.params.values())
        metrics.setdefault((series.machine, series.reason, where), []).append(series.metric or series.benchmark)
    cases: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (machine, reason, where), names in metrics.items():
        cases.setdefault((machine, reason, tuple(names)), []).append(where)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, width in (("series", 46), ("of", 26), ("why", 34)):
        table.add_column(title, max_width=width, overflow="fold")
    for (_, reason, names_), places in cases.items():
        table.add_row(*(Text(_printable(", ".join(filter(None, part)))) for part in (names_, places, [reason])))
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def human(value: float | None, unit: str) -> str:
    """A value for people: "1.23 ms", "45.67 MB", "12"; "-" for None. Exact bytes get a digit more."""
    if value is None:
        return "-"
    digits = 4 if unit == "bytes" else 3
    for factor, suffix in _SCALES.get(unit, ()):
        # 999.96 µs is shown as 1 ms, since rounding would make it 1e+03 µs.
        if abs(scaled := float(f"{value / factor:.{digits}g}")) >= 1:
            return f"{scaled:.{digits}g} {suffix}" if abs(scaled) < 10**digits else f"{scaled:.0f} {suffix}"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def _printable(text: str) -> str:
    """Text without control characters and direction marks, which a file could use to draw on a terminal."""
    return "".join(c if c.isprintable() or c == " " else "\N{REPLACEMENT CHARACTER}" for c in text)
