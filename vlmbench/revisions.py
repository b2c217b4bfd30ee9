"""Two revisions of a results tree, series by series: what got slower, what faster, what nobody measured.

    vlmbench compare main HEAD

A series counts on a machine that measured both revisions. Its values are one per fresh process:
the samples asv stored, or the record's where asv stored only their median. Benchmarks of other
projects have a ratio but no verdict, since asv's samples of one process are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from vlmbench import commits
from vlmbench.compare import Verdict, verdict
from vlmbench.differences import Comparison, Group, Revision, Series, render
from vlmbench.errors import UsageError, unknown
from vlmbench.metrics import BY_KEY, tokens_per_second
from vlmbench.results import Tree, read_tree
from vlmbench.schema import Record

#: Revisions listed in an error.
MAX_LISTED = 10
#: Relative difference up to which asv's median and a record's value are one number: records keep six digits.
MATCH = 2e-5

__all__ = ["compare_revisions", "render"]


def compare_revisions(
    results_dir: Path | str, base: str, head: str, *, machine: str | None = None, repo: Path | str = "."
) -> Comparison:
    """Compare two revisions that a results tree holds.

    `base` and `head` are anything git knows in `repo`, or the start of a commit hash in the tree.
    Raises UsageError for a missing folder, an unknown revision or machine, revisions without
    results and revisions that no machine measured both of; each lists what there is.
    """
    tree = read_tree(results_dir)
    known = _Known(tree.frame, Path(results_dir), Path(repo))
    before, after = known.revision(base), known.revision(head)
    if before.commit == after.commit:
        raise UsageError(f"'{base}' and '{head}' are the same commit {after.commit[:8]}: name two; {known.listing()}")
    sides = [tree.frame[tree.frame["commit"] == revision.commit] for revision in (before, after)]
    machines, notes = _machines(sides, (before, after), machine)
    join = _Join(tree, before, after)
    for name in machines:
        join.machine(name, *(side[side["machine"] == name] for side in sides))
    notes += join.notes()
    return Comparison(before, after, machines, tuple(join.series), tuple(notes), tuple(tree.problems))


class _Known:
    """The commits that have results, and the repository that names them."""

    def __init__(self, frame: pd.DataFrame, folder: Path, repo: Path) -> None:
        self.folder, self.repo = folder, repo
        dated = frame[["commit", "date"]].drop_duplicates("commit").sort_values("date", ascending=False)
        self.dates = {
            str(commit): "" if pd.isna(date) else date.isoformat(timespec="seconds")
            for commit, date in zip(dated["commit"], dated["date"], strict=True)
        }

    def revision(self, name: str) -> Revision:
        """Full commit of a user's name for it. Raises UsageError listing the revisions with results."""
        if not self.dates:
            raise UsageError(f"'{self.folder}' holds no results: run `asv run` first, or name another with --results")
        commit = commits.resolve(name, self.repo)
        if commit is None:
            # A tree of another project, or a shallow clone that lacks the commit.
            starts = [c for c in self.dates if c.startswith(name)] if len(name) >= 4 else []
            if len(starts) != 1:
                why = "fits several commits" if starts else f"is unknown to the repository '{self.repo}'"
                raise UsageError(f"revision '{name}' {why}: name one of these; {self.listing()}")
            commit = starts[0]
        if commit not in self.dates:
            raise UsageError(
                f"revision '{name}' ({commit[:8]}) has no results in '{self.folder}': "
                f"run `asv run {commit[:8]}^!`, or name another; {self.listing()}"
            )
        return Revision(name, commit, self.dates[commit], commits.subjects([commit], self.repo).get(commit, ""))

    def listing(self) -> str:
        """The newest commits with results: short hash, date, subject line."""
        newest = list(self.dates)[:MAX_LISTED]
        subjects = commits.subjects(newest, self.repo)
        lines = [f"\n  {c[:8]} {self.dates[c][:10]} {subjects.get(c, '')}".rstrip() for c in newest]
        more = len(self.dates) - len(newest)
        return "revisions with results:" + "".join(lines) + (f"\n  and {more} older" if more > 0 else "")


def _machines(
    sides: list[pd.DataFrame], revisions: tuple[Revision, Revision], wanted: str | None
) -> tuple[tuple[str, ...], list[str]]:
    """Machines that measured both revisions, and a note for each that measured only one."""
    have = [{str(m) for m in side["machine"].unique()} for side in sides]
    if wanted is not None:
        if wanted not in have[0] | have[1]:
            raise unknown("machine", wanted, sorted(have[0] | have[1]))
        have = [side & {wanted} for side in have]
    both = sorted(have[0] & have[1])
    lacking = [(m, revisions[m in have[0]]) for m in sorted(have[0] ^ have[1])]
    notes = [f"machine '{m}' has not measured {revision}" for m, revision in lacking]
    if not both:
        _, revision = lacking[0]
        raise UsageError(
            f"no machine has measured both: {'; '.join(notes)}: run `asv run {revision.commit[:8]}^!` there"
        )
    return tuple(both), notes


