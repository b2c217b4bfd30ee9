"""Families and caches by file name: listing reads the files as text and imports none of them.

One new file in `families/` or `caches/` is one new kind: asv's parameters, the contract tests, the
command line and the docs follow from this listing. A folder of the user's own with the same two
subfolders joins in through the environment variable VLMBENCH_KINDS.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from vlmbench.errors import UsageError, unknown
from vlmbench.schema import Case

Suite = Literal["default", "nightly", "name"]
#: Each suite has all of those before it.
SUITES: tuple[Suite, ...] = ("default", "nightly", "name")

#: Files that hold a checkpoint's weights.
_WEIGHTS = ("*.safetensors", "*.bin")
_FOLDERS = {"family": "families", "cache": "caches"}
_CASE_FIELDS = {f.name for f in fields(Case)}


@dataclass(frozen=True)
class Model:
    """A family at one size, as the literal MODELS of its file declares it.

    `suite` says when it runs: by default, nightly, or only by name. `case` holds the case fields
    that differ from Case's own defaults. `caches` narrows the kinds of the default suite; `why`
    gives the reason for that. `runners` are those of the suites.
    """

    name: str
    family: str
    summary: str
    suite: Suite = "name"
    case: dict[str, Any] = field(default_factory=dict, hash=False)
    caches: tuple[str, ...] = ()
    why: str = ""
    runners: tuple[str, ...] = ("eager", "compile")


@dataclass(frozen=True)
class Kind:
    """A family or cache file: its name, first docstring line and path; of a cache, when it runs."""

    name: str
    summary: str
    path: Path
    suite: Suite = "default"


@dataclass(frozen=True)
class Runner:
    """How a forward runs. `compiles` says whether there is anything to compile, cold or warm."""

    name: str
    summary: str
    compiles: bool


#: All runners by name, in the order of the tables.
RUNNERS: dict[str, Runner] = {
    runner.name: runner
    for runner in (
        Runner("eager", "every forward runs op by op", compiles=False),
        Runner(
            "compile",
            "decode is compiled with a static shape as generate() does; prefill stays eager unless asked",
            compiles=True,
        ),
    )
}


def _roots() -> list[Path]:
    extra = os.environ.get("VLMBENCH_KINDS", "")
    return [Path(__file__).parent, *(Path(p) for p in extra.split(os.pathsep) if p)]


@cache
def _scan(what: str, roots: tuple[Path, ...]) -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for root in roots:
        for path in sorted((root / _FOLDERS[what]).glob("[a-z]*.py")):
            doc = ast.get_docstring(_tree(path)) or ""
            suite: Suite = _literal(path, "SUITE", "default") if what == "cache" else "default"
            found.setdefault(path.stem, Kind(path.stem, doc.split("\n")[0].rstrip("."), path, suite))
    return found


@cache
def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, SyntaxError) as error:
        raise UsageError(f"{path} cannot be read as a kind: {error}") from None


def _literal(path: Path, name: str, default: Any = None) -> Any:
    """The literal a file gives `name`, `default` if it gives none. Raises UsageError without either."""
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                raise UsageError(f"{path}: {name} must be a plain literal, since listing imports nothing") from None
    if default is None:
        raise UsageError(f"{path} defines no {name}")
    return default


def families() -> dict[str, Kind]:
    """All families by `model_type`."""
    return _scan("family", tuple(_roots()))


def caches() -> dict[str, Kind]:
    """All cache kinds by name, in the order of the files' names."""
    return _scan("cache", tuple(_roots()))


def models() -> dict[str, Model]:
    """All models of all families by name, the default suite first."""
    found = []
    for kind in families().values():
        for name, row in _literal(kind.path, "MODELS").items():
            row = {key: tuple(value) if key in ("caches", "runners") else value for key, value in row.items()}
            unknown_fields = set(row.get("case", {})) - _CASE_FIELDS
            if unknown_fields:
                raise UsageError(f"{kind.path}: model '{name}' sets unknown case fields {sorted(unknown_fields)}")
            found.append(Model(name=name, family=kind.name, **row))
    return {m.name: m for m in sorted(found, key=lambda m: SUITES.index(m.suite))}


def load(what: str, name: str) -> ModuleType:
    """Import the file of one family or cache kind. Raises UsageError for an unknown name."""
    found = _scan(what, tuple(_roots()))
    if name not in found:
        raise unknown("cache kind" if what == "cache" else what, name, found)
    path = found[name].path
    dotted = f"vlmbench.{_FOLDERS[what]}.{name}"
    if path.parent == Path(__file__).parent / _FOLDERS[what]:
        return importlib.import_module(dotted)
    if dotted not in sys.modules:
        spec = importlib.util.spec_from_file_location(dotted, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[dotted] = module
    return sys.modules[dotted]


def make_case(model: str, cache_kind: str, runner: str, **given: Any) -> Case:
    """The case of these three names with the model's own defaults under what was `given`.

    `given` values of None stand for "not given". Raises UsageError for an unknown name or a value
    no case can have.
    """
    if cache_kind not in caches():
        raise unknown("cache", cache_kind, caches())
    if runner not in RUNNERS:
        raise unknown("runner", runner, RUNNERS)
    values = {name: value for name, value in given.items() if value is not None}
    if not values.get("checkpoint"):
        known = models()
        if model not in known:
            raise unknown("model", model, known)
        values = {**known[model].case, **values}
    case = Case(model=model, cache=cache_kind, runner=runner, **values)
    case.validate()
    return case


def check_checkpoint(name: str) -> None:
    """Raise UsageError for a local folder that is no checkpoint, or a path that is not there.

    Anything else is taken for a hub id; loading says whether it can be had.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"checkpoint '{name}' has no config.json: name the folder that save_pretrained wrote")
        if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
            raise UsageError(
                f"checkpoint '{name}' has no weights ({' or '.join(_WEIGHTS)}): fetch them, or measure random "
                "weights with --model"
            )
    elif path.is_file() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UsageError(f"checkpoint '{name}' is no folder: give a local folder or a hub id such as 'org/name'")


def outside(suite: Suite, model: str, cache_kind: str, runner: str) -> str:
    """Why a suite leaves this combination out; empty if it is in it.

    A model's row names its runners and may name its caches; one that names none takes every cache
    kind whose own suite this is.
    """
    row, kind = models()[model], caches()[cache_kind]
    if SUITES.index(row.suite) > SUITES.index(suite):
        return f"{model} is not in the {suite} suite"
    if runner not in row.runners:
        return f"{model} is measured with {', '.join(row.runners)} only"
    if row.caches and cache_kind not in row.caches:
        return f"{model} is measured with {', '.join(row.caches)} only: {row.why}"
    if not row.caches and SUITES.index(kind.suite) > SUITES.index(suite):
        return f"cache kind {cache_kind} is not in the {suite} suite"
    return ""


def default_cases(device: str = "cpu", suite: Suite = "default") -> list[Case]:
    """The cases of the suite: its models × their cache kinds × their runners."""
    return [
        replace(make_case(m, c, r), device=device)
        for m in models()
        for c in caches()
        for r in RUNNERS
        if not outside(suite, m, c, r)
    ]
