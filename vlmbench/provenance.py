"""Where numbers come from: the machine's stable name, its accelerators, the state of a repository.

The machine's name separates histories, so it is made of few things that do not change: the GPU's name
and count, or the CPU's and its cores. Drivers and clocks belong to the record. Standard library only
(NVML is used where its Python binding is installed).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vlmbench.errors import UsageError

#: Set to name the machine otherwise; it becomes a folder's name.
MACHINE_VARIABLE = "VLMBENCH_MACHINE"
#: Longest wait for another program, in seconds.
PROGRAM_LIMIT = 10.0

#: Words of a CPU's or GPU's name that say nothing about which one it is.
_NOISE = re.compile(r"\((r|tm|c)\)|@.*|\b(cpu|processor|gpu|graphics|\d+-core|with radeon.*)\b", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RepositoryState:
    """The commit that is checked out, "unknown" outside a repository, and whether files differ from it."""

    commit: str
    dirty: bool

    @property
    def label(self) -> str:
        """The commit, "-dirty" appended where files differ: such numbers belong to no commit."""
        return f"{self.commit}-dirty" if self.dirty else self.commit


def machine_name(environment: Mapping[str, str] = os.environ) -> str:
    """A name for this machine that stays: `intel-xeon-2c`, `nvidia-a100-sxm4-80gb-x4`.

    VLMBENCH_MACHINE overrides it. Raises UsageError if that cannot be a folder's name.
    """
    given = environment.get(MACHINE_VARIABLE, "")
    if given:
        if not _NAME.fullmatch(given):
            raise UsageError(
                f"{MACHINE_VARIABLE} is {given!r}: use letters, digits, '.', '_' and '-', "
                "starting with a letter or digit, at most 100 in all"
            )
        return given
    gpus = gpu_names()
    if gpus:
        kinds = sorted(set(gpus))
        return "-".join(f"{slug(kind)}-x{gpus.count(kind)}" for kind in kinds)
    return f"{slug(cpu_name())}-{os.cpu_count() or 1}c"


def slug(text: str) -> str:
    """A hardware name in lower-case words joined by '-', without trade marks and clock rates."""
    words = re.findall(r"[a-z0-9.]+", _NOISE.sub(" ", text).lower())
    return "-".join(words)[:60].strip("-.") or "unknown"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the system gives it; the architecture where it has none (most ARM)."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip() not in ("", "unknown"):
                return value.strip()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    return platform.machine() or "unknown"


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs of this machine, in their order; empty where there is none.

    Asks NVML, then nvidia-smi; loads no CUDA and so disturbs no measurement.
    """
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return ()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
            return tuple(n.decode() if isinstance(n, bytes) else str(n) for n in names)
        except nvml.NVMLError:
            return ()
        finally:
            nvml.nvmlShutdown()
    listed = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


def detect_device() -> str:
    """`cuda` where a GPU is seen, else `cpu`; the worker says what it really can use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return "cpu"
    return "cuda" if gpu_names() else "cpu"


def repository_state(folder: Path | None = None) -> RepositoryState:
    """State of the git repository that holds `folder` (this package's own unless given)."""
    where = folder or Path(__file__).resolve().parent
    if folder is None and not (where.parent / ".git").exists():
        # An installed package may lie inside somebody else's repository (a .venv in a checkout).
        return RepositoryState("unknown", False)
    commit = _output("git", "-C", str(where), "rev-parse", "HEAD").strip()
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return RepositoryState("unknown", False)
    changed = _output("git", "-C", str(where), "status", "--porcelain", "--untracked-files=no", "--", ".")
    return RepositoryState(commit, bool(changed.strip()))


def _output(*command: str) -> str:
    """Standard output of a program; empty when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROGRAM_LIMIT,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
