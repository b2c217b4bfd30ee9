"""scripts/bench: measures HEAD, and main's merge base when HEAD is elsewhere, through asv.

asv runs into a log file while each finished case is shown as a row; then the caches are compared and
asv's own comparison is printed: with the merge base or, on main, with the last commit before HEAD that
this machine has measured. A commit that it has measured whole is not measured again.

    scripts/bench
    scripts/bench --against v0.1.0 --rigorous
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vlmbench import commits, kinds, provenance, report, suite
from vlmbench.errors import UsageError
from vlmbench.measure import available_cores
from vlmbench.schema import Case, Envelope, Record, read_lines

if TYPE_CHECKING:
    from rich.status import Status

#: Signals that end a run; all are taken like Ctrl-C.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds asv has to end after an interrupt.
END_LIMIT = 30.0
#: A row of `asv compare` for a combination that both commits skip.
_NOTHING = re.compile(r"\|\s*\|\s*n/a\s*\|\s*n/a\s*\|")

#: Most cases measured at once: more keep the clock's lock waiting and the memory full.
MOST_JOBS = 4
#: Seconds between two looks for a finished record.
LOOK = 0.5
#: Lines of asv's log that are shown when it failed.
LOG_TAIL = 30
#: asv.conf.json says spawn, as benchmarks may measure. Here all is measured before the first of them, and
#: hundreds only read: forked from one process they take 40 ms each instead of 100 to 500.
LAUNCH = ("--launch-method", "forkserver")
#: What `asv run` exits with when a benchmark failed, and all others were stored.
ASV_SOME_FAILED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 when a case is broken or asv failed, 2 for a wrong use, 130 after Ctrl-C."""
    console = Console(highlight=False)
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="compared with HEAD (main's merge base)")
    parser.add_argument("--jobs", type=int, default=0, help="cases measured at once (one a core, at most 4)")
    parser.add_argument("--rigorous", action="store_true", help=f"{suite.RIGOROUS} processes a case, not 3")
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    options = parser.parse_args(arguments)
    # Also where SIGINT was ignored (a job in the background): asv would inherit that and could not be ended.
    old = {number: signal.signal(number, _interrupt) for number in _ENDING}
    try:
        return _bench(Path.cwd(), console, options)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: finished records are kept in results/", file=sys.stderr)
        return 130
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _bench(root: Path, console: Console, options: argparse.Namespace) -> int:
    head = _commit("HEAD", root)
    base = _commit(options.against, root) if options.against else _merge_base(root)
    wanted = [head] if base in (None, head) else [head, base]
    machine = provenance.machine_name()
    register_machine(machine)
    console.print(f"machine {machine}, device {provenance.detect_device()}", style="dim")
    if _git(root, "status", "--porcelain", "--untracked-files=no", "--", "vlmbench", "constraints.txt"):
        console.print("files differ from HEAD: asv measures what is committed", style="yellow")
    for commit in wanted:
        missing = "asked for" if options.again else unmeasured(root, machine, commit)
        console.print(f"\n{_title(commit, root)}: {'measured already' if not missing else 'measuring'}", style="bold")
        if missing and not _run(root, console, options, machine, commit):
            return 1
    records = [record for _, record in _records(root, machine, head)]
    console.print(f"\nCaches compared, {_title(head, root)}", style="bold")
    report.print_records(console, records)
    before = wanted[1] if len(wanted) == 2 else _measured_before(root, machine, head)
    if before:
        console.print(f"\nasv compare {before[:8]} {head[:8]}", style="bold")
        _compare(root, console, machine, before, head)
    broken = [record for record in records if record.status == "broken"]
    for record in broken:
        console.print(f"{record.case.id} is broken: {record.reason}", style="red", markup=False)
    return 1 if broken else 0


