"""What doctor sees on machines made of files, and what it warns about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmbench import doctor, provenance
from vlmbench.doctor import examine, lines


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quiet machine with nothing to warn about."""
    for name, text in {
        "proc/cpuinfo": "model name\t: Some CPU\n",
        "proc/loadavg": "0.05 0.10 0.10 1/90 12\n",
        "proc/stat": "cpu  100 0 100 9800 0 0 0 0 0 0\n",
        "proc/meminfo": "MemTotal:  33554432 kB\nMemFree:  1 kB\nMemAvailable:  30000000 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }.items():
        write(tmp_path, name, text)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(doctor, "_versions", lambda: dict.fromkeys(("vlmbench", *doctor.PACKAGES), "1.0"))
    monkeypatch.setattr(doctor, "_gpus", list)
    monkeypatch.setattr(provenance, "gpu_names", lambda: ())
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    """A file of the machine."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def warned(root: Path, environment: dict[str, str] | None = None) -> list[str]:
    """The warnings, as people read them."""
    return [str(warning) for warning in examine(root, environment or {}).warnings]


def test_a_quiet_machine(root: Path) -> None:
    found = examine(root, {})
    assert found.warnings == []
    assert found.cpu["governor"] == "performance" and found.cpu["quota"] is None and found.cpu["load"] == 0.05
    assert found.memory == {
        "total": 33554432 * 1024,
        "available": 30000000 * 1024,
        "limit": None,
        "transparent_huge_pages": "madvise",
    }
    text = lines(found)
    assert text[-1] == "nothing found that would spoil a measurement"
    assert any("Some CPU" in line for line in text)


@pytest.mark.parametrize(
    ("name", "text", "what", "action"),
    [
        ("proc/loadavg", "3.20 1 1 1/9 1", "load average 3.20", "stop them or wait"),
        (
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor",
            "powersave",
            "performance, powersave",
            "cpupower",
        ),
        ("sys/fs/cgroup/cpu.max", "150000 100000", "CPU quota of 1.5 cores", "--cpuset-cpus"),
        ("proc/stat", "cpu  100 0 100 600 0 0 0 200 0 0", "20% of CPU time stolen", "paired comparisons"),
        (
            "proc/meminfo",
            "MemTotal: 4000000 kB\nMemAvailable: 2000000 kB",
            "2.0 GB of memory",
            "-tiny models",
        ),
        ("sys/fs/cgroup/memory.max", "1000000000", "1.0 GB of memory", "-tiny models"),
    ],
)
def test_what_spoils_is_named_with_what_to_do(root: Path, name: str, text: str, what: str, action: str) -> None:
    write(root, name, text)
    (warning,) = warned(root)
    assert what in warning and action in warning


def test_a_quota_of_all_cores_is_none(root: Path) -> None:
    write(root, "sys/fs/cgroup/cpu.max", "400000 100000")
    assert warned(root) == []


def test_one_core_is_too_few(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    assert warned(root)[0].startswith("one core for this process")


def test_variables_that_change_the_measurement(root: Path) -> None:
    (warning,) = warned(root, {"TORCH_COMPILE_DISABLE": "1", "TORCH_LOGS": "", "HOME": "/root"})
    assert warning == (
        "TORCH_COMPILE_DISABLE is set to '1': nothing is compiled; "
        "unset TORCH_COMPILE_DISABLE unless that is what you measure"
    )


def test_missing_packages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**dict.fromkeys(doctor.PACKAGES, "1.0"), "torch": None, "triton": None}
    monkeypatch.setattr(doctor, "_versions", lambda: versions)
    (warning,) = warned(root)
    assert warning.startswith("not installed: torch:") and "pip install 'vlmbench[measure]'" in warning
    assert any(line.split() == ["torch", "not", "installed"] for line in lines(examine(root, {})))


def test_a_busy_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "NVIDIA A10", "use_percent": 80, "memory_used": 5 << 30, "memory_total": 24 << 30}
    monkeypatch.setattr(doctor, "_gpus", lambda: [{**gpu, "use_percent": 0, "memory_used": 0}, gpu])
    (warning,) = warned(root)
    assert "GPU 1 (NVIDIA A10) is in use" in warning and "CUDA_VISIBLE_DEVICES" in warning


def test_a_bad_machine_name_is_a_warning(root: Path) -> None:
    (warning,) = warned(root, {"VLMBENCH_MACHINE": "a/b"})
    assert "VLMBENCH_MACHINE" in warning


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    found = examine(tmp_path, {})
    assert found.cpu["load"] is None and found.memory["total"] is None
    assert lines(found)


def test_json(root: Path) -> None:
    data = json.loads(json.dumps(examine(root, {"TORCH_LOGS": "all"}).to_json(), allow_nan=False))
    assert set(data) == {"machine", "versions", "cpu", "memory", "devices", "warnings"}
    assert set(data["warnings"][0]) == {"what", "cause", "action"}


def test_this_machine() -> None:
    found = examine()
    assert found.versions["vlmbench"] and found.versions["numpy"]
    assert found.machine
