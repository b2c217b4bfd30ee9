"""Phases: what is timed, as steps. `reset()` outside the clock, `run()` inside it, none by subtraction.

A `Session` is one case made ready: model, prompt on the device, cache kind and runner. Its methods
are the domain's verbs; `step(session, phase)` turns them into what a block times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vlmbench import compat
from vlmbench.caches import CacheKind
from vlmbench.compiles import Compiled, Compiles
from vlmbench.errors import UsageError
from vlmbench.families import Family, Loaded
from vlmbench.meters import Device
from vlmbench.runners import RUNNERS, eager
from vlmbench.schema import Case

#: Calls after which a compiled step has settled: one compiles, a growing cache recompiles at the
#: second, a CUDA graph is recorded at the second and third.
SETTLED = 4


@dataclass
class Step:
    """What is timed: `reset()` outside the clock, `run()` inside it."""

    reset: Callable[[], None]
    run: Callable[[], Any]


@dataclass
class GenerateFacts:
    """What generate() did: whether it decided to compile, and the class of the cache it used."""

    compiled: bool
    cache_class: str


class Session:
    """One case on one device. Raises UsageError when prompt and new tokens do not fit the cache."""

    def __init__(
        self, case: Case, family: Family, loaded: Loaded, kind: CacheKind, device: Device, compiles: Compiles
    ) -> None:
        self.case, self.family, self.kind, self.device = case, family, kind, device
        self.model = loaded.model
        self.facts = dict(loaded.facts)
        self.network = family.network(self.model)
        self.arguments = compat.Arguments(self.model, self.network)
        self._loaded = loaded
        self.prompt = self.make_prompt(case.prompt_tokens)
        self.length = family.cached_positions(self.prompt)
        need = self.length + case.new_tokens
        if need > case.cache_length:
            raise UsageError(
                f"cache length {case.cache_length} is below prompt + new tokens: {self.length} positions "
                f"({self.length - case.prompt_tokens} of them for images) + {case.new_tokens}: "
                f"give --cache-length {need} or more"
            )
        self.compiles = compiles
        self.compiling = RUNNERS[case.runner] is not eager
        self.compiled: dict[str, Compiled] = {phase: Compiled() for phase in (*STEPS, "decode")}
        make = RUNNERS[case.runner]
        self.decode_step = make(self._decode_step, case.device, kind.static_shape)
        prefill_runner = make if case.compile_prefill else eager
        self._prefill_step = prefill_runner(self._forward_prompt, case.device, True)
        self._positions: list[torch.Tensor] = []
        self._cache_positions: list[torch.Tensor] = []
        self._carried: dict[str, Any] = {}
        self._cache: Any = None
        self._back: tuple[Callable[[], None], dict[str, Any]] | None = None
        self._first: torch.Tensor | None = None
        #: Whether requests have been timed.
        self.served = False
        #: Logits [B, V] that `ready()` got of the prompt.
        self.first_logits: torch.Tensor | None = None

    # --- making things ---

    def make_prompt(self, text: int) -> dict[str, torch.Tensor]:
        """Prefill arguments with `text` text tokens, on the device, pixels in the model's dtype."""
        made = self._loaded.prompt(self.case, text)
        moved = {}
        for name, value in made.items():
            value = value.to(self.model.device)
            moved[name] = value.to(self.model.dtype) if value.is_floating_point() else value
        return moved

    def new_cache(self) -> Any:
        """A fresh cache of the case's kind and length."""
        return self.kind.new(self.model, self.case, self.case.cache_length)

    # --- forwards ---

    def _forward_prompt(
        self, prompt: dict[str, torch.Tensor], cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        out = self.family.run_prompt(
            self.model,
            self.arguments.accepted(prompt),
            **{self.arguments.cache: cache},
            **self.arguments.last_logits(),
            use_cache=True,
        )
        logits = out.logits[:, -1]  # [B, V]
        return logits.argmax(-1, keepdim=True), logits, self.family.carried(self.model, prompt, out)

    def _decode_step(
        self,
        token: torch.Tensor,  # [B, 1]
        cache: Any,
        position: torch.Tensor,
        cache_position: torch.Tensor | None,
        **carried: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        extra = {} if cache_position is None else {"cache_position": cache_position}
        out = self.family.run_step(
            self.model, token, position, **{self.arguments.cache: cache}, use_cache=True, **carried, **extra
        )
        logits = out.logits[:, -1]  # [B, V]
        return logits.argmax(-1, keepdim=True), logits

    @torch.no_grad()
    def prefill(self, cache: Any, prompt: dict[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill `cache` with the prompt; first token [B, 1] and its logits [B, V]."""
        token, logits, self._carried = self._prefill_step(prompt or self.prompt, cache)
        return token, logits

    @torch.no_grad()
    def decode(self, token: torch.Tensor, cache: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Step `i` behind the prompt: next token [B, 1] and its logits [B, V]."""
        return self.decode_step(token, cache, self._positions[i], self._cache_positions[i], **self._carried)

    @torch.no_grad()
    def forward_whole(self, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits [B, S, V] of a forward over the whole sequence without any cache, eager: the root reference."""
        return self.family.run_prompt(self.model, self.arguments.accepted(prompt), use_cache=False).logits

    @torch.no_grad()
    def features(self) -> Any:
        """Image features of the prompt's pictures."""
        return self.family.features(self.model, self.prompt)

    @torch.no_grad()
    def generate(self, new_tokens: int | None = None, prompt: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Tokens [B, T] that the model's own generate() appends, greedily, with a cache of the case's kind."""
        prompt = prompt or self.prompt
        expected = self.kind.expected(self.compiling, "generate")
        config = compat.generation_config(
            self.network, new_tokens or self.case.new_tokens, expected.compiled, self.case.device
        )
        return self.family.run_generate(
            self.model,
            self.arguments.accepted(prompt),
            generation_config=config,
            **self.kind.generate_arguments(self.model, self.case, self.arguments),
        )

    # --- a cache that stays, for blocks ---

    @torch.no_grad()
    def ready(self) -> None:
        """Prefill the session's own cache once; its decode steps' positions follow from the prompt."""
        if self._cache is None:
            self._cache = self.new_cache()
            self._first, self.first_logits = self.prefill(self._cache)
            self._back = self.kind.mark(self._cache, self.length), self._carried
            self.take("prefill")
            self.plan()
        else:
            self.go_back()

    def go_back(self) -> None:
        """Set the session's own cache back to where its prefill left it."""
        assert self._back is not None
        back, self._carried = self._back
        back()

    def plan(self) -> None:
        """Position arguments of every decode step, made once: making them is not the cache's cost."""
        steps = self.case.new_tokens
        self._positions = self.family.positions(self.model, self.prompt, steps)
        if self.arguments.cache_position:
            where = torch.arange(self.length, self.length + steps, device=self.model.device)
            self._cache_positions = list(where.split(1))
        else:
            self._cache_positions = [None] * steps  # type: ignore[list-item]

    @property
    def first(self) -> torch.Tensor:
        """First token [B, 1] of the session's own cache; `ready()` comes before."""
        assert self._first is not None
        return self._first

    @property
    def cache(self) -> Any:
        """The session's own cache; `ready()` comes before."""
        return self._cache

    def take(self, phase: str) -> Compiled:
        """Book what was compiled since the last call under `phase`: called behind each piece of work."""
        self.compiles.take(self.compiled[phase])
        return self.compiled[phase]


def _empty(session: Session) -> None:
    session.ready()
    session.kind.empty(session.cache)


def _nothing() -> None:
    return None


#: Phases of single runs; `decode` is a loop and has blocks of its own.
STEPS: dict[str, Callable[[Session], Step]] = {
    "vision": lambda s: Step(_nothing, s.features),
    "prefill": lambda s: Step(lambda: _empty(s), lambda: s.prefill(s.cache)),
    "generate": lambda s: Step(_nothing, s.generate),
}


def time_steps(session: Session, phase: str, repeats: int) -> list[float]:
    """Seconds of `repeats` runs of a phase; `reset()` happens between the clocks."""
    step = STEPS[phase](session)
    seconds = []
    for _ in range(repeats):
        step.reset()
        marks = [session.device.mark()]
        output = step.run()
        marks.append(session.device.mark())
        seconds += session.device.seconds(marks)
        del output
    return seconds


@torch.no_grad()
def time_decode(session: Session, blocks: int) -> list[float]:
    """Seconds of every step of `blocks` runs of all new tokens; the token stays on the device.

    A few steps go before each block untimed: collecting garbage and moving to another core have left
    the processor's caches cold, which a token in the middle of an answer never meets.
    """
    seconds: list[float] = []
    device, step = session.device, session.decode_step
    session.ready()
    cache = session.cache
    positions = list(zip(session._positions, session._cache_positions, strict=True))
    carried = session._carried
    for _ in range(blocks):
        session.ready()
        token = session.first
        for position, cache_position in positions[:SETTLED]:
            token, _ = step(token, cache, position, cache_position, **carried)
        session.ready()
        token = session.first
        marks = [device.mark()]
        for position, cache_position in positions:
            token, _ = step(token, cache, position, cache_position, **carried)
            marks.append(device.mark())
        seconds += device.seconds(marks)
    return seconds


def time_compile(session: Session, calls: int) -> list[float]:
    """Seconds of the first `calls` calls of the compiled decode step, behind an eager prefill.

    The compiler is imported before: that second is no property of a cache. Behind requests it has been
    used, too, whether or not those requests compiled, so that a warm compile is comparable between kinds.
    """
    session.compiles.load_compiler()
    if session.served:
        session.compiles.exercise()
    session.ready()
    token = session.first
    seconds = []
    for i in range(min(calls, session.case.new_tokens)):
        marks = [session.device.mark()]
        token, _ = session.decode(token, session.cache, i)
        marks.append(session.device.mark())
        seconds += session.device.seconds(marks)
    return seconds


def time_requests(session: Session, calls: int) -> list[float]:
    """Seconds of the first `calls` calls of generate(): every second one with half the text and half the tokens."""
    case = session.case
    short = session.make_prompt(max(1, case.prompt_tokens // 2))
    session.served = True
    seconds = []
    for i in range(calls):
        marks = [session.device.mark()]
        output = session.generate(max(1, case.new_tokens // 2), short) if i % 2 else session.generate()
        marks.append(session.device.mark())
        seconds += session.device.seconds(marks)
        del output
    return seconds


def observe_generate(session: Session) -> tuple[torch.Tensor, GenerateFacts]:
    """One generate() with what it really did: tokens [B, T] and facts."""
    with compat.watch_generate(session.network, session.arguments) as seen:
        tokens = session.generate()
    return tokens, GenerateFacts(seen.compiled, seen.cache_class)
