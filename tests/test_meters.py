"""The device seam: CUDA's path driven by a fake, the CPU's counters by known work."""

from __future__ import annotations

import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from vlmbench import meters
from vlmbench.errors import UsageError


class FakeCuda:
    """A stream whose kernels take a declared time, and an allocator that counts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.allocated, self.peak, self.count = 100, 100, 7

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: (self.calls.append("record"), setattr(event, "at", self.now))
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def kernel(self, seconds: float) -> None:
        self.now += seconds

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_stats(self) -> dict[str, int]:
        return {"allocation.all.allocated": self.count}

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.count += 1
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def get_device_name(self) -> str:
        return "Fake A10"

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid="abc")


class FakeNvml:
    """NVML that knows some things and refuses others."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return uuid.decode()

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        assert handle == "GPU-abc"
        return b"NVIDIA A10"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        return 1695 if which == 1 else 6251

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        raise self.NVMLError

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        return 150_000


def test_cuda_blocks_are_timed_by_events_and_wait_only_at_their_end() -> None:
    cuda = FakeCuda()
    device = meters.Cuda(cuda)
    marks = [device.mark()]
    for seconds in (0.25, 0.5):
        cuda.kernel(seconds)
        marks.append(device.mark())
    assert "synchronize" not in cuda.calls
    assert device.seconds(marks) == pytest.approx([0.25, 0.5])
    assert cuda.calls[-1] == "synchronize"


def test_cuda_memory_counts_from_what_was_held_before() -> None:
    cuda = FakeCuda()

    def run() -> None:
        cuda.allocate(50)
        cuda.allocate(30)
        cuda.free(60)

    use = meters.Cuda(cuda).memory(run, before=lambda: cuda.allocate(1000))
    assert use == meters.MemoryUse(allocations=2, peak=80, retained=20)


def test_nvml_names_the_device_and_what_it_refuses_is_left_out() -> None:
    info = meters.Cuda(FakeCuda(), FakeNvml()).info()
    assert info["name"] == "NVIDIA A10"
    assert (info["driver"], info["sm_mhz"], info["memory_mhz"], info["watts_limit"]) == ("570.1", 1695, 6251, 150)
    assert "celsius" not in info


def test_cpu_memory_sees_peak_and_what_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(3000, dtype=torch.uint8)
        del a
        kept[:] = [torch.empty(500, dtype=torch.uint8)]
        del b

    use = meters.Cpu().memory(run, before=run)
    # The 500 bytes of the run before are replaced, not kept on top.
    assert use == meters.MemoryUse(allocations=3, peak=4000, retained=0)
    first = meters.Cpu().memory(lambda: kept.append(torch.empty(700, dtype=torch.uint8)))
    assert first.retained == 700


def test_counting_dispatched_and_profiled_operators() -> None:
    x = torch.ones(4, 4)

    def run() -> None:
        ((x @ x) + 1).sum()

    assert meters.count_dispatched(run) == {"aten.mm.default": 1, "aten.add.Tensor": 1, "aten.sum.default": 1}
    assert meters.count_profiled(run) == {"aten::matmul": 1, "aten::add": 1, "aten::sum": 1}


def test_counting_python_calls_counts_functions_of_python_only() -> None:
    def inner() -> int:
        return len("abc")

    assert meters.count_python_calls(lambda: (inner(), inner())) == 3


def test_a_timed_block_is_pinned_alone_and_without_collection(tmp_path) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    inside = threading.Event()
    order: list[str] = []
    lock = str(tmp_path / "lock")

    def other() -> None:
        inside.wait()
        with meters.timed_block(None, lock):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with meters.timed_block(core, lock):
        assert os.sched_getaffinity(0) == {core}
        assert not gc.isenabled()
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert gc.isenabled() and os.sched_getaffinity(0) == before


def test_unknown_and_absent_devices_are_named() -> None:
    with pytest.raises(UsageError, match="unknown device 'tpu': valid are auto, cpu, cuda"):
        meters.device("tpu")
    if not torch.cuda.is_available():
        assert meters.device("auto").type == "cpu"
        with pytest.raises(UsageError, match="torch finds none here"):
            meters.device("cuda")
