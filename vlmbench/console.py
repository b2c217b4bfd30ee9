"""What the commands share: exit codes, the line on stderr, where workers run, how a run is ended."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmbench.launch import Launcher

BROKEN, USAGE, INTERRUPTED = 1, 2, 130


def make_launcher() -> Launcher:
    """Where workers run; tests put a fake one here."""
    from vlmbench.launch import LocalLauncher

    return LocalLauncher()


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Take SIGTERM like Ctrl-C: end all workers, keep what is finished."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
