"""What the files in `benchmarks/` share: one record a case and asv run, and a metric's value from it.

asv starts one process for each benchmark and parameter combination. The first that needs a case
measures it, whole, into the ledger of a scratch folder which `setup_cache` makes; the others read their
metric there. So `asv run -b 'decode.*static'` measures what it selects and nothing else, and nothing
here imports more than it must: hundreds of these processes only read.

    asv run --launch-method spawn -b "decode.*llava-tiny.*static"

Environment: VLMBENCH_PREFETCH=1 measures the whole default suite before the first benchmark, on
VLMBENCH_JOBS cases at a time; VLMBENCH_RIGOROUS=1 takes RIGOROUS processes a case; VLMBENCH_MACHINE
names the machine as `asv run --machine` does; VLMBENCH_SUITE=nightly takes more models and cache kinds;
VLMBENCH_DEVICE is the device, detected if not given.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vlmbench import kinds
from vlmbench.errors import Unsupported, UsageError, VlmbenchError, unknown
from vlmbench.metrics import BY_KEY
from vlmbench.schema import PROTOCOL, Case, Envelope, Record, decode_line, encode_line, write_atomic

#: Fresh processes a case when rigorous: asv's test can flag nothing below eight values a side.
RIGOROUS = 8
#: Seconds asv waits for one benchmark, which may have to measure its case first.
TIMEOUT = 3600
#: Seconds asv waits for a prefetch of the whole suite.
PREFETCH_TIMEOUT = 6 * 3600

#: The suite measured: "default", "nightly" or "name", each with all of those before it.
SUITE_VARIABLE = "VLMBENCH_SUITE"
#: The process id of scripts/bench, where that started asv.
BENCH_VARIABLE = "VLMBENCH_BENCH"
LEDGER = "ledger.jsonl"
#: The repository whose commits are compared.
SUBJECT = "vlmbench"
#: Kind and case of the line which says that all cases of a commit's default suite have been measured.
SUITE_LINE = "suite"


def benchmark(key: str, compiling_only: bool = False) -> Callable[..., Any]:
    """The asv benchmark that tracks one metric key over model × cache × runner.

    `compiling_only` leaves out the runners that compile nothing. Raises KeyError for a key that
    `metrics` does not have.
    """
    metric = BY_KEY[key]

    def track(scratch: str, model: str, cache: str, runner: str) -> Any:
        from asv_runner.benchmarks.mark import SkipNotImplemented

        try:
            return value(record_for(Path(scratch), model, cache, runner), key)
        except Unsupported as reason:
            raise SkipNotImplemented(str(reason)) from None

    track.__name__ = track.__qualname__ = "track_" + key.replace(".", "_")
    track.__doc__ = metric.meaning
    models, caches, runners = parameters()
    if compiling_only:
        runners = [name for name in runners if kinds.RUNNERS[name].compiles]
    for name, attribute in {
        "params": [models, caches, runners],
        "param_names": ["model", "cache", "runner"],
        "unit": metric.unit,
        # asv's own version is a hash of this function's source, which says nothing about the protocol.
        "version": PROTOCOL,
        "timeout": TIMEOUT,
    }.items():
        setattr(track, name, attribute)
    return track


def setup_cache() -> str:
    """The scratch folder of this asv run; with VLMBENCH_PREFETCH, the whole suite is measured into it.

    asv calls it once for all benchmarks that have this very function, in a folder of its own that it
    removes after the last of them.
    """
    scratch = Path.cwd()
    device = _facts(scratch)["device"]
    if os.environ.get("VLMBENCH_PREFETCH") == "1":
        cases = kinds.default_cases(device, _suite())
        _measure(cases, scratch, jobs=int(os.environ.get("VLMBENCH_JOBS", "1")))
        run, commit = _facts(scratch)["run"], os.environ.get("ASV_COMMIT", "")
        whole = Envelope(SUITE_LINE, run, SUBJECT, commit, machine(), SUITE_LINE)
        publish(encode_line(whole, {"cases": [case.id for case in cases]}))
    return str(scratch)


setup_cache.timeout = PREFETCH_TIMEOUT  # type: ignore[attr-defined]


@cache
def parameters() -> tuple[list[str], list[str], list[str]]:
    """Models of the default and nightly suites, cache kinds and runners, as they are listed."""
    models = [model.name for model in kinds.models().values() if model.suite != "name"]
    return models, list(kinds.caches()), list(kinds.RUNNERS)


def record_for(scratch: Path, model: str, cache: str, runner: str) -> Record:
    """The record of one case: from the scratch ledger, or measured now.

    Raises Unsupported, with the reason, for a combination outside the default suite or unknown to the
    installed commit (asv takes the parameters from the newest one).
    """
    case = _case(model, cache, runner, _facts(scratch)["device"])
    ledger = scratch / LEDGER
    found = _find(ledger, case)
    if found is None:
        digest = hashlib.sha256(case.id.encode()).hexdigest()[:16]
        with _locked(scratch / f"{digest}.lock"):
            found = _find(ledger, case)
            if found is None:
                _measure([case], scratch, jobs=1)
                found = _find(ledger, case)
    if found is None:
        raise VlmbenchError(f"measuring {case.id} left no record in {ledger}")
    return found


def value(record: Record, key: str) -> Any:
    """What asv stores for a metric: one value a fresh process for seconds, else the number.

    Raises Unsupported where the case has no such metric, VlmbenchError with the reason where it is
    broken.
    """
    if record.status == "unsupported":
        raise Unsupported(record.reason)
    if record.status == "broken":
        raise VlmbenchError(f"{record.case.id} is broken: {record.reason}")
    entry = record.metrics.get(key)
    if entry is None or entry.get("value") is None:
        raise Unsupported(f"{record.case.id} has no {key}")
    if entry["unit"] == "seconds":
        return {"samples": list(entry.get("samples") or [entry["value"]]), "number": 1}
    return entry["value"]


def publish(line: str) -> Path | None:
    """Put one line beside asv's results of this commit, in the place of the same case's older one.

    Returns the file, or None outside an asv run that stores results under a commit.
    """
    folder, commit, env = (os.environ.get(f"ASV_{name}") for name in ("CONF_DIR", "COMMIT", "ENV_NAME"))
    if not (folder and commit and env):
        return None
    path = records_file(Path(folder), machine(), commit, env)
    path.parent.mkdir(parents=True, exist_ok=True)
    envelope, _ = decode_line(line)
    # The folder itself is the lock: a file of its own would stay in the results tree.
    with _locked(path.parent):
        kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [old for old in kept if _case_of(old) not in ("", envelope.case)]
        write_atomic(path, "".join(f"{text}\n" for text in sorted([*kept, line], key=_case_of)))
    return path


def records_file(root: Path, machine_name: str, commit: str, env: str) -> Path:
    """Where the records of a commit lie: beside asv's own file, ending in .jsonl, which asv passes over."""
    try:
        results = json.loads((root / "asv.conf.json").read_text(encoding="utf-8"))["results_dir"]
    except (OSError, ValueError, KeyError):
        results = "results"
    return root / results / machine_name / f"{commit[:8]}-{env}.jsonl"


