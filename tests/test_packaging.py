"""The wheel: builds, carries the photograph, and works in a clean environment from another folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vlmbench import kinds

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vlmbench", source / "vlmbench", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_carries_photograph_licence_and_every_kind(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        photograph = archive.read("vlmbench/data/astronaut.jpg")
    assert photograph == (ROOT / "vlmbench/data/astronaut.jpg").read_bytes()
    assert "vlmbench/data/astronaut.txt" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for folder, found in (("families", kinds.families()), ("caches", kinds.caches())):
        assert {f"vlmbench/{folder}/{name}.py" for name in found} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "results"))]


@pytest.mark.slow
def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """Only the light core is installed: listing needs no torch, and measuring says what is missing."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python, elsewhere = tmp_path / "env/bin/python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [str(python), "-m", "pip", "install", "-q", str(wheel), "-c", str(ROOT / "constraints.txt")]
    subprocess.run(install, check=True, capture_output=True, cwd=elsewhere)
    command = str(python.with_name("vlmbench"))
    listed = subprocess.run([command, "list", "models"], capture_output=True, text=True, cwd=elsewhere)
    assert listed.returncode == 0, listed.stderr
    assert all(name in listed.stdout for name in kinds.models())
    measure = [command, "measure", "--model", "llava-tiny", "--cache", "static", "--runner", "eager"]
    refused = subprocess.run(measure, capture_output=True, text=True, cwd=elsewhere)
    assert refused.returncode == 2
    assert "torch" in refused.stderr
    assert "Traceback" not in refused.stderr