def register_machine(name: str) -> None:
    """Enter this machine into asv's own list, unless it is there; the others in it stay as they are.

    Only what never changes is said of it: asv makes a series of its own for each value it sees.
    """
    # asv is imported here since it takes its time, and only `scripts/bench` needs it.
    from asv.machine import MachineCollection
    from asv.util import UserError

    try:
        MachineCollection.load(name)
    except UserError:
        pass
    else:
        return
    gpus = provenance.gpu_names()
    facts = {
        "machine": name,
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": provenance.cpu_name(),
        "num_cpu": str(os.cpu_count() or 1),
        **({"gpu": f"{len(gpus)}x {gpus[0]}"} if gpus else {}),
    }
    MachineCollection.save(name, facts)


def unmeasured(root: Path, machine: str, commit: str) -> str:
    """Why a commit has to be measured here, "" when its whole suite is in asv's tree and records."""
    lines = list(_lines(root, machine, commit))
    listed = next((payload.get("cases") for e, payload in lines if e.kind == suite.SUITE_LINE), None)
    if not isinstance(listed, list):
        return "its suite has not been measured whole"
    records = {envelope.case: Record.from_json(p) for envelope, p in lines if envelope.kind == "record"}
    if missing := [case for case in listed if case not in records]:
        return f"{missing[0]} has no record"
    return _without_series(root, machine, commit, [records[case] for case in listed])


def _without_series(root: Path, machine: str, commit: str, records: Sequence[Record]) -> str:
    """The first metric of a record that asv's tree lacks: an interrupted run, or one of a selection."""
    from vlmbench.results import read_tree

    tree = read_tree(root / "results")
    rows = tree.frame
    rows = rows[(rows["commit"] == commit) & (rows["machine"] == machine) & (rows["metric"] != "")]
    benchmarks = [name for name in tree.benchmarks if name.partition(".")[2].startswith("track_")]
    if absent := set(benchmarks) - set(rows["benchmark"]):
        return f"{min(absent)} has not run"
    stored = {
        (row.metric, *(row.params.get(name) for name in ("model", "cache", "runner"))): row.status
        for row in rows.itertuples()
    }
    for record in records:
        case = record.case
        for key in record.metrics if record.status == "ok" else ():
            if stored.get((key, case.model, case.cache, case.runner), "ok") != "ok":
                return f"{case.id} has no {key} in asv's results"
    return ""


def _run(root: Path, console: Console, options: argparse.Namespace, machine: str, commit: str) -> bool:
    """`asv run` of one commit, its records shown as they come; False when it failed."""
    jobs = options.jobs or min(len(available_cores()), MOST_JOBS)
    if jobs < 1:
        raise UsageError(f"--jobs is {jobs}: it must be at least 1")
    environment = {
        **os.environ,
        provenance.MACHINE_VARIABLE: machine,
        suite.BENCH_VARIABLE: str(os.getpid()),
        "VLMBENCH_PREFETCH": "1",
        "VLMBENCH_JOBS": str(jobs),
        "VLMBENCH_RIGOROUS": str(int(options.rigorous)),
    }
    log = root / ".asv" / f"bench-{commit[:8]}.log"
    log.parent.mkdir(exist_ok=True)
    seen = {_key(envelope) for envelope, _ in _lines(root, machine, commit)}
    command = ("run", f"{commit}^!", "--machine", machine, "--record-samples", "--show-stderr", *LAUNCH)
    started = time.monotonic()
    with log.open("wb") as file:
        # In a session of its own: a Ctrl-C reaches us alone, and asv gets one signal, not two.
        asv = subprocess.Popen(
            _command(*command),
            cwd=root,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shown = watch(root, console, machine, commit, asv, log, seen)
        except BaseException:
            _end(asv)
            raise
    took = f"{(time.monotonic() - started) / 60:.1f} min"
    missing = unmeasured(root, machine, commit)
    if asv.returncode not in (0, ASV_SOME_FAILED) or missing:
        console.print(
            f"asv failed after {took} ({missing or f'exit code {asv.returncode}'}); its log ends:",
            style="red",
        )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        console.print("\n".join(lines[-LOG_TAIL:]), markup=False)
        console.print(f"the whole log: {log}", markup=False)
        return False
    console.print(f"{shown} cases measured in {took}", style="dim")
    return True


def watch(
    root: Path,
    console: Console,
    machine: str,
    commit: str,
    asv: subprocess.Popen[bytes],
    log: Path,
    seen: set[tuple[str, str]],
) -> int:
    """Show each new record of a commit as a row until asv ends; how many were shown.

    `seen` are the (run, case) pairs of older runs, which are not shown.
    """
    cases = kinds.default_cases(provenance.detect_device())
    printer = report.RowPrinter(console, cases)
    shown = 0
    with console.status("asv starts") as status:
        while True:
            ended = asv.poll() is not None
            for envelope, record in _records(root, machine, commit):
                if _key(envelope) not in seen:
                    seen.add(_key(envelope))
                    printer.row(record)
                    shown += 1
            if ended:
                break
            _say(status, shown, cases, log)
            time.sleep(LOOK)
    printer.finish()
    return shown


def _say(status: Status, shown: int, cases: Sequence[Case], log: Path) -> None:
    if shown == len(cases):
        text = f"all {shown} cases are measured, asv stores the series"
    elif shown:
        text = f"{shown} of {len(cases)} cases are measured"
    else:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip(" ·.") for line in reversed(lines) if line.strip(" ·.")), "starts")
        text = f"asv: {last[:80]} (a new environment takes a minute or two)"
    status.update(text.replace("[", r"\["))