def machine() -> str:
    """The machine's name as asv uses it in this run."""
    from vlmbench import provenance

    if os.environ.get(provenance.MACHINE_VARIABLE):
        return provenance.machine_name()
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(Path("~/.asv-machine.json").expanduser().read_text(encoding="utf-8"))
    names = [name for name in known if name != "version"]
    if platform.node() in names:
        return platform.node()
    if len(names) == 1:
        return names[0]
    return provenance.machine_name()


def _case(model: str, cache: str, runner: str, device: str) -> Case:
    try:
        case = kinds.make_case(model, cache, runner, device=device)
    except UsageError as error:
        raise Unsupported(f"the measured commit does not have it: {error}") from None
    if reason := kinds.outside(_suite(), model, cache, runner):
        raise Unsupported(reason)
    return case


def _suite() -> kinds.Suite:
    """The suite of this asv run, from SUITE_VARIABLE. Raises UsageError for one that is not there."""
    name = os.environ.get(SUITE_VARIABLE, "default")
    if name not in kinds.SUITES:
        raise unknown("suite", name, dict.fromkeys(kinds.SUITES))
    return name


def _measure(cases: list[Case], scratch: Path, jobs: int) -> None:
    """Measure into the scratch ledger, publishing each record as it is finished."""
    from vlmbench.launch import LocalLauncher
    from vlmbench.measure import Effort, measure_all

    ledger, folder = scratch / LEDGER, scratch / "work"
    effort = Effort.rigorous() if os.environ.get("VLMBENCH_RIGOROUS") == "1" else Effort()

    def finished(record: Record) -> None:
        if line := _line(ledger, record.case):
            publish(line.decode())

    with _ended_with_asv(), LocalLauncher(directory=scratch) as launcher:
        try:
            measure_all(
                cases,
                launcher,
                folder=folder,
                ledger=ledger,
                run=_facts(scratch)["run"],
                subject=SUBJECT,
                commit=os.environ.get("ASV_COMMIT", ""),
                machine=machine(),
                jobs=jobs,
                effort=effort,
                on_record=finished,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _facts(scratch: Path) -> dict[str, str]:
    """What holds for a whole asv run, found out once: the records' `run` and the `device`."""
    path = scratch / "run.json"
    if not path.exists():
        from vlmbench import provenance

        facts = {
            "run": f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{scratch.name}",
            "device": os.environ.get("VLMBENCH_DEVICE") or provenance.detect_device(),
        }
        write_atomic(path, json.dumps(facts))
    return json.loads(path.read_text(encoding="utf-8"))


def _find(ledger: Path, case: Case) -> Record | None:
    line = _line(ledger, case)
    return None if line is None else Record.from_json(decode_line(line)[1])


def _line(ledger: Path, case: Case) -> bytes | None:
    """The newest line of a case; others are passed over undecoded, since hundreds of processes look."""
    try:
        lines = ledger.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    mark = json.dumps(case.id).encode()
    for line in reversed(lines):
        if mark in line and _case_of(line) == case.id:
            return line
    return None


def _case_of(line: str | bytes) -> str:
    try:
        return decode_line(line)[0].case
    except UsageError:
        return ""


@contextlib.contextmanager
def _ended_with_asv() -> Iterator[None]:
    """Make the end of asv the end of what runs here, workers included.

    asv sends SIGTERM on Ctrl-C and on a timeout, which is taken like Ctrl-C. When asv was killed, or
    scripts/bench that started it, nobody sends anything: a thread looks after them.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    done = threading.Event()
    parent, bench = os.getppid(), int(os.environ.get(BENCH_VARIABLE, "0"))

    def look() -> None:
        asked = False
        while not done.wait(1.0):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if bench and not asked and not _alive(bench):
                # asv passes it on, and stores nothing.
                os.kill(parent, signal.SIGINT)
                asked = True

    old = signal.signal(signal.SIGTERM, interrupt)
    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.signal(signal.SIGTERM, old)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file (made if missing) or an existing folder."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
