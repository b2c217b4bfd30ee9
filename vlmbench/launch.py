"""Workers as local processes: start one, ask it over JSON lines, end it whatever it does.

A worker is `python -m vlmbench.worker` in a session of its own, so that it and everything it started
(compile workers) end together. People's Ctrl-C reaches only the parent, which then ends them. Three
things are bounded, since a worker runs other people's code: the time of every answer, the length of
a line, and what is kept of its stderr.

    with LocalLauncher() as launcher:
        worker = launcher.start(worker_environment(threads=1))
        worker.ask("hello", timeout=120, device="cpu", threads=1, core=None, lock=None)
        worker.close()
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from vlmbench.errors import Unsupported, UsageError, VlmbenchError, WorkerFailed

#: Longest answer accepted, in bytes: some 300,000 samples.
MAX_ANSWER = 8_000_000
#: What is kept of a worker's stderr, in bytes.
STDERR_TAIL = 64_000
#: Seconds a worker has to answer `close`, and then to end.
CLOSE_LIMIT = 30.0
END_LIMIT = 5.0

_MODULE = "vlmbench.worker"


class Worker(Protocol):
    """One process that measures."""

    def ask(self, do: str, timeout: float, **args: Any) -> dict[str, Any]:
        """The answer to one request; waits at most `timeout` seconds.

        Raises UsageError or Unsupported as the worker says, WorkerFailed for everything else: an
        error while measuring, memory, a worker that died, hung (it is killed) or answered nonsense.
        """
        ...

    def close(self) -> dict[str, Any]:
        """Its last answer (`rss_bytes`); the process has ended when this returns or raises."""
        ...

    def kill(self) -> None:
        """End it at once, with all it started. Does nothing if it has ended."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    def start(self, environment: Mapping[str, str]) -> Worker:
        """A new worker with these variables on top of the caller's environment. Raises WorkerFailed."""
        ...

    def close(self) -> None:
        """End every worker that still runs; none can be started afterwards."""
        ...


def worker_environment(
    threads: int = 1, inductor: Path | None = None, compile_threads: int | None = None
) -> dict[str, str]:
    """Variables for a worker: thread counts, the folder of its compile caches, and a fixed hash seed.

    HF_HUB_OFFLINE and the like are inherited as the user set them. The seed makes the order of sets,
    and so the generated code, the same in every process.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }
    if inductor is not None:
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
        variables["TRITON_CACHE_DIR"] = str(inductor / "triton")
    if compile_threads is not None:
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(compile_threads)
    return variables


class LocalLauncher:
    """Starts workers on this machine, under `python`, in the working folder `directory`.

    A foreign interpreter sees the vlmbench package and nothing else of ours: a private folder with a
    link to the package goes on its path, not the site-packages folder the package lies in. A foreign
    interpreter does not inherit PYTHONPATH either; the environment given to `start` may set one.
    """

    def __init__(self, python: str = sys.executable, directory: Path | None = None) -> None:
        self.python = python
        self.directory = directory
        self._lock = threading.Lock()
        self._workers: set[LocalWorker] = set()
        self._path: Path | None = None
        self._closed = False
        atexit.register(self.close)

    def start(self, environment: Mapping[str, str]) -> LocalWorker:
        """A new worker process. Raises WorkerFailed when `python` cannot be run or the launcher is closed."""
        with self._lock:
            if self._closed:
                raise WorkerFailed("no worker started: the run is being ended")
            if self._path is None:
                self._path = Path(tempfile.mkdtemp(prefix="vlmbench-path-"))
                package = Path(__file__).resolve().parent
                (self._path / package.name).symlink_to(package, target_is_directory=True)
            worker = LocalWorker(self._command(), self._environment(environment), self.directory)
            self._workers = {w for w in self._workers if w.alive} | {worker}
        return worker

    def close(self) -> None:
        """Kill what still runs and remove the private folder. May be called twice."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._workers.clear()
            if self._path is not None:
                shutil.rmtree(self._path, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> list[str]:
        return [self.python, "-m", _MODULE]

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        variables = {**os.environ, **given}
        own = Path(self.python).absolute() == Path(sys.executable).absolute()
        inherited = variables.get("PYTHONPATH", "") if own else given.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self._path), inherited)))
        # `-m` would put the working folder first: a checkout's own folders would hide installed ones.
        variables["PYTHONSAFEPATH"] = "1"
        variables.pop("PYTHONHOME", None)
        return variables


