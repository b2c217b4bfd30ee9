"""Sessions in the test's own process: a case made ready without a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch

from vlmbench import compat, kinds, meters
from vlmbench.compiles import Compiles
from vlmbench.families import Loaded
from vlmbench.phases import Session
from vlmbench.schema import Case

compat.quiet()
torch.set_num_threads(1)


@cache
def _loaded(model: str, dtype: str, attention: str) -> tuple[Any, Loaded]:
    case = kinds.make_case(model, "dynamic", "eager", dtype=dtype, attention=attention)
    family = kinds.load("family", kinds.models()[model].family).FAMILY
    loaded = family.load(case, getattr(torch, dtype))
    meters.settle()
    return family, loaded


def open_session(case: Case) -> Session:
    """A session of `case`; models are shared between tests."""
    family, loaded = _loaded(case.model, case.dtype, case.attention)
    return Session(case, family, loaded, kinds.load("cache", case.cache).KIND, meters.Cpu(), Compiles())


@contextlib.contextmanager
def capture_only() -> Iterator[None]:
    """Compile with a backend that captures graphs and runs them eagerly: all of Dynamo, no inductor."""
    torch._dynamo.reset()

    def with_backend(device: str, dynamic: bool | None) -> dict[str, Any]:
        return {"fullgraph": False, "backend": "eager", "dynamic": dynamic}

    with mock.patch.object(compat, "compile_options", with_backend):
        yield
    torch._dynamo.reset()
