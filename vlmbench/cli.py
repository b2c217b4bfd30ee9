"""The command line: measure, list, doctor, compare.

Stdout carries what was asked for, stderr everything else. Exit codes: 0 when every case is ok or
unsupported, 1 when one is broken, 2 when what was asked cannot be, 130 after Ctrl-C.

    vlmbench measure --model llava-tiny --cache dynamic --cache static --runner eager
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vlmbench import __version__, console
from vlmbench.errors import UsageError, VlmbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from vlmbench.schema import Case, Record

LEDGER = "records.jsonl"


class _Commands(TyperGroup):
    """Turns a user's mistake, or a full disk, into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except VlmbenchError as error:
            console.say(f"vlmbench: {error}")
        except BrokenPipeError:
            # The reader (head, a pager) has seen enough; nothing may be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            console.say(f"vlmbench: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        raise typer.Exit(console.USAGE)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What a KV-cache change does to vision-language models, measured before it is merged.",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_WORKLOAD = "Workload"
_EFFORT = "Effort and output"


def _workload(help: str, *flags: str, least: int | None = None) -> Any:
    return typer.Option(*flags, help=help, min=least, rich_help_panel=_WORKLOAD)


def _effort(help: str, *flags: str, least: int | None = None) -> Any:
    return typer.Option(*flags, help=help, min=least, rich_help_panel=_EFFORT)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vlmbench {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def measure(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Model, repeatable; default: the default suite.")
    ] = None,
    cache: Annotated[
        list[str] | None, typer.Option("--cache", "-c", help="Cache kind, repeatable; default: all.")
    ] = None,
    runner: Annotated[
        list[str] | None, typer.Option("--runner", "-r", help="Runner, repeatable; default: all.")
    ] = None,
    image: Annotated[str | None, _workload("JPEG, PNG or WebP; default: the package's photograph.")] = None,
    checkpoint: Annotated[str | None, _workload("Real weights: a local folder or hub id.")] = None,
    batch: Annotated[int | None, _workload("Rows decoded together.", least=1)] = None,
    images: Annotated[int | None, _workload("Pictures in each row's prompt.", least=0)] = None,
    prompt_tokens: Annotated[int | None, _workload("Text tokens of the prompt.", least=1)] = None,
    new_tokens: Annotated[int | None, _workload("Tokens to decode.", least=1)] = None,
    cache_length: Annotated[int | None, _workload("Capacity of caches that have one.", least=1)] = None,
    dtype: Annotated[str | None, _workload("float32, bfloat16 or float16; default: the model's.")] = None,
    attention: Annotated[str | None, _workload("eager, sdpa, flash_attention_2, ...; default: sdpa.")] = None,
    device: Annotated[str, _workload("auto, cpu or cuda; auto: cuda where a GPU is seen.")] = "auto",
    threads: Annotated[int | None, _workload("CPU threads of a worker; default: 1.", least=1)] = None,
    compile_prefill: Annotated[
        bool, _workload("Compile the prefill too, where the runner compiles.", "--compile-prefill")
    ] = False,
    processes: Annotated[int | None, _effort("Fresh processes a case; default: 3, with --rigorous 8.", least=1)] = None,
    rigorous: Annotated[
        bool, _effort("Eight processes a case, and nothing left out to save time.", "--rigorous")
    ] = False,
    jobs: Annotated[int, _effort("Cases at once; their timed blocks never overlap.", least=1)] = 1,
    out: Annotated[Path | None, _effort("Folder of the run; default: .vlmbench/runs/<run>.")] = None,
    as_json: Annotated[bool, _effort("Print one JSON object a case instead of a table.", "--json")] = False,
    quiet: Annotated[bool, _effort("No progress and no warnings.", "--quiet", "-q")] = False,
) -> None:
    """Measure cases: model × cache kind × runner, one record each.

    Records are appended to records.jsonl in the run's folder as they are finished.
    """
    from vlmbench import doctor, provenance, request
    from vlmbench.measure import Effort, measure_all

    if device not in request.DEVICES:
        raise UsageError(f"unknown device '{device}': valid are {', '.join(request.DEVICES)}")
    workload = {
        "image": image,
        "checkpoint": checkpoint,
        "batch": batch,
        "images": images,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "cache_length": cache_length,
        "dtype": dtype,
        "attention": attention,
        "device": provenance.detect_device() if device == "auto" else device,
        "threads": threads,
        "compile_prefill": compile_prefill or None,
    }
    wanted = request.cases(model or [], cache or [], runner or [], workload)
    request.check_packages()
    run = request.run_id()
    folder = request.run_folder(out, run)
    ledger = folder / LEDGER
    if not quiet:
        for warned in doctor.examine().warnings:
            console.say(f"warning: {warned}")
    output = _Output(wanted, as_json=as_json, quiet=quiet)
    launcher = console.make_launcher()
    try:
        with console.terminated_as_interrupt(), output:
            measure_all(
                wanted,
                launcher,
                folder=folder,
                ledger=ledger,
                run=run,
                subject="vlmbench",
                commit=provenance.repository_state().label,
                machine=provenance.machine_name(),
                jobs=min(jobs, len(wanted)),
                processes=processes,
                effort=Effort.rigorous() if rigorous else Effort(),
                on_record=output.record,
                on_progress=output.progress,
            )
    except KeyboardInterrupt:
        kept = f"{len(output.records)} of {len(wanted)} records are kept in {ledger}"
        console.say(f"vlmbench: interrupted; {kept}" if output.records else "vlmbench: interrupted; no record yet")
        raise typer.Exit(console.INTERRUPTED) from None
    finally:
        launcher.close()
    if not quiet:
        console.say(f"records: {ledger}")
    if any(record.status == "broken" for record in output.records):
        raise typer.Exit(console.BROKEN)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="models, caches, runners, metrics or devices; default: all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List models, cache kinds, runners, metrics and devices."""
    from vlmbench import listing

    names = [what] if what else list(listing.LISTS)
    if as_json:
        found = {name: listing.rows(name) for name in names}
        print(json.dumps(found[what] if what else found, indent=2))
        return
    for index, name in enumerate(names):
        lines = listing.text(name)
        if what is None:
            print(f"{'' if index == 0 else chr(10)}{name}")
        for line in lines:
            print(line if what else f"  {line}")


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Show versions and devices, and warn about what will spoil a measurement here."""
    from vlmbench import doctor as check

    found = check.examine()
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(check.lines(found)))


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="Revision to compare with: branch, tag or commit.")],
    head: Annotated[str, typer.Argument(help="Revision that is compared.")],
    results: Annotated[Path, typer.Option(help="asv's results folder.")] = Path("results"),
    machine: Annotated[str | None, typer.Option(help="Only this machine's results.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric's series, repeatable.")] = None,
    repo: Annotated[Path, typer.Option(help="Repository whose revisions are named.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Compare two revisions that asv has measured: what got slower, faster, or was not measured."""
    from vlmbench import revisions

    found = revisions.compare_revisions(results, base, head, machine=machine, repo=repo)
    if metric:
        found = found.only(metric)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    from rich.console import Console

    # A pipe has no width of its own; the table is made for 110 columns.
    Console(width=None if sys.stdout.isatty() else 110).print(revisions.render(found))


def main() -> None:
    """Entry point of the `vlmbench` command."""
    app(prog_name="vlmbench")


class _Output:
    """Rows or JSON lines on stdout as records come, a progress bar on stderr if that is a terminal."""

    def __init__(self, cases: list[Case], *, as_json: bool, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from vlmbench.report import WIDTH, RowPrinter

        self.records: list[Record] = []
        self._json = as_json
        out: Console = Console(width=None if sys.stdout.isatty() else WIDTH)
        self._rows = RowPrinter(out, cases)
        err = Console(stderr=True)
        self._progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=err,
            transient=True,
            disable=quiet or not err.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=len(cases))

    def __enter__(self) -> _Output:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._progress.stop()
        if not self._json:
            self._rows.finish()

    def record(self, record: Record) -> None:
        """Print one finished record."""
        from vlmbench.report import json_line

        self.records.append(record)
        # Both streams may be one terminal: the bar is taken away while a row is printed.
        self._progress.stop()
        if self._json:
            print(json_line(record), flush=True)
        else:
            self._rows.row(record)
        self._progress.advance(self._task)
        self._progress.start()

    def progress(self, case: Case, text: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=f"{case.id}: {text}")