class LocalWorker:
    """A worker process and its two reader threads. Made by LocalLauncher."""

    def __init__(self, command: list[str], environment: Mapping[str, str], directory: Path | None) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerFailed(f"cannot start a worker with '{command[0]}': {error.strerror}") from None
        self._asked = 0
        self._asking = ""
        self._killed = ""
        self._tail = _Tail()
        self._ended = threading.Event()
        # Holds answer lines, then None once the process has ended and its output is read.
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=target, args=args, daemon=True)
            for target, args in (
                (_read_lines, (self._process.stdout, self._answers)),
                (self._tail.read, (self._process.stderr,)),
            )
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._ended.is_set()

    def ask(self, do: str, timeout: float, **args: Any) -> dict[str, Any]:
        """See Worker.ask."""
        self._asked += 1
        self._asking = f"{do} {args['phase']}" if "phase" in args else do
        line = json.dumps({"id": self._asked, "do": do, **args}, separators=(",", ":"))
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):
            # It died before it could read; the answer queue ends with what it left.
            pass
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.kill(f"hung: no answer to '{self._asking}' within {timeout:g} s{self._said()}")
            raise WorkerFailed(self._killed) from None
        except KeyboardInterrupt:
            self.kill("interrupted")
            raise
        if answer is None:
            self._answers.put(None)
            raise WorkerFailed(self._epitaph())
        return self._understand(answer)

    def close(self) -> dict[str, Any]:
        """See Worker.close."""
        try:
            return self.ask("close", CLOSE_LIMIT)
        finally:
            self._end()

    def kill(self, reason: str = "ended before it was done") -> None:
        """See Worker.kill; `reason` is what later requests are told."""
        self._killed = self._killed or reason
        if self.alive:
            _kill_group(self._process.pid)
        _close(self._process.stdin)

    def _end(self) -> None:
        _close(self._process.stdin)
        self._ended.wait(END_LIMIT)
        self.kill("closed")
        for thread in self._threads:
            thread.join(END_LIMIT)

    def _watch(self) -> None:
        # A process that is killed may leave children holding its pipes open, so the end of the
        # process is what counts, not the end of its output. Its group is killed before the process
        # is reaped: until then no other process can have got its number.
        try:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            _kill_group(self._process.pid)
        except (AttributeError, ChildProcessError):
            pass
        self._ended.set()
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        self._answers.put(None)

    def _understand(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
            assert isinstance(answer, dict) and answer["id"] == self._asked
            if answer["ok"] is True:
                return answer
            error = answer["error"]
            kind, reason, where = str(error["kind"]), str(error["reason"]), str(error.get("where") or "")
        except (ValueError, AssertionError, LookupError, TypeError, AttributeError, RecursionError):
            shown = line[:80].decode(errors="replace").strip()
            size = f" ({len(line)} bytes)" if len(line) > 80 else ""
            self.kill(f"the answer to '{self._asking}' is not one of the worker protocol: {shown!r}{size}")
            raise WorkerFailed(self._killed) from None
        raise worker_error(kind, reason, where)

    def _epitaph(self) -> str:
        """Why there is no answer: what ended the process, and the last thing it said."""
        if self._killed:
            return f"the worker has ended: {self._killed}"
        code = self._process.wait()
        asked = f" at '{self._asking}'"
        if code >= 0:
            return f"worker ended with exit code {code}{asked}{self._said()}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ""
        if name == "SIGKILL":
            hint = " (most often by the system, out of memory: try a smaller model, batch or cache length)"
        return f"worker killed by {name}{asked}{hint}{self._said()}"

    def _said(self) -> str:
        last = self._tail.last_line()
        return f"; its last words: {last}" if last else ""


def worker_error(kind: str, reason: str, where: str = "") -> VlmbenchError:
    """The exception for an error a worker answered; the same for every launcher."""
    if kind == "usage":
        return UsageError(reason)
    if kind == "unsupported":
        return Unsupported(reason)
    place = f" (in {where})" if where else ""
    if kind == "memory":
        return WorkerFailed(f"out of memory: {reason}{place}")
    return WorkerFailed(f"{reason}{place}")


class _Tail:
    """The last bytes of a stream that may carry megabytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            self._data += chunk
            del self._data[:-STDERR_TAIL]
        stream.close()

    def last_line(self) -> str:
        """The last line with text, at most 300 characters; empty if nothing was said."""
        lines = [line.strip() for line in self._data.decode(errors="replace").splitlines()]
        return next((line[:300] for line in reversed(lines) if line), "")


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    while line := stream.readline(MAX_ANSWER):
        if line.endswith(b"\n"):
            lines.put(line)
        elif len(line) >= MAX_ANSWER:
            # No answer, whatever follows; stop reading, so that memory is bounded.
            lines.put(line)
            return
    stream.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _close(stream: IO[bytes] | None) -> None:
    try:
        if stream is not None:
            stream.close()
    except OSError:
        pass