def _end(asv: subprocess.Popen[bytes]) -> None:
    """Interrupt asv, which then ends what it started; a second Ctrl-C does not cut that short."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    asv.send_signal(signal.SIGINT)
    try:
        asv.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        # What measures for it sees that it is gone and ends.
        asv.kill()
        asv.wait()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _lines(root: Path, machine: str, commit: str) -> Iterator[tuple[Envelope, dict[str, Any]]]:
    """The undamaged lines beside asv's results of a commit."""
    folder = suite.records_file(root, machine, commit, "").parent
    for path in sorted(folder.glob(f"{commit[:8]}-*.jsonl")):
        for _, envelope, payload in read_lines(path):
            if envelope is not None and isinstance(payload, dict) and envelope.commit == commit:
                yield envelope, payload


def _records(root: Path, machine: str, commit: str) -> Iterator[tuple[Envelope, Record]]:
    for envelope, payload in _lines(root, machine, commit):
        if envelope.kind == "record":
            yield envelope, Record.from_json(payload)


def _key(envelope: Envelope) -> tuple[str, str]:
    return envelope.run, envelope.case


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asv", *arguments]


def _compare(root: Path, console: Console, machine: str, before: str, head: str) -> None:
    """asv's table without the rows that have no number on either side; its exit code says nothing."""
    command = _command("compare", "--machine", machine, before, head)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if not _NOTHING.match(line)]
    console.print("\n".join([*rows, done.stderr]).rstrip(), markup=False, soft_wrap=True)
    console.print(f"with verdicts in words: vlmbench compare {before[:8]} {head[:8]}", style="dim")


def _commit(revision: str, root: Path) -> str:
    found = commits.resolve(revision, root)
    if found is None:
        raise UsageError(f"'{revision}' is no commit of {root}: asv measures commits of a git repository")
    return found


def _merge_base(root: Path) -> str | None:
    for main_branch in ("main", "origin/main"):
        if found := _git(root, "merge-base", main_branch, "HEAD"):
            return found
    return None


def _measured_before(root: Path, machine: str, head: str) -> str | None:
    """The last commit before `head` that has asv results of this machine."""
    folder = suite.records_file(root, machine, head, "").parent
    stored = {path.name[:8] for path in folder.glob("*-*.json")}
    return next((c for c in _git(root, "rev-list", f"{head}^@").split() if c[:8] in stored), None)


def _title(commit: str, root: Path) -> str:
    return f"{commit[:8]} {commits.subjects([commit], root).get(commit, '')}".strip()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    raise SystemExit(main())
