"""Stable machine names and the state of a repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vlmbench import provenance
from vlmbench.errors import UsageError
from vlmbench.provenance import cpu_name, detect_device, machine_name, repository_state, slug


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "intel-xeon"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "amd-ryzen-9-5950x"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("../../etc", "etc"),
        ("", "unknown"),
    ],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_machines_are_named_by_their_gpus_or_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "gpu_names", lambda: ("NVIDIA A10", "NVIDIA A10"))
    assert machine_name({}) == "nvidia-a10-x2"
    monkeypatch.setattr(provenance, "gpu_names", lambda: ())
    monkeypatch.setattr(provenance, "cpu_name", lambda: "AMD EPYC 7B13")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert machine_name({}) == "amd-epyc-7b13-8c"
    assert machine_name({"VLMBENCH_MACHINE": "my.box_1"}) == "my.box_1"


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "two words", "x" * 200])
def test_a_machine_name_must_be_a_folder_name(name: str) -> None:
    with pytest.raises(UsageError, match="VLMBENCH_MACHINE"):
        machine_name({"VLMBENCH_MACHINE": name})


def test_cpu_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\nmodel name\t: Other\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Some CPU"
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_name(tmp_path / "arm") not in ("", "Some CPU")
    assert cpu_name(tmp_path / "missing")


def test_device_is_cuda_where_a_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(provenance, "gpu_names", lambda: ("NVIDIA A10",))
    assert detect_device() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device() == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(provenance, "gpu_names", lambda: ())
    assert detect_device() == "cpu"


def test_repository_state(tmp_path: Path) -> None:
    assert repository_state(tmp_path).label == "unknown"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", str(tmp_path), *identity, *arguments], text=True)

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert repository_state(tmp_path).label == commit
    (tmp_path / "untracked").write_text("x")
    assert not repository_state(tmp_path).dirty
    (tmp_path / "file").write_text("two")
    assert repository_state(tmp_path).label == f"{commit}-dirty"
