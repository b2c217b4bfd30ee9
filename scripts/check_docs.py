"""Documents against code: the README's tables, the options it names, the files, the table of layers.

    python scripts/check_docs.py            # says what differs, exits with 1
    python scripts/check_docs.py --write    # writes the README's tables anew from the code

A table between `<!-- table: NAME -->` and `<!-- end -->` is made from the code and compared whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from vlmbench import cli, kinds, metrics

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Check, or write the tables with --write; the exit code."""
    text = README.read_text(encoding="utf-8")
    made = _TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[4]}" if m[2] in TABLES else m[0], text)
    if "--write" in arguments:
        README.write_text(made, encoding="utf-8")
        text = made
    problems = [*_tables(text), *_options(), *_files(), *_layers()]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _rows(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.strip() for cell in row)} |\n" for row in lines)


def _metrics() -> str:
    trust = {"exact": "exact", "timing": "timing", "memory": "reading"}
    return _rows(
        "metric|unit|kind|meaning|phases",
        ((f"`{m.name}`", m.unit, trust[m.trust], m.meaning, ", ".join(m.phases) or "-") for m in metrics.METRICS),
    )


def _models() -> str:
    return _rows(
        "model|family|measured|what it is",
        ((f"`{m.name}`", f"`{m.family}`", _when(m), m.summary) for m in kinds.models().values()),
    )


def _when(model: kinds.Model) -> str:
    when = {"default": "always", "nightly": "nightly", "name": "by name"}[model.suite]
    return f"{when}, {' and '.join(model.caches)} only" if model.caches else when


def _caches() -> str:
    return _rows("cache kind|what it is", ((f"`{c.name}`", c.summary) for c in kinds.caches().values()))


def _runners() -> str:
    return _rows("runner|what it does", ((f"`{r.name}`", r.summary) for r in kinds.RUNNERS.values()))


def _commands() -> str:
    return _rows(
        "command|what it does|options",
        (
            (
                f"`vlmbench {name}`",
                (command.help or "").split("\n")[0],
                ", ".join(_flags(command)),
            )
            for name, command in _click().commands.items()
        ),
    )


TABLES = {
    "metrics": _metrics,
    "models": _models,
    "caches": _caches,
    "runners": _runners,
    "commands": _commands,
}


def _click() -> Any:
    return typer.main.get_command(cli.app)


def _flags(command: Any) -> list[str]:
    found = [max(p.opts, key=len) for p in command.params if p.opts and p.opts[0].startswith("-")]
    return [f"`{flag}`" for flag in found if flag != "--help"]


def _tables(text: str) -> Iterator[str]:
    found = {m[2]: m[3] for m in _TABLE.finditer(text)}
    for name in found.keys() - TABLES.keys():
        yield f"README.md: no table '{name}' can be made: there are {', '.join(TABLES)}"
    for name, make in TABLES.items():
        if name not in found:
            yield f"README.md: the table '{name}' is missing (<!-- table: {name} --> ... <!-- end -->)"
            continue
        old, new = found[name].splitlines(), make().splitlines()
        for line in new:
            if line not in old:
                yield f"README.md, {name}: missing {line}"
        for line in old:
            if line not in new:
                yield f"README.md, {name}: not in the code: {line}"
        if old != new and sorted(old) == sorted(new):
            yield f"README.md, {name}: the rows are in another order; scripts/check_docs.py --write"


def _options() -> Iterator[str]:
    """Every `vlmbench COMMAND --option` in a document must exist."""
    commands = _click().commands
    for path in _documents():
        for line in re.findall(r"vlmbench [a-z].*", path.read_text(encoding="utf-8")):
            words = re.split(r"[`#|;]", line)[0].split()
            command = commands.get(words[1])
            if command is None:
                if any(word.startswith("--") for word in words):
                    yield f"{path.name}: no command 'vlmbench {words[1]}': there are {', '.join(commands)}"
                continue
            known = {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
            for flag in (word.split("=")[0].strip("[]().,") for word in words if word.startswith(("-", "[-"))):
                if flag not in known and re.fullmatch(r"--?[a-z][a-z0-9-]*", flag):
                    yield f"{path.name}: 'vlmbench {words[1]}' has no option '{flag}'"


def _documents() -> list[Path]:
    return [README, *sorted((ROOT / "docs").glob("*.md"))]


def _files() -> Iterator[str]:
    """Every file that a document links to or names with a folder exists; the README names every document."""
    for path in _documents():
        text = path.read_text(encoding="utf-8")
        linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        named = re.findall(r"`((?:docs|scripts|benchmarks|vlmbench|tests)/[\w./-]+)`", text)
        for name, base in [*((n, path.parent) for n in linked), *((n, ROOT) for n in named)]:
            if not (base / name).exists():
                yield f"{path.name}: '{name}' does not exist"
    readme = README.read_text(encoding="utf-8")
    for path in _documents()[1:]:
        if f"docs/{path.name}" not in readme:
            yield f"README.md does not name docs/{path.name}"


def _layers() -> Iterator[str]:
    """The table of layers in docs/architecture.md has every module, and none that is not there."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| *\d+ *\|(.*)\|$", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:/<name>\.py|/)?`", row)}
    package = ROOT / "vlmbench"
    there = {path.stem for path in package.glob("[a-z]*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    for name in sorted(there - named):
        yield f"docs/architecture.md: the module '{name}' has no layer"
    for name in sorted(named - there):
        yield f"docs/architecture.md: there is no module '{name}'"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
