"""Commands as users type them: what they print, their exit codes, and one line for a mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fakes import CheckFails, FakeLauncher
from typer.testing import CliRunner

from vlmbench import cli, console, kinds, metrics, provenance, request
from vlmbench.errors import UsageError, WorkerFailed
from vlmbench.schema import MAX_LINE, Record, read_lines

CASES = ["-m", "llava-tiny", "-c", "dynamic", "-c", "static"]
ROOT = Path(__file__).parents[1]


class Shell:
    """`vlmbench` in a folder of its own, with a fake launcher."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.launcher = FakeLauncher(slower={"static": 1.3})
        monkeypatch.chdir(folder)
        monkeypatch.setattr(console, "make_launcher", lambda: self.launcher)
        monkeypatch.setattr(request, "check_packages", lambda: None)
        monkeypatch.setattr(provenance, "detect_device", lambda: "cpu")

    def __call__(self, *arguments: str) -> Any:
        """The result of one command; exceptions that are not exits are defects."""
        result = CliRunner().invoke(cli.app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def records(self) -> list[Record]:
        """All records below .vlmbench/runs."""
        ledgers = sorted(self.folder.glob(".vlmbench/runs/*/records.jsonl"))
        return [Record.from_json(p) for ledger in ledgers for _, _, p in read_lines(ledger) if isinstance(p, dict)]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """See Shell."""
    return Shell(tmp_path, monkeypatch)


def test_measure_prints_a_row_a_case_and_keeps_the_records(shell: Shell) -> None:
    result = shell("measure", *CASES)
    assert result.exit_code == 0
    rows = [line.split()[:2] for line in result.stdout.splitlines() if line.startswith(("dynamic", "static"))]
    assert rows == [["dynamic", "eager"], ["dynamic", "compile"], ["static", "eager"], ["static", "compile"]]
    assert "x slower" in result.stdout and result.stdout.startswith("llava-tiny\n")
    assert "records: .vlmbench/runs/" in result.stderr
    assert len(shell.records()) == 4 and shell.launcher.closed


def test_measure_as_json(shell: Shell) -> None:
    result = shell("measure", *CASES, "-c", "tensor", "-r", "eager", "-r", "compile", "--json", "-q")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 6 and result.stderr == "" and result.exit_code == 0
    wanted = {"case", "status", "reason", "metrics", "facts", "checks", "versions", "device", "protocol"}
    for data in lines:
        assert wanted <= set(data) and data["status"] == "ok"
        assert {"asked", "observed"} <= set(data["facts"])
        assert {"reference", "tolerance", "error"} <= set(data["checks"][0])
    assert all(len(line) < MAX_LINE for line in result.stdout.splitlines())


def test_the_workload_reaches_the_case(shell: Shell) -> None:
    flags = "--batch 2 --images 0 --prompt-tokens 8 --new-tokens 4 --cache-length 64 --dtype bfloat16 --threads 2"
    result = shell("measure", *CASES[:4], "-r", "eager", *flags.split(), "--attention", "eager", "--device", "cuda")
    assert result.exit_code == 0
    (record,) = shell.records()
    given = kinds.make_case(
        "llava-tiny",
        "dynamic",
        "eager",
        batch=2,
        images=0,
        prompt_tokens=8,
        new_tokens=4,
        cache_length=64,
        dtype="bfloat16",
        threads=2,
        attention="eager",
        device="cuda",
    )
    assert record.case == given


@pytest.mark.parametrize(("flags", "processes"), [([], 3), (["--processes", "2"], 2), (["--rigorous"], 8)])
def test_effort(shell: Shell, flags: list[str], processes: int) -> None:
    assert shell("measure", *CASES[:4], "-r", "eager", *flags).exit_code == 0
    assert shell.records()[0].facts["processes"] == processes


def test_without_a_model_the_default_suite_is_measured(shell: Shell) -> None:
    assert shell("measure", "--processes", "1", "--jobs", "2", "-q").exit_code == 0
    assert {record.case for record in shell.records()} == set(kinds.default_cases())


def test_out_names_the_folder(shell: Shell) -> None:
    assert shell("measure", *CASES, "-r", "eager", "--out", "there/run").exit_code == 0
    assert len(list(read_lines(shell.folder / "there" / "run" / "records.jsonl"))) == 2


def test_a_broken_case_is_told_the_others_go_on(shell: Shell) -> None:
    shell.launcher.failures = {("dynamic", "check"): CheckFails("NaN in the logits")}
    result = shell("measure", *CASES, "-r", "eager")
    assert result.exit_code == 1
    assert "dynamic eager  broken: check 'logits' failed at step 3" in result.stdout
    assert [record.status for record in shell.records()] == ["broken", "ok"]


def test_a_dead_worker_breaks_its_case(shell: Shell) -> None:
    shell.launcher.failures = {("static", "decode"): WorkerFailed("worker killed by SIGKILL at 'block decode'")}
    result = shell("measure", *CASES, "-r", "eager", "--json")
    statuses = [(data["status"], data["reason"]) for data in map(json.loads, result.stdout.splitlines())]
    assert statuses == [("ok", ""), ("broken", "worker killed by SIGKILL at 'block decode'")]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["measure", "-m", "lava-tiny"], "unknown model 'lava-tiny': valid are "),
        (["measure", "-m", "lava-tiny"], "did you mean 'llava-tiny'?"),
        (["measure", "-c", "statik", "-c", "x"], "unknown cache 'statik': valid are dynamic, static, tensor"),
        (["measure", "-c", "statik", "-c", "x"], "; unknown cache 'x'"),
        (["measure", "-r", "jit"], "unknown runner 'jit': valid are eager, compile"),
        (["measure", "--dtype", "int8"], "unknown dtype 'int8': valid are float32, bfloat16, float16"),
        (["measure", "--device", "tpu"], "unknown device 'tpu': valid are auto, cpu, cuda"),
        (["measure", "--image", "none.jpg"], "image 'none.jpg' does not exist"),
        (["measure", "--image", "cut.jpg"], "image 'cut.jpg' cannot be read"),
        (["measure", "--image", "text.jpg"], "image 'text.jpg' is not a readable JPEG, PNG, WEBP file"),
        (["measure", "--image", "huge.png"], "more than 50000000: shrink it first"),
        (["measure", "--cache-length", "16"], "cache length 16 is below prompt + new tokens (32 + 32"),
        (["measure", "--checkpoint", "./nowhere"], "checkpoint './nowhere' is no folder"),
        (["measure", "--checkpoint", "empty"], "checkpoint 'empty' has no config.json"),
        (["measure", "--checkpoint", "bare"], "checkpoint 'bare' has no weights"),
        (["measure", "--out", "text.jpg/run"], "cannot write to 'text.jpg/run' (Not a directory)"),
        (["list", "metric"], "unknown list 'metric': valid are models, caches, runners, metrics, devices"),
        (["compare", "main", "HEAD"], "no results folder 'results'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(shell: Shell, arguments: list[str], text: str) -> None:
    from PIL import Image

    photograph = (ROOT / "vlmbench" / "data" / "astronaut.jpg").read_bytes()
    Path("cut.jpg").write_bytes(photograph[: len(photograph) // 2])
    Path("text.jpg").write_text("no picture")
    if "huge.png" in arguments:
        Image.new("1", (10_000, 6_000)).save("huge.png")
    for name in ("empty", "bare"):
        Path(name).mkdir()
    Path("bare/config.json").write_text("{}")
    result = shell(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.startswith("vlmbench: ") and result.stderr.count("\n") == 1
    assert result.stdout == "" and shell.launcher.workers == []


def test_missing_packages_are_named_before_a_worker_starts(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(
        UsageError, match=r"^torch not installed in this environment: run pip install 'vlmbench\[measure\]'"
    ):
        request.check_packages()


def test_wrong_numbers_and_options_exit_with_2(shell: Shell) -> None:
    assert shell("measure", "--batch", "0").exit_code == 2
    assert shell("measure", "--batch", "many").exit_code == 2
    assert shell("measure", "--nonsense").exit_code == 2
    assert shell("nonsense").exit_code == 2


def test_an_image_is_given_to_workers_by_its_whole_path(shell: Shell) -> None:
    Path("photo.jpg").write_bytes((ROOT / "vlmbench" / "data" / "astronaut.jpg").read_bytes())
    assert shell("measure", *CASES[:4], "-r", "eager", "--image", "photo.jpg").exit_code == 0
    (record,) = shell.records()
    assert record.case.image == str(shell.folder / "photo.jpg")
    assert record.case.id == "llava-tiny/dynamic/eager+image=photo.jpg"


def test_a_checkpoint_needs_no_model(shell: Shell) -> None:
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    Path("mine/model.safetensors").write_bytes(b"")
    assert shell("measure", "--checkpoint", "mine", "-c", "dynamic", "-r", "eager").exit_code == 0
    (record,) = shell.records()
    assert (record.case.model, record.case.checkpoint) == ("mine", "mine")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_finished_records(tmp_path: Path, number: int) -> None:
    # A whole process: its second case never ends, and is interrupted.
    program = f"""
        import sys, threading
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from fakes import FakeLauncher
        from vlmbench import cli, console, request
        from vlmbench.errors import WorkerFailed

        launcher = FakeLauncher()
        killed = threading.Event()
        close = launcher.close
        launcher.close = lambda: (killed.set(), close())

        def hang():
            print("hanging", file=sys.stderr, flush=True)
            killed.wait(60)
            raise WorkerFailed("ended")

        launcher.failures = {{("static", "check"): hang}}
        console.make_launcher = lambda: launcher
        request.check_packages = lambda: None
        cli.main()
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            "measure",
            *CASES,
            "-r",
            "eager",
            "--out",
            "run",
            "-q",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None and process.stdout is not None
    assert process.stderr.readline() == "hanging\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert err == "vlmbench: interrupted; 1 of 2 records are kept in run/records.jsonl\n"
    assert process.returncode == 130
    assert "dynamic eager" in out
    (line,) = read_lines(tmp_path / "run" / "records.jsonl")
    assert line[1] is not None and line[1].case == "llava-tiny/dynamic/eager"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["records.jsonl"]


@pytest.mark.parametrize("what", ["models", "caches", "runners", "metrics", "devices"])
def test_lists(shell: Shell, what: str) -> None:
    text = shell("list", what)
    rows = json.loads(shell("list", what, "--json").stdout)
    assert text.exit_code == 0 and len(text.stdout.splitlines()) == len(rows) > 0
    for line, row in zip(text.stdout.splitlines(), rows, strict=True):
        assert line.split()[0] == row["name"]


def test_list_of_everything(shell: Shell) -> None:
    text = shell("list").stdout
    for name in (*kinds.models(), *kinds.caches(), *kinds.RUNNERS, *(m.name for m in metrics.METRICS)):
        assert f"  {name} " in text
    assert set(json.loads(shell("list", "--json").stdout)) == {
        "models",
        "caches",
        "runners",
        "metrics",
        "devices",
    }


def test_list_metrics_says_what_they_mean(shell: Shell) -> None:
    (line,) = [text for text in shell("list", "metrics").stdout.splitlines() if text.startswith("recompiles")]
    for part in ("count", "exact", "prefill, decode, generate", "a guard failed"):
        assert part in line


def test_listing_is_quick_and_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from vlmbench import cli\n"
        "try: cli.app(['list'], prog_name='vlmbench')\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'transformers', 'pandas', 'plotly', 'numpy', 'PIL', 'asv'} & set(sys.modules)\n"
        "print(sorted(loaded), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "[]\n", done.stderr


def test_doctor(shell: Shell) -> None:
    text = shell("doctor")
    assert text.exit_code == 0 and "governor" in text.stdout and "vlmbench" in text.stdout
    data = json.loads(shell("doctor", "--json").stdout)
    assert data["versions"]["vlmbench"] and isinstance(data["warnings"], list)


def test_compare(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmbench import revisions
    from vlmbench.compare import Verdict
    from vlmbench.differences import Comparison, Revision, Series

    asked: list[Any] = []
    series = Series(
        machine="here",
        env="env",
        benchmark="decode.track_decode_seconds_per_token",
        metric="decode_seconds_per_token",
        params={"model": "llava-tiny", "cache": "static", "runner": "eager"},
        unit="seconds",
        before=1e-3,
        after=1.12e-3,
        group="regression",
        verdict=Verdict("regression", 1.12, 1.1, 1.14),
        tokens_before=1000.0,
        tokens_after=893.0,
    )

    def compare(*arguments: Any, **more: Any) -> Comparison:
        asked.append((arguments, more))
        return Comparison(Revision("main", "a" * 40), Revision("HEAD", "b" * 40), ("here",), (series,))

    monkeypatch.setattr(revisions, "compare_revisions", compare)
    result = shell("compare", "main", "HEAD", "--machine", "here", "--results", "there")
    assert result.exit_code == 0 and "1.12x slower" in result.stdout and "1000 → 893" in result.stdout
    assert asked == [((Path("there"), "main", "HEAD"), {"machine": "here", "repo": Path()})]
    assert json.loads(shell("compare", "main", "HEAD", "--json").stdout)["counts"]["regression"] == 1


def test_version_and_help(shell: Shell) -> None:
    from vlmbench import __version__

    assert shell("--version").stdout == f"vlmbench {__version__}\n"
    for command in ("measure", "list", "doctor", "compare"):
        assert command in shell("--help").stdout
        assert shell(command, "--help").exit_code == 0


def test_every_option_is_explained() -> None:
    import typer.main

    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"


def test_python_m_is_the_same_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "vlmbench", "--version"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("vlmbench ")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m vlmbench list | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("models\n", "")
