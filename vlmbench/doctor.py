"""What is here, and what will spoil a measurement: each with its cause and what to do about it.

Reads /proc and /sys and asks package metadata; imports neither torch nor transformers, starts nothing.

    vlmbench doctor
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from vlmbench import __version__
from vlmbench.errors import UsageError
from vlmbench.provenance import cpu_name, gpu_names, machine_name

#: Packages whose versions are shown; a worker needs those marked.
PACKAGES = {
    "numpy": True,
    "pillow": True,
    "torch": True,
    "transformers": True,
    "asv": False,
    "nvidia-ml-py": False,
    "torchvision": False,
    "triton": False,
}

#: Above this one-minute load average something else is running.
MAX_LOAD = 0.5
#: Below this much available memory (bytes) models of official size may not fit.
MIN_MEMORY = 4 << 30
#: Share of CPU time taken by other virtual machines since boot above which times drift.
MAX_STEAL = 0.01
#: Another program's share of a GPU (percent, bytes) that disturbs.
MAX_GPU_USE = 5
MAX_GPU_MEMORY = 2 << 30

#: Variables that change what is measured, and how.
VARIABLES = {
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "a warm compile is a cold one",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "compile times and kernels are not the default ones",
    "TORCH_LOGS": "logging costs time in the compiler",
    "CUDA_LAUNCH_BLOCKING": "every kernel launch waits",
    "LD_PRELOAD": "another allocator or profiler may be loaded",
    "PYTHONMALLOC": "Python's allocator is not the default one",
    "PYTHONDEVMODE": "Python's checks cost time",
}


@dataclass(frozen=True)
class Warned:
    """Something that spoils a measurement: what was found, why it matters, what to do."""

    what: str
    cause: str
    action: str

    def __str__(self) -> str:
        return f"{self.what}: {self.cause}; {self.action}"


@dataclass(frozen=True)
class Findings:
    """All of it. Sizes in bytes; None where the system does not say."""

    machine: str
    versions: dict[str, str | None]
    cpu: dict[str, Any]
    memory: dict[str, Any]
    devices: list[dict[str, Any]]
    warnings: list[Warned] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def examine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Findings:
    """Look at this machine; `root` stands for / so that tests can show another one. Raises nothing."""
    warnings: list[Warned] = []
    try:
        machine = machine_name(environment)
    except UsageError as error:
        machine = "unknown"
        warnings.append(Warned("the machine has no valid name", str(error), "set VLMBENCH_MACHINE to another"))
    found = Findings(machine, _versions(), _cpu(root), _memory(root), _gpus(), warnings)
    warnings += [
        *_package_warnings(found.versions),
        *_cpu_warnings(found.cpu),
        *_memory_warnings(found.memory),
        *_gpu_warnings(found.devices),
        *(
            Warned(
                f"{name} is set to '{environment[name]}'",
                why,
                f"unset {name} unless that is what you measure",
            )
            for name, why in VARIABLES.items()
            if environment.get(name)
        ),
    ]
    return found


def lines(found: Findings) -> list[str]:
    """The findings as text for people, warnings last."""
    cpu, memory = found.cpu, found.memory
    rows = [("machine", found.machine)]
    rows += [(name, version or "not installed") for name, version in found.versions.items()]
    rows += [
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores, {len(cpu['affinity'])} of them for this process"),
        ("governor", cpu["governor"] or "unknown (the system does not say)"),
        ("cpu quota", "none" if cpu["quota"] is None else f"{cpu['quota']:.3g} cores"),
        ("load", "unknown" if cpu["load"] is None else f"{cpu['load']:.2f} in the last minute"),
        ("memory", f"{_gigabytes(memory['available'])} available of {_gigabytes(memory['total'])}"),
        ("huge pages", memory["transparent_huge_pages"] or "unknown"),
    ]
    rows += [("gpu", _gpu_text(gpu)) for gpu in found.devices] or [("gpu", "none found; --device cpu is used")]
    width = max(len(name) for name, _ in rows)
    text = [f"{name:<{width}}  {shown}" for name, shown in rows]
    if not found.warnings:
        return [*text, "", "nothing found that would spoil a measurement"]
    return [*text, "", *(f"warning: {warned}" for warned in found.warnings)]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"vlmbench": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _package_warnings(versions: Mapping[str, str | None]) -> list[Warned]:
    missing = [name for name, needed in PACKAGES.items() if needed and versions[name] is None]
    if not missing:
        return []
    action = "install them with: pip install 'vlmbench[measure]'"
    return [Warned(f"not installed: {', '.join(missing)}", "workers need them to measure here", action)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpu(root: Path) -> dict[str, Any]:
    governors = {_read(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")}
    load = _read(root / "proc/loadavg").split()
    return {
        "name": cpu_name(root / "proc/cpuinfo"),
        "cores": os.cpu_count() or 1,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "governor": ", ".join(sorted(governors - {""})),
        "quota": _quota(root),
        "load": float(load[0]) if load and re.fullmatch(r"\d+\.\d+", load[0]) else None,
        "steal": _steal(root),
    }


def _quota(root: Path) -> float | None:
    """CPU limit of the container in cores (control groups version 2, then 1); None without one."""
    words = _read(root / "sys/fs/cgroup/cpu.max").split()
    if not words:
        cpu = root / "sys/fs/cgroup/cpu"
        words = [_read(cpu / "cpu.cfs_quota_us"), _read(cpu / "cpu.cfs_period_us")]
    with contextlib.suppress(ValueError, ZeroDivisionError, IndexError):
        quota = int(words[0]) / int(words[1])
        return quota if quota > 0 else None
    return None


def _steal(root: Path) -> float | None:
    """Share of CPU time since boot that the hypervisor gave to others (8th column of /proc/stat)."""
    words = _read(root / "proc/stat").split("\n")[0].split()
    with contextlib.suppress(ValueError, ZeroDivisionError, IndexError):
        times = [int(word) for word in words[1:9]]
        return times[7] / sum(times)
    return None


def _cpu_warnings(cpu: Mapping[str, Any]) -> list[Warned]:
    found = []
    if cpu["load"] is not None and cpu["load"] > MAX_LOAD:
        found.append(
            Warned(
                f"load average {cpu['load']:.2f}",
                f"other programs run on these {cpu['cores']} cores and take time from what is measured",
                "stop them or wait until the load is below 0.5",
            )
        )
    if any(word != "performance" for word in filter(None, cpu["governor"].split(", "))):
        found.append(
            Warned(
                f"CPU governor {cpu['governor']}",
                "the clock follows the load, so short steps are timed at a lower one",
                "run: sudo cpupower frequency-set -g performance",
            )
        )
    if cpu["quota"] is not None and cpu["quota"] < (len(cpu["affinity"]) or cpu["cores"]):
        found.append(
            Warned(
                f"CPU quota of {cpu['quota']:.3g} cores",
                "the container is stopped for the rest of a period once it is used up",
                "give whole cores instead (docker: --cpuset-cpus in place of --cpus)",
            )
        )
    if len(cpu["affinity"]) == 1:
        found.append(
            Warned(
                "one core for this process",
                "the worker shares it with whatever else runs, start-up included",
                "give it two or more (taskset -c, --cpuset-cpus)",
            )
        )
    if cpu["steal"] is not None and cpu["steal"] > MAX_STEAL:
        found.append(
            Warned(
                f"{cpu['steal']:.0%} of CPU time stolen since boot",
                "other virtual machines on this host take time, seconds will drift",
                "trust exact counters and paired comparisons, use --rigorous, or another host",
            )
        )
    return found


def _memory(root: Path) -> dict[str, Any]:
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    limit = _read(root / "sys/fs/cgroup/memory.max")
    total, available = (int(sizes[name]) * 1024 if name in sizes else None for name in ("MemTotal", "MemAvailable"))
    return {
        "total": total,
        "available": available,
        "limit": int(limit) if limit.isdigit() else None,
        "transparent_huge_pages": chosen.group(1) if chosen else "",
    }


def _memory_warnings(memory: Mapping[str, Any]) -> list[Warned]:
    usable = [size for size in (memory["available"], memory["limit"]) if size is not None]
    if not usable or min(usable) >= MIN_MEMORY:
        return []
    return [
        Warned(
            f"{_gigabytes(min(usable))} of memory",
            "models of official size need about 6 GB, and swapping ruins every time",
            "measure the -tiny models, or free memory",
        )
    ]


def _gpus() -> list[dict[str, Any]]:
    """State of every NVIDIA GPU that NVML shows; names only where its binding is missing."""
    names = gpu_names()
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return [{"name": name} for name in names]
    if not names:
        return []
    nvml.nvmlInit()
    found: list[dict[str, Any]] = []
    try:
        for index, name in enumerate(names):
            gpu: dict[str, Any] = {"name": name}
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                gpu["memory_used"], gpu["memory_total"] = int(memory.used), int(memory.total)
                gpu["use_percent"] = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                gpu["driver"] = str(nvml.nvmlSystemGetDriverVersion())
            found.append(gpu)
    finally:
        nvml.nvmlShutdown()
    return found


def _gpu_text(gpu: Mapping[str, Any]) -> str:
    text = str(gpu["name"])
    if "memory_total" in gpu:
        text += f", {_gigabytes(gpu['memory_used'])} of {_gigabytes(gpu['memory_total'])} used"
    if "use_percent" in gpu:
        text += f", {gpu['use_percent']} % busy"
    return text


def _gpu_warnings(gpus: list[dict[str, Any]]) -> list[Warned]:
    return [
        Warned(
            f"GPU {index} ({gpu['name']}) is in use",
            f"{gpu.get('use_percent', 0)} % busy, {_gigabytes(gpu.get('memory_used', 0))} taken",
            "see nvidia-smi for whose it is, or choose another with CUDA_VISIBLE_DEVICES",
        )
        for index, gpu in enumerate(gpus)
        if gpu.get("use_percent", 0) > MAX_GPU_USE or gpu.get("memory_used", 0) > MAX_GPU_MEMORY
    ]


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
