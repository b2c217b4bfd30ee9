"""A launcher whose workers are objects: declared seconds, seeded noise, declared failures.

CLI, measure and reports are tested whole with it, without torch and without sleeping.

    FakeLauncher(seconds={"decode": 1e-3}, failures={("static", "check"): CheckFails("off by 0.5")})
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmbench.errors import UsageError, WorkerFailed
from vlmbench.launch import Worker
from vlmbench.schema import PROTOCOL

#: Seconds a call of each block takes; `compile` and `requests` by call.
SECONDS: dict[str, Any] = {
    "vision": 0.004,
    "prefill": 0.02,
    "decode": 0.001,
    "generate": 0.06,
    "compile": [6.0, 0.002, 0.001, 0.001],
    "requests": [0.3, 0.05, 0.06],
}
COUNTS = {
    "graphs.decode": 1,
    "graph_breaks.decode": 0,
    "recompiles.decode": 0,
    "aten_ops_per_token": 120,
    "python_calls_per_token": 900,
    "cache_bytes": 65536,
    "peak_bytes.decode": 1 << 20,
    "retained_bytes": 0,
}


@dataclass(frozen=True)
class CheckFails:
    """Instead of an exception: the check answers, and did not pass."""

    detail: str
    error: float = 0.5
    step: int = 3


#: What may be declared: an exception to raise, a failing check, or a call that takes the answer's place.
Failure = Exception | type[BaseException] | CheckFails | Callable[[], dict[str, Any]]


@dataclass
class FakeLauncher:
    """Starts FakeWorkers.

    `failures` maps (cache kind or "*", verb or phase) to what happens there; `process` limits them to
    one process (counted over the whole launcher, from 0). `log` lists (process, verb or phase).
    """

    seconds: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.02
    seed: int = 0
    failures: Mapping[tuple[str, str], Failure] = field(default_factory=dict)
    process: int | None = None
    slower: Mapping[str, float] = field(default_factory=dict)
    positions: int = 48
    log: list[tuple[int, str]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    closed: bool = False

    def start(self, environment: Mapping[str, str]) -> Worker:
        """A worker that answers at once."""
        if self.closed:
            raise WorkerFailed("no worker started: the run is being ended")
        self.environments.append(dict(environment))
        worker = FakeWorker(self, len(self.workers))
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        """End all."""
        self.closed = True
        for worker in self.workers:
            worker.kill()


class FakeWorker:
    """One fake process; its level differs from the others' by the launcher's noise."""

    def __init__(self, launcher: FakeLauncher, index: int) -> None:
        self.launcher = launcher
        self.index = index
        self.random = random.Random(f"{launcher.seed}/{index}")
        self.level = self.random.gauss(1.0, launcher.noise)
        self.case: dict[str, Any] = {"cache": "*"}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ended = False

    def ask(self, do: str, timeout: float, **args: Any) -> dict[str, Any]:
        """The declared answer."""
        if self.ended:
            raise WorkerFailed("the worker has ended")
        assert timeout > 0
        self.asked.append((do, args))
        what = args.get("phase", do)
        if do == "open":
            self.case = args["cases"][0]
        self.launcher.log.append((self.index, what))
        answer: dict[str, Any] = getattr(self, f"_{do}")(**args)
        return self._fail(what, answer)

    def close(self) -> dict[str, Any]:
        """The last answer."""
        answer = self.ask("close", 1)
        self.ended = True
        return answer

    def kill(self) -> None:
        """End."""
        self.ended = True

    def _fail(self, what: str, answer: dict[str, Any]) -> dict[str, Any]:
        failures = self.launcher.failures
        failure = failures.get((self.case["cache"], what)) or failures.get(("*", what))
        if failure is None or self.launcher.process not in (None, self.index):
            return answer
        if isinstance(failure, CheckFails):
            check = {**answer["checks"][0], "passed": False, "error": failure.error, "step": failure.step}
            return {**answer, "checks": [{**check, "detail": failure.detail}]}
        if isinstance(failure, BaseException | type):
            raise failure
        return failure()

    def _hello(self, **args: Any) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "capabilities": {"phases": ["vision", "prefill", "decode", "generate"]},
            "versions": {"python": "3.11.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "device": {"type": args["device"], "name": "fake"},
        }

    def _open(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        from vlmbench.schema import Case

        answers = {}
        for data in cases:
            case = Case.from_json(data)
            facts = {"prompt_positions": self.launcher.positions, "parameters": 1000}
            answers[case.id] = {"facts": facts}
        return {"cases": answers, "build_seconds": 0.5}

    def _check(self, case: str) -> dict[str, Any]:
        check = {
            "name": "logits",
            "passed": True,
            "reference": "forward over the whole sequence without a cache",
            "tolerance": 1e-4,
            "error": 2e-6,
            "step": None,
            "detail": "",
        }
        facts = {"asked": {"cache": self.case["cache"]}, "observed": {"cache": self.case["cache"]}}
        return {"checks": [check], "proof": {"weights": "abc", "logits": [[0.1, 0.2]]}, "facts": facts}

    def _count(self, case: str) -> dict[str, Any]:
        return {"metrics": dict(COUNTS), "facts": {"kernels": "f00d"}}

    def _block(self, case: str, phase: str, n: int) -> dict[str, Any]:
        seconds = {**SECONDS, **self.launcher.seconds}[phase]
        slower = self.launcher.slower.get(self.case["cache"], 1.0)
        calls = n * self.case["new_tokens"] if phase == "decode" else n
        means = seconds[:n] if isinstance(seconds, list) else [seconds] * calls
        return {
            "samples": [m * slower * self.level * self.random.uniform(0.99, 1.01) for m in means],
            "facts": {},
        }

    def _close(self) -> dict[str, Any]:
        return {"rss_bytes": 100_000_000 + self.index}


def open_error(kind: str, reason: str) -> Callable[[], dict[str, Any]]:
    """An `open` answer whose only case has an error; for `failures`."""

    class _Every(dict):  # type: ignore[type-arg]
        def get(self, key: Any, default: Any = None) -> Any:
            return {"error": {"kind": kind, "reason": reason, "where": ""}}

    return lambda: {"cases": _Every(), "build_seconds": 0.1}


def refuse(reason: str) -> UsageError:
    """A usage error."""
    return UsageError(reason)
