"""The exceptions of the project: what a user did wrong, what a combination cannot do, what failed.

Everything else that is raised is a defect, or becomes the reason of a `broken` record.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VlmbenchError(Exception):
    """Base of all errors raised on purpose; its text is one sentence for people."""


class UsageError(VlmbenchError):
    """The user asked for something that does not exist or cannot be; the CLI exits with 2."""


class Unsupported(VlmbenchError):
    """A combination declared impossible before anything ran; becomes a skip with this reason."""


class WorkerFailed(VlmbenchError):
    """A worker died, hung or ran out of memory; becomes a `broken` record with this reason."""


def unknown(what: str, name: object, valid: Iterable[str]) -> UsageError:
    """The error for a name that is not in a list: names it, the valid ones and the nearest match."""
    names = list(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return UsageError(f"unknown {what} '{name}': valid are {', '.join(names)}{hint}")
