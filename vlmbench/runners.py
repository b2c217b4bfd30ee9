"""Runners: how a step is run. `eager` op by op, `compile` through torch.compile as generate() does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlmbench import compat

Step = Callable[..., Any]


def eager(step: Step, device: str, static_shape: bool) -> Step:
    """The step as it is."""
    return step


def compiled(step: Step, device: str, static_shape: bool) -> Step:
    """The step compiled: with a static shape, or letting Dynamo find out what changes.

    Graph breaks are allowed and counted, not raised: how many there are is a result.
    """
    options = compat.compile_options(device, dynamic=False if static_shape else None)
    fast = torch.compile(step, **options)
    if options.get("mode") != "reduce-overhead":
        return fast

    def copied(*args: Any, **kwargs: Any) -> Any:
        # A CUDA graph's output lives in its pool until the next replay, and the next step reads it.
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(t.clone() for t in fast(*args, **kwargs))

    return copied


RUNNERS: dict[str, Callable[[Step, str, bool], Step]] = {"eager": eager, "compile": compiled}
