"""The measuring process: JSON lines in on stdin, JSON lines out on stdout (docs/architecture.md).

It is the only wiring with torch, is started as `python -m vlmbench.worker` and imported by nobody.
It needs the standard library, numpy, pillow, torch and transformers only, since it runs inside other
people's environments.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from vlmbench import __version__, kinds
from vlmbench.errors import Unsupported, UsageError
from vlmbench.schema import PROTOCOL, Case, clean


def _own_stdout() -> IO[str]:
    """The pipe to the parent, kept for answers alone: what libraries print goes to stderr instead."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def _end_with_parent() -> None:
    """End this process and what it started when the parent is gone, also in the middle of a block.

    Blocked until stdin hangs up, so that a timed block is never interrupted. A hang-up alone is no
    reason: whoever pipes all requests in at once has closed it too.
    """
    parent = os.getppid()

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(0, 0)
        hung_up.poll()
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Worker:
    """State of one process: the device and the sessions of the cases that are open."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.core: int | None = None
        self.lock: str | None = None
        self.verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self.hello,
            "open": self.open,
            "check": self.check,
            "count": self.count,
            "block": self.block,
            "close": self.close,
        }

    def hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """Choose device and threads; say what this process can do and where it runs."""
        import torch

        from vlmbench import compat, meters, phases

        compat.quiet()
        torch.set_num_threads(int(request.get("threads", 1)))
        self.core, self.lock = request.get("core"), request.get("lock")
        self.device = meters.device(str(request.get("device", "auto")))
        if self.device.type == "cuda":
            # torch's own default, said here since TF32 rounds float32 by more than the proofs tolerate.
            torch.backends.cuda.matmul.allow_tf32 = False
        from vlmbench.compiles import Compiles

        self.compiles = Compiles()
        return {
            "protocol": PROTOCOL,
            "capabilities": {
                "phases": [*phases.STEPS, "decode", "compile", "requests"],
                "families": list(kinds.families()),
                "caches": list(kinds.caches()),
                "runners": list(kinds.RUNNERS),
            },
            "versions": {"python": platform.python_version(), "vlmbench": __version__, **compat.versions()},
            "device": self.device.info(),
        }

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the model once and make a session of every case; a case that cannot be has an error of its own."""
        from vlmbench import meters

        cases = [Case.from_json(data) for data in request["cases"]]
        first = cases[0]
        shared = {(c.model, c.checkpoint, c.dtype, c.attention, c.device) for c in cases}
        if len(shared) > 1:
            raise UsageError("cases of one worker must share model, dtype, attention and device")
        start = time.perf_counter()
        family, loaded = self._load(first)
        seconds = time.perf_counter() - start
        answers = {}
        for case in cases:
            try:
                answers[case.id] = {"facts": self._open_case(case, family, loaded)}
            except Exception as error:
                answers[case.id] = {"error": describe(error)}
        meters.settle()
        return {"cases": answers, "build_seconds": seconds}

    def _load(self, case: Case) -> tuple[Any, Any]:
        import torch

        dtype = getattr(torch, case.dtype, None)
        from vlmbench.check import TOLERANCE

        if case.dtype not in TOLERANCE or not isinstance(dtype, torch.dtype):
            raise UsageError(f"unknown dtype '{case.dtype}': valid are {', '.join(TOLERANCE)}")
        if case.checkpoint:
            from vlmbench.families import _checkpoint

            name = _checkpoint.config(case.checkpoint).model_type
            if name not in kinds.families():
                raise UsageError(
                    f"checkpoint '{case.checkpoint}' is of family '{name}': valid are {', '.join(kinds.families())}"
                )
        else:
            name = kinds.models()[case.model].family
        family = kinds.load("family", name).FAMILY
        loaded = family.load(case, dtype)
        loaded.model.to(self.device.type)
        return family, loaded

    def _open_case(self, case: Case, family: Any, loaded: Any) -> dict[str, Any]:
        from vlmbench import weights
        from vlmbench.phases import Session

        kind = kinds.load("cache", case.cache).KIND
        reason = kind.unsupported(case, loaded.model.config)
        if reason:
            raise Unsupported(reason)
        session = Session(case, family, loaded, kind, self.device, self.compiles)
        self.sessions[case.id] = session
        return {
            **session.facts,
            "prompt_positions": session.length,
            "image_tokens": session.length - case.prompt_tokens,
            "parameters": weights.count(loaded.model),
            "weights_bytes": sum(p.numel() * p.element_size() for p in loaded.model.parameters()),
        }

    def _session(self, request: dict[str, Any]) -> Any:
        name = request.get("case")
        if name not in self.sessions:
            raise UsageError(f"case '{name}' is not open: open are {', '.join(self.sessions) or 'none'}")
        return self.sessions[name]

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """The proofs of a case."""
        from vlmbench import check

        checks, proof, facts = check.run(self._session(request))
        return {"checks": checks, "proof": proof, "facts": facts}

    def count(self, request: dict[str, Any]) -> dict[str, Any]:
        """The exact counters of a case."""
        from vlmbench import counters

        metrics, facts = counters.count(self._session(request))
        return {"metrics": metrics, "facts": facts}

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        """One timed block of a phase, with the machine held still as far as that is ours to do."""
        from vlmbench import meters, phases

        session, phase, n = self._session(request), str(request["phase"]), int(request["n"])
        loops: dict[str, Callable[[Any, int], list[float]]] = {
            "decode": phases.time_decode,
            "compile": phases.time_compile,
            "requests": phases.time_requests,
        }
        if phase not in loops and phase not in phases.STEPS:
            raise UsageError(f"unknown phase '{phase}': valid are {', '.join([*phases.STEPS, *loops])}")
        if phase == "vision" and not session.case.images:
            raise Unsupported("a case without images has no vision phase")
        if phase == "compile" and not session.compiling:
            raise Unsupported("an eager runner compiles nothing")
        # Compiling starts processes of its own, which a pinned parent would crowd onto one core; and it
        # takes long, while another worker waits for the lock.
        compiling = phase in ("compile", "requests") and session.compiling
        if compiling:
            samples = loops[phase](session, n)
            meters.settle()
        else:
            if phase in ("prefill", "decode"):
                session.ready()
            with meters.timed_block(self.core if session.case.threads == 1 else None, self.lock):
                samples = loops[phase](session, n) if phase in loops else phases.time_steps(session, phase, n)
        session.take({"requests": "generate", "compile": "decode"}.get(phase, phase))
        return {"samples": samples, "facts": {}}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Largest resident set of the process, in bytes (Linux counts in kB); the last answer."""
        return {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def describe(error: BaseException) -> dict[str, str]:
    """An exception as the protocol's error: its kind, one sentence, and where it was raised."""
    name = type(error).__name__
    if isinstance(error, UsageError):
        kind = "usage"
    elif isinstance(error, Unsupported):
        kind = "unsupported"
    elif isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in str(error):
        kind = "memory"
    else:
        kind = "failed"
    text = (str(error).strip() or name).splitlines()[0][:400]
    where = " < ".join(
        f"{os.path.basename(f.filename)}:{f.lineno} {f.name}"
        for f in reversed(traceback.extract_tb(error.__traceback__))
    )
    reason = text if kind in ("usage", "unsupported") else f"{name}: {text}"
    return {"kind": kind, "reason": reason, "where": where[:600]}


def main() -> int:
    """Answer requests until `close` or the end of stdin."""
    pipe = _own_stdout()
    _end_with_parent()
    worker = Worker()
    for line in sys.stdin:
        answer: dict[str, Any] = {"id": None}
        verb = ""
        try:
            request = json.loads(line)
            answer["id"], verb = request.get("id"), request.get("do")
            if verb not in worker.verbs:
                raise UsageError(f"unknown verb '{verb}': valid are {', '.join(worker.verbs)}")
            answer |= {"ok": True, **worker.verbs[verb](request)}
        except Exception as error:
            traceback.print_exc()
            answer |= {"ok": False, "error": describe(error)}
        pipe.write(json.dumps(clean(answer), allow_nan=False) + "\n")
        pipe.flush()
        if verb == "close":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
