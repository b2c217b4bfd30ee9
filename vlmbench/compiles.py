"""What Dynamo and inductor did: frames, graphs, breaks, recompiles, guards, and the generated code.

Reads torch's own compilation metrics, one entry a compiled frame, and catches inductor's output as
it is written (which happens only where its cache did not have it).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import torch
from torch._dynamo import utils as dynamo


@dataclass
class Compiled:
    """Compilation seen so far under one name (a phase)."""

    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    captured_ops: int = 0
    guards: int = 0
    reasons: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """The exact counters by metric name."""
        return {
            "graphs": self.graphs,
            "graph_breaks": self.graph_breaks,
            "recompiles": self.recompiles,
            "captured_ops": self.captured_ops,
            "guards": self.guards,
        }

    def kernels(self) -> str:
        """Hash of the generated code, 16 hex digits; empty if none was generated in this process."""
        return hashlib.sha256("\n".join(self.code).encode()).hexdigest()[:16] if self.code else ""


#: What differs between two runs that generate the same code: places, process ids and numbering.
_PLACES = re.compile(r"(/[\w.\-/]+|AOT ID: \S+|c[a-z2-7]{51})")


class Compiles:
    """The log of this process's compilations. Make one, then `take(into)` after each piece of work."""

    def __init__(self) -> None:
        # Dynamo keeps the last 64 frames; a case that recompiles for every token needs more.
        dynamo.set_compilation_metrics_limit(4096)
        self._code: list[str] = []
        self._breaks = 0

    def load_compiler(self) -> None:
        """Import inductor (about a second) outside any clock, and start to catch the code it writes."""
        import torch._inductor.compile_fx  # noqa: F401
        from torch._inductor.graph import GraphLowering

        GraphLowering.save_output_code = staticmethod(self._code.append)

    def exercise(self) -> None:
        """Compile something trivial outside any clock, so that what inductor sets up once is set up."""

        def trivial(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        torch.compile(trivial)(torch.zeros(8))
        self.take(Compiled())

    def take(self, into: Compiled) -> None:
        """Add what was compiled since the last `take` to `into`."""
        for entry in dynamo.get_compilation_metrics():
            if entry.graph_op_count is None:
                continue
            into.graphs += 1
            into.captured_ops += entry.graph_op_count
            into.guards += entry.guard_count or 0
            if entry.recompile_reason:
                into.recompiles += 1
                into.reasons.append(str(entry.recompile_reason).splitlines()[0][:200])
        dynamo.clear_compilation_metrics()
        breaks = dynamo.counters["graph_break"]
        total = sum(breaks.values())
        if total > self._breaks:
            into.graph_breaks += total - self._breaks
            into.reasons += [str(reason).splitlines()[0][:200] for reason in breaks]
        self._breaks = total
        into.code += [_PLACES.sub("", code) for code in self._code]
        self._code.clear()
