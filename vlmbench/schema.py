"""Case and Record, and the one JSON line they travel and rest in.

A line is an envelope (schema, protocol, kind, run, subject, commit, machine, case id, pair, checksum)
around a payload. Lines are appended with fsync to a ledger; whatever is read back is untrusted:
bounded in size, checked, never evaluated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vlmbench.errors import UsageError

#: Shape of the envelope and of the records. A reader refuses lines of a newer schema.
SCHEMA = 1
#: What is measured and how. Raised whenever a changed protocol makes old numbers incomparable; it is
#: also the `version` of every asv benchmark.
PROTOCOL = "1"
#: Largest line accepted or written, in bytes.
MAX_LINE = 20_000

Status = Literal["ok", "unsupported", "broken"]


@dataclass(frozen=True)
class Case:
    """What to measure: model × cache kind × runner, and the workload. Hashable, JSON both ways.

    `prompt_tokens` counts text tokens; the image tokens come on top and are the model's to say.
    `cache_length` is the capacity of caches that have one. `image` is a path, empty for the
    photograph in the package; `checkpoint` a local folder or hub id, empty for random weights.
    `format` is what the runner `export` writes, empty for its default and for other runners.
    """

    model: str
    cache: str
    runner: str
    batch: int = 1
    images: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 32
    cache_length: int = 128
    dtype: str = "float32"
    attention: str = "sdpa"
    device: str = "cpu"
    threads: int = 1
    compile_prefill: bool = False
    format: str = ""
    image: str = ""
    checkpoint: str = ""

    @property
    def id(self) -> str:
        """Stable name: `model/cache/runner` and every field that is not at its default.

        A new field with a default changes no existing name, so history goes on. Of an image only
        the file's name counts, as its folder differs between machines.
        """
        extra = []
        for f in fields(self)[3:]:
            value = getattr(self, f.name)
            if value != f.default:
                shown = Path(value).name if f.name == "image" else value
                extra.append(f"+{f.name}={shown}")
        return f"{self.model}/{self.cache}/{self.runner}" + "".join(extra)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case in `data`; unknown fields are left out (an older reader meets a newer line).

        Raises UsageError if a field is missing or has the wrong type.
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name not in data:
                if f.default is dataclasses.MISSING:
                    raise UsageError(f"case without '{f.name}'")
                continue
            want = {"str": str, "int": int, "bool": bool}[str(f.type)]
            if type(data[f.name]) is not want:
                raise UsageError(f"case field '{f.name}' is {data[f.name]!r}, expected {f.type}")
            values[f.name] = data[f.name]
        case = cls(**values)
        case.validate()
        return case

    def validate(self) -> None:
        """Raise UsageError for values no case can have; needs no model."""
        for name in ("batch", "prompt_tokens", "new_tokens", "cache_length", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}: it must be at least 1")
        if self.images < 0:
            raise UsageError(f"images is {self.images}: it must be at least 0")
        need = self.prompt_tokens + self.new_tokens
        if self.cache_length < need:
            raise UsageError(
                f"cache length {self.cache_length} is below prompt + new tokens ({self.prompt_tokens} + "
                f"{self.new_tokens}, image tokens on top): give --cache-length at least {need} plus the image tokens"
            )


@dataclass(frozen=True)
class Check:
    """One proof: what it was checked against, the tolerance, and the largest error found."""

    name: str
    passed: bool
    reference: str
    tolerance: float | None = None
    error: float | None = None
    step: int | None = None
    detail: str = ""


@dataclass
class Record:
    """Everything measured for one case.

    `metrics` maps a metric key to `{"unit", "value", "samples"}`, samples being one value a fresh
    process for seconds. `raw` holds within-process samples by process; `facts` what was asked for
    and observed; `proof` a few teacher-forced logits with the hashes of weights and inputs.
    """

    case: Case
    status: Status
    reason: str = ""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    raw: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    protocol: str = PROTOCOL

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; not a dataclass dump, so that the case stays first."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["case"] = self.case.to_json()
        return clean(data)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The record in `data`. Raises UsageError when the shape is wrong."""
        status = data.get("status")
        if status not in ("ok", "unsupported", "broken"):
            raise UsageError(f"record with status {status!r}")
        shapes = {"reason": str, "protocol": str, "checks": list, "raw": list}
        values: dict[str, Any] = {}
        for f in fields(cls)[2:]:
            value = data.get(f.name, shapes.get(f.name, dict)())
            if not isinstance(value, shapes.get(f.name, dict)):
                raise UsageError(f"record field '{f.name}' is not a {shapes.get(f.name, dict).__name__}")
            values[f.name] = value
        case = data.get("case")
        if not isinstance(case, Mapping):
            raise UsageError("record without a case")
        return cls(case=Case.from_json(case), status=status, **values)


@dataclass(frozen=True)
class Envelope:
    """Where and when a line was made. `pair` is empty outside paired measurements."""

    kind: str
    run: str
    subject: str
    commit: str
    machine: str
    case: str
    pair: str = ""


def clean(value: Any) -> Any:
    """`value` with non-finite floats as None and everything unknown as text, so that JSON is strict."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(v) for v in value]
    return str(value)


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encode_line(envelope: Envelope, payload: Mapping[str, Any]) -> str:
    """One JSON line, checksum included, without the newline.

    Raises UsageError above MAX_LINE: a record that large is a defect of what filled it.
    """
    body = {"schema": SCHEMA, "protocol": PROTOCOL, **dataclasses.asdict(envelope), "payload": clean(payload)}
    body["checksum"] = _checksum(body)
    line = json.dumps(body, separators=(",", ":"), allow_nan=False)
    if len(line.encode()) > MAX_LINE:
        raise UsageError(f"a {envelope.kind} line of {len(line.encode())} bytes exceeds {MAX_LINE}")
    return line


def decode_line(line: str | bytes) -> tuple[Envelope, dict[str, Any]]:
    """Envelope and payload of one line. Raises UsageError for anything damaged, newer or too large."""
    if len(line) > MAX_LINE:
        raise UsageError(f"a line of {len(line)} bytes exceeds {MAX_LINE}")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a JSON line ({error})") from None
    if not isinstance(body, dict) or not isinstance(body.get("payload"), dict):
        raise UsageError("not an envelope with a payload")
    if body.get("schema") != SCHEMA:
        raise UsageError(f"schema {body.get('schema')!r}: this version reads {SCHEMA}")
    given = body.pop("checksum", None)
    try:
        if given != _checksum(body):
            raise UsageError("checksum does not match")
    except ValueError:
        raise UsageError("not strict JSON") from None
    names = [f.name for f in fields(Envelope)]
    if not all(isinstance(body.get(name), str) for name in names):
        raise UsageError("envelope field missing or not text")
    return Envelope(**{name: body[name] for name in names}), body["payload"]


def append_line(path: Path, line: str) -> None:
    """Append one line and fsync, so that a crash costs at most the line being written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One write of one line in append mode: two processes cannot interleave inside it.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[tuple[int, Envelope | None, dict[str, Any] | str]]:
    """Every line of a ledger as (number, envelope, payload), or (number, None, reason) if damaged.

    The last line may be cut off by a crash; it is reported like any other damaged one.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 2):
            number += 1
            if not line.endswith(b"\n") and len(line) > MAX_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
                yield number, None, f"longer than {MAX_LINE} bytes"
                continue
            if not line.strip():
                continue
            try:
                envelope, payload = decode_line(line.strip())
            except (UsageError, UnicodeDecodeError) as error:
                yield number, None, str(error)
            else:
                yield number, envelope, payload


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's text so that a reader sees the old or the new one, never half (fsync, rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
