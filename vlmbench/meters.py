"""The seam to a device: its clock, its memory, its name. Everything that differs between CPU and CUDA.

On CUDA time comes from device events, read after the block, so that nothing waits inside it; memory
from the caching allocator. On a CPU time is the wall clock and memory the profiler's allocation
events, which repeat exactly (the resident set does not).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlmbench.errors import UsageError

#: Name of the profiler's mark around the run whose memory counts.
_WATCHED = "vlmbench.watched"


@dataclass(frozen=True)
class MemoryUse:
    """Allocations of a run: how many, the most bytes held at once and what is still held, above before."""

    allocations: int
    peak: int
    retained: int


class Device(Protocol):
    """What a phase needs of the place it runs on."""

    type: str

    def mark(self) -> Any:
        """A point on the device's clock, taken without waiting for the device."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between successive marks; waits for the device."""

    def memory(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> MemoryUse:
        """What one `run` allocates, its output dropped at the end.

        `before` brings about the state to start from: under the same watch, so that blocks which the
        run replaces are known, and replacing them is not taken for keeping more.
        """

    def info(self) -> dict[str, Any]:
        """Name and state of the device for the record."""


class Cpu:
    """The host's processor."""

    type = "cpu"

    def mark(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.perf_counter_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Seconds between successive marks."""
        return [(b - a) / 1e9 for a, b in itertools.pairwise(marks)]

    def memory(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> MemoryUse:
        """Allocation events of torch's profiler during `run`.

        It knows the size only of those freed blocks that it saw allocated, hence `before` inside.
        """
        gc.collect()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            if before is not None:
                before()
            gc.collect()
            with torch.profiler.record_function(_WATCHED):
                output = run()
                del output
                gc.collect()
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        start = next(e.start_ns() for e in events if e.name() == _WATCHED)
        held = peak = allocations = 0
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.start_ns() >= start]
        for _, size in sorted(changes, key=lambda change: change[0]):
            allocations += size > 0
            held += size
            peak = max(peak, held)
        return MemoryUse(allocations, peak, held)

    def info(self) -> dict[str, Any]:
        """Processor name, cores, threads, governor and load."""
        return {
            "type": "cpu",
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "load": round(os.getloadavg()[0], 2),
        }


class Cuda:
    """One NVIDIA device. `cuda` and `nvml` are torch.cuda and pynvml; tests put fakes in their place."""

    type = "cuda"

    def __init__(self, cuda: Any = None, nvml: Any = None) -> None:
        self.cuda = cuda if cuda is not None else torch.cuda
        self.nvml = nvml

    def mark(self) -> Any:
        """A recorded timing event on the current stream."""
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between successive events (they count in milliseconds)."""
        self.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]

    def memory(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> MemoryUse:
        """Figures of the caching allocator around `run`."""
        if before is not None:
            before()
        gc.collect()
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        allocated = self.cuda.memory_stats().get("allocation.all.allocated", 0)
        output = run()
        self.cuda.synchronize()
        allocations = self.cuda.memory_stats().get("allocation.all.allocated", 0) - allocated
        peak = self.cuda.max_memory_allocated() - before
        del output
        gc.collect()
        return MemoryUse(allocations, peak, self.cuda.memory_allocated() - before)

    def info(self) -> dict[str, Any]:
        """Name, driver, clocks and temperature by NVML; what NVML does not say is left out."""
        found: dict[str, Any] = {"type": "cuda", "name": self.cuda.get_device_name(), "cpu": _cpu_name()}
        nvml = self.nvml or _nvml()
        if nvml is None:
            return found
        try:
            nvml.nvmlInit()
            handle = self._handle(nvml)
            readings = {
                "name": lambda: nvml.nvmlDeviceGetName(handle),
                "driver": nvml.nvmlSystemGetDriverVersion,
                "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "watts_limit": lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
            }
            for name, reading in readings.items():
                with contextlib.suppress(nvml.NVMLError):
                    value = reading()
                    found[name] = value.decode() if isinstance(value, bytes) else value
        except nvml.NVMLError:
            pass
        return found

    def _handle(self, nvml: Any) -> Any:
        # CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's: the UUID names the same card.
        uuid = getattr(self.cuda.get_device_properties(0), "uuid", None)
        if uuid is not None:
            with contextlib.suppress(nvml.NVMLError, TypeError):
                return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        return nvml.nvmlDeviceGetHandleByIndex(0)


def device(name: str) -> Device:
    """The device called `cpu`, `cuda`, or `auto` (CUDA where there is one). Raises UsageError otherwise."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "device 'cuda' asked for, but torch finds none here: use --device cpu, or install a CUDA build"
            )
        return Cuda()
    raise UsageError(f"unknown device '{name}': valid are auto, cpu, cuda")


def settle() -> None:
    """Collect garbage and take what is left out of the collector's sight.

    The libraries' hundreds of thousands of objects stay for good, and looking through them would
    make every later collection take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def timed_block(core: int | None = None, lock: str | None = None) -> Iterator[None]:
    """Conditions of a timed block: garbage collection off, on one core, no other block at the same time.

    `lock` is a file shared by workers that run side by side on one machine.
    """
    with open(lock, "w") if lock else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        affinity = os.sched_getaffinity(0)
        if core is not None:
            os.sched_setaffinity(0, {core})
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            os.sched_setaffinity(0, affinity)


def count_python_calls(run: Callable[[], object]) -> int:
    """Python functions entered during `run` (C functions are not counted: they vary between processes)."""
    calls = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        if event == "call":
            calls += 1

    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_dispatched(run: Callable[[], object]) -> Counter[str]:
    """Operators dispatched during an eager `run`, by name. A compiled frame would run eagerly under it."""
    mode = _Counting()
    with mode:
        run()
    return mode.ops


def count_profiled(run: Callable[[], object]) -> Counter[str]:
    """Operators called during `run` that no other operator called, by name; right for compiled frames.

    Annotations (a compiled region, a graph call) are no operators and may enclose them.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    found: Counter[str] = Counter()
    for event in profile.events() or ():
        if "::" not in event.name:
            continue
        parent = event.cpu_parent
        while parent is not None and "::" not in parent.name:
            parent = parent.cpu_parent
        if parent is None:
            found[event.name] += 1
    return found


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
