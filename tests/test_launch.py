"""Worker processes: answers, every way of ending badly, and nothing left behind.

A stand-in for the worker speaks the protocol; `python` is a script that runs it, so that launch does
exactly what it does with a foreign interpreter.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vlmbench.errors import Unsupported, UsageError, WorkerFailed
from vlmbench.launch import MAX_ANSWER, STDERR_TAIL, LocalLauncher, worker_environment, worker_error

STAND_IN = r"""
import json, os, signal, subprocess, sys, time

def say(**answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()

for line in sys.stdin:
    request = json.loads(line)
    do, i = request["do"], request["id"]
    if do == "hello":
        say(id=i, ok=True, pid=os.getpid(), path=sys.argv, env=dict(os.environ), cwd=os.getcwd(), got=request)
    elif do == "error":
        error = {"kind": request["kind"], "reason": "the reason", "where": request["where"]}
        say(id=i, ok=False, error=error)
    elif do == "chatty":
        sys.stderr.write("x" * 5_000_000 + "\nthe last words\n")
        sys.stderr.flush()
        say(id=i, ok=True)
    elif do == "exit":
        sys.stderr.write("Traceback\nModuleNotFoundError: No module named 'torch'\n")
        sys.exit(3)
    elif do == "shot":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif do == "child":
        say(id=i, ok=True, child=subprocess.Popen(["sleep", "600"]).pid)
    elif do in ("hang", "block"):
        time.sleep(600)
    elif do == "garbage":
        print("Loading weights: 100%")
        sys.stdout.flush()
    elif do == "half":
        sys.stdout.write('{"id": 1, "ok"')
        sys.stdout.flush()
        sys.exit(0)
    elif do == "endless":
        try:
            while True:
                sys.stdout.write("y" * 1_000_000)
        except BrokenPipeError:
            pass
    elif do == "stale":
        say(id=i - 1, ok=True)
    elif do == "close":
        say(id=i, ok=True, rss_bytes=1234)
        break
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An "interpreter" that runs the stand-in whatever module it is asked for."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def launcher(python: str) -> Iterator[LocalLauncher]:
    """A launcher of stand-ins."""
    with LocalLauncher(python) as launcher:
        yield launcher


def running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether the condition comes true within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_worker_is_asked_and_closed(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    hello = worker.ask("hello", 20, device="cpu", core=None)
    assert hello["got"] == {"id": 1, "do": "hello", "device": "cpu", "core": None}
    assert hello["path"][1:] == ["-m", "vlmbench.worker"]
    assert worker.close()["rss_bytes"] == 1234
    assert not running(hello["pid"])
    with pytest.raises(WorkerFailed, match="has ended"):
        worker.ask("hello", 5)


def test_a_foreign_interpreter_sees_the_package_and_not_its_neighbours(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/of/ours")
    worker = launcher.start({"EXTRA": "1"})
    env = worker.ask("hello", 20)["env"]
    folder = Path(env["PYTHONPATH"])
    assert [p.name for p in folder.iterdir()] == ["vlmbench"]
    assert (folder / "vlmbench" / "launch.py").is_file()
    assert env["EXTRA"] == "1"
    launcher.close()
    assert not folder.exists()


def test_this_interpreter_keeps_its_own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("vlmbench.launch._MODULE", "stand_in")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    with LocalLauncher() as launcher:
        env = launcher.start({}).ask("hello", 20)["env"]
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == [str(tmp_path)]


def test_the_working_folder_is_not_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A checkout's own folders must not hide installed packages.
    (tmp_path / "vlmbench").mkdir()
    (tmp_path / "vlmbench" / "worker.py").write_text("raise SystemExit(77)")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("vlmbench.launch._MODULE", "vlmbench.errors")
    with LocalLauncher(directory=tmp_path) as launcher, pytest.raises(WorkerFailed, match="exit code 0"):
        launcher.start({}).ask("hello", 20)


def test_errors_keep_their_kind(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    with pytest.raises(UsageError, match=r"^the reason$"):
        worker.ask("error", 20, kind="usage", where="inputs.py:10")
    with pytest.raises(Unsupported, match=r"^the reason$"):
        worker.ask("error", 20, kind="unsupported", where="")
    with pytest.raises(WorkerFailed, match=r"^out of memory: the reason \(in prefill\)$"):
        worker.ask("error", 20, kind="memory", where="prefill")
    with pytest.raises(WorkerFailed, match=r"^the reason$"):
        worker.ask("error", 20, kind="failed", where="")
    worker.ask("hello", 20)
    assert isinstance(worker_error("something else", "r"), WorkerFailed)


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("exit", r"exit code 3 at 'exit'; its last words: ModuleNotFoundError: No module named 'torch'"),
        ("shot", r"killed by SIGKILL at 'shot'.*out of memory: try a smaller model"),
        ("crash", r"killed by SIGSEGV at 'crash'"),
        ("half", r"exit code 0 at 'half'"),
        ("garbage", r"not one of the worker protocol: 'Loading weights: 100%'"),
        ("stale", r"not one of the worker protocol"),
    ],
)
def test_a_worker_that_fails_says_how(launcher: LocalLauncher, do: str, text: str) -> None:
    worker = launcher.start({})
    pid = worker.ask("hello", 20)["pid"]
    with pytest.raises(WorkerFailed, match=text):
        worker.ask(do, 20)
    assert soon(lambda: not running(pid))
    with pytest.raises(WorkerFailed):
        worker.ask("hello", 20)


def test_a_worker_that_prints_without_end_is_stopped(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    with pytest.raises(WorkerFailed, match=rf"not one of the worker protocol: 'y+' \({MAX_ANSWER} bytes\)"):
        worker.ask("endless", 30)


def test_a_hanging_worker_is_killed_with_its_children(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    pid = worker.ask("hello", 20)["pid"]
    child = worker.ask("child", 20)["child"]
    with pytest.raises(WorkerFailed, match=r"^hung: no answer to 'block decode' within 0\.2 s$"):
        worker.ask("block", 0.2, phase="decode")
    assert soon(lambda: not running(pid) and not running(child))


def test_children_of_a_worker_that_died_are_killed(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    child = worker.ask("child", 20)["child"]
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        worker.ask("shot", 20)
    # The child holds the pipes open; waiting for their end would take its ten minutes.
    assert time.monotonic() - started < 10
    assert soon(lambda: not running(child))


def test_megabytes_on_stderr_block_nothing_and_are_not_kept(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    worker.ask("chatty", 20)
    assert soon(lambda: worker._tail.last_line() == "the last words")
    assert len(worker._tail._data) <= STDERR_TAIL


def test_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    text = r"cannot start a worker with '.*nowhere': No such file"
    with LocalLauncher(str(tmp_path / "nowhere")) as launcher, pytest.raises(WorkerFailed, match=text):
        launcher.start({})


def test_closing_the_launcher_ends_a_request_in_another_thread(launcher: LocalLauncher) -> None:
    worker = launcher.start({})
    pid = worker.ask("hello", 20)["pid"]
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            worker.ask("hang", 60)
        except WorkerFailed as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    launcher.close()
    thread.join(10)
    assert caught and not thread.is_alive()
    assert soon(lambda: not running(pid))
    with pytest.raises(WorkerFailed, match="being ended"):
        launcher.start({})


@pytest.mark.parametrize("how", [signal.SIGINT, None])
def test_nothing_is_left_behind_when_the_parent_ends(python: str, tmp_path: Path, how: int | None) -> None:
    program = textwrap.dedent(f"""
        from vlmbench.launch import LocalLauncher
        launcher = LocalLauncher({python!r})
        worker = launcher.start({{}})
        hello = worker.ask("hello", 20)
        print(hello["pid"], worker.ask("child", 20)["child"], hello["env"]["PYTHONPATH"], flush=True)
        {"worker.ask('hang', 60)" if how else "raise SystemExit(0)"}
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert parent.stdout is not None
    pid, child, folder = parent.stdout.readline().split()
    if how:
        parent.send_signal(how)
    parent.wait(20)
    assert soon(lambda: not running(int(pid)) and not running(int(child)))
    assert not Path(folder).exists()
    parent.stdout.close()


def test_environment_of_a_worker(tmp_path: Path) -> None:
    variables = worker_environment(2, tmp_path, 1)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "2"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert variables["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert variables["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert variables["PYTHONHASHSEED"] == "0"
    assert "HF_HUB_OFFLINE" not in variables
