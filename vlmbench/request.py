"""From what a user asked on the command line to cases, checked before any worker starts.

A mistake that shows here costs no model build: unknown names, an image that cannot be read, a folder
without weights, a cache too short, packages that are missing, a folder that cannot be written.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vlmbench import kinds
from vlmbench.errors import UsageError, unknown
from vlmbench.schema import Case

#: What a worker started with this interpreter imports.
NEEDED = ("torch", "transformers", "PIL")
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


def cases(models: Sequence[str], caches: Sequence[str], runners: Sequence[str], workload: dict[str, Any]) -> list[Case]:
    """The cases of models × caches × runners with this workload (None: not given), each once.

    Without models those of the default suite, or the checkpoint's; without caches or runners all of
    them (a model may narrow the caches). Raises UsageError for anything that cannot be.
    """
    checkpoint = workload.get("checkpoint") or ""
    known = kinds.models()
    problems = [
        *([] if checkpoint else _unknown("model", models, known)),
        *_unknown("cache", caches, kinds.caches()),
        *_unknown("runner", runners, kinds.RUNNERS),
        *_unknown("dtype", [workload["dtype"]] if workload.get("dtype") else [], DTYPES),
    ]
    if problems:
        raise UsageError("; ".join(problems))
    if checkpoint:
        kinds.check_checkpoint(checkpoint)
        models = models or [Path(checkpoint).resolve().name if Path(checkpoint).is_dir() else checkpoint]
    if workload.get("image"):
        workload = {**workload, "image": check_image(workload["image"])}
    models = models or [name for name, model in known.items() if model.suite == "default"]
    found = []
    for model in models:
        wanted = caches or (not checkpoint and known[model].caches) or list(kinds.caches())
        found += [kinds.make_case(model, c, r, **workload) for c in wanted for r in runners or kinds.RUNNERS]
    if not found:
        raise UsageError("nothing to measure: no model is in the default suite, name one with --model")
    return list(dict.fromkeys(found))


def _unknown(what: str, names: Iterable[str], valid: Iterable[str]) -> list[str]:
    valid = list(valid)
    return [str(unknown(what, name, valid)) for name in dict.fromkeys(names) if name not in valid]


def check_image(path: str) -> str:
    """The image's absolute path, so that it means the same to a worker.

    Raises UsageError if it cannot be used. Without pillow the worker finds out.
    """
    if importlib.util.find_spec("PIL") is not None:
        from vlmbench.inputs import load_image

        load_image(path)
    elif not Path(path).is_file():
        raise UsageError(f"image '{path}' does not exist: give the path of a JPEG, PNG or WebP file")
    return str(Path(path).absolute())


def check_packages() -> None:
    """Raise UsageError when a worker could not import what it needs. Imports none of it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        shown = ", ".join("pillow" if name == "PIL" else name for name in missing)
        raise UsageError(f"{shown} not installed in this environment: run pip install 'vlmbench[measure]'")


def run_id() -> str:
    """A name for a run that sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


def run_folder(out: Path | None, run: str) -> Path:
    """The folder of a run, made now. Raises UsageError if nothing can be written there."""
    folder = out if out is not None else Path(".vlmbench") / "runs" / run
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to '{folder}' ({error.strerror}): name another folder with --out") from None
    return folder