@dataclass
class _Join:
    """Pairs the rows of two commits and judges each pair."""

    tree: Tree
    base: Revision
    head: Revision
    series: list[Series] = field(default_factory=list)
    versions: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records: dict[tuple[str, ...], list[Record]] = {}
        plainest_first = sorted(self.tree.records.items(), key=lambda item: len(item[0][2]))
        for (commit, machine, _), record in plainest_first:
            if commit in (self.base.commit, self.head.commit):
                names = (record.case.model, record.case.cache, record.case.runner)
                self.records.setdefault((commit, machine, *names), []).append(record)

    def machine(self, name: str, before: pd.DataFrame, after: pd.DataFrame) -> None:
        """Add the series of one machine."""
        envs = [sorted({str(env) for env in side["env"].unique()}) for side in (before, after)]
        # Environments are named after their pins: a commit that changes pins changes the name.
        renamed = len(envs[0]) == len(envs[1]) == 1 and envs[0] != envs[1]
        if renamed:
            self.versions[f"environment {envs[0][0]} → {envs[1][0]} on {name}"] = None
        sides: list[dict[tuple[str, str], Any]] = []
        for side in (before, after):
            rows = side.itertuples(index=False)
            sides.append({("" if renamed else str(row.env), str(row.series)): row for row in rows})
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            self.series.append(self._pair(sides[0].get(key), sides[1].get(key)))

    def notes(self) -> list[str]:
        """What else differs between the two revisions, from environments and records."""
        return list(self.versions)

    def _pair(self, before: Any, after: Any) -> Series:
        row = after if after is not None else before
        records = [self._record(side) for side in (before, after)]
        states = ["missing" if side is None else str(side.status) for side in (before, after)]
        values = [
            float(side.value) if side is not None and state == "ok" else None
            for side, state in zip((before, after), states, strict=True)
        ]
        group, found, reason = self._judge(before, after, states, records)
        if records[0] and records[1]:
            self._note_versions(records[0], records[1])
        tokens = [
            tokens_per_second(value, record.case.batch if record else 1)
            if value is not None and str(row.metric).endswith("_seconds_per_token")
            else None
            for value, record in zip(values, records, strict=True)
        ]
        return Series(
            machine=str(row.machine),
            env=str(row.env),
            benchmark=str(row.benchmark),
            metric=str(row.metric),
            params=dict(row.params),
            unit=BY_KEY[row.metric].unit if row.metric else str(row.unit),
            before=values[0],
            after=values[1],
            group=group,
            verdict=found,
            reason=reason,
            tokens_before=tokens[0],
            tokens_after=tokens[1],
        )

    def _judge(
        self, before: Any, after: Any, states: list[str], records: list[Record | None]
    ) -> tuple[Group, Verdict, str]:
        if states != ["ok", "ok"]:
            reason = self._missing(states, records)
            broken = states == ["ok", "failed"]
            found = Verdict("broken" if broken else "unknown", reason=reason)
            return ("broken" if broken else "unmeasured"), found, reason
        if before.version != after.version:
            reason = f"measured by version {before.version} and {after.version} of the benchmark: not comparable"
            return "unmeasured", Verdict("unknown", reason=reason), reason
        if not before.metric:
            ratio = after.value / before.value if before.value > 0 else math.nan
            reason = "asv's samples of one process are not independent"
            return "unknown", Verdict("unknown", ratio, reason=reason), reason
        metric = BY_KEY[before.metric]
        found = verdict(_values(before, records[0]), _values(after, records[1]), metric)
        return found.state, found, found.reason

    def _missing(self, states: list[str], records: list[Record | None]) -> str:
        """What kept a series from being measured, by side, with the record's reason."""
        parts: dict[str, list[str]] = {}
        for revision, state, record in zip((self.base, self.head), states, records, strict=True):
            if state != "ok":
                why = record.reason if record and record.status != "ok" and state != "missing" else ""
                text = "not measured" if state == "missing" else state
                parts.setdefault(f"{text}: {why}" if why else text, []).append(str(revision))
        return "; ".join(
            f"{text} on both" if len(where) == 2 else f"{where[0]} {text}" for text, where in parts.items()
        )

    def _record(self, row: Any) -> Record | None:
        """The record that a row was read from.

        Records of other workloads share model, cache and runner: only one whose samples have the
        row's value as their median is its record. A row without a value gets the reason of the
        plainest case that has one.
        """
        if row is None or not row.metric:
            return None
        names = tuple(str(row.params.get(name)) for name in ("model", "cache", "runner"))
        for record in self.records.get((str(row.commit), str(row.machine), *names), []):
            if row.status != "ok":
                if record.status != "ok":
                    return record
                continue
            value = record.metrics.get(row.metric, {}).get("value")
            if isinstance(value, int | float) and math.isclose(value, row.value, rel_tol=MATCH):
                return record
        return None

    def _note_versions(self, before: Record, after: Record) -> None:
        for name in {**before.versions, **after.versions}:
            old, new = (record.versions.get(name, "none") for record in (before, after))
            if old != new:
                self.versions[f"{name} {old} → {new}"] = None


def _values(row: Any, record: Record | None) -> list[float]:
    """Values of a row, one per fresh process: asv's samples, else the record's, else the value alone."""
    stored = row.samples or (record.metrics.get(row.metric, {}).get("samples") if record else None)
    kept: Iterable[Any] = stored if isinstance(stored, list) else []
    return [float(v) for v in kept if isinstance(v, int | float)] or [float(row.value)]
