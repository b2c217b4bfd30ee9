"""The proofs: a number is published only with the evidence that what was timed computes the right thing.

The root reference is a forward over the whole sequence without any cache, same weights, eager. Every
cache, the dynamic one too, is held against it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from vlmbench import compat, inputs, phases, weights
from vlmbench.phases import Session
from vlmbench.schema import Check

#: Largest error allowed, as a share of the largest reference logit. Measured on a CPU over all tiny models
#: and caches: 1e-6 in float32, 0.008 in bfloat16, 0.002 in float16; 0.013 for the 0.5 B model in bfloat16.
#: Deeper models add rounding, another device sums in another order: hence five times that and more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}

#: Teacher-forced decode steps compared with the reference.
STEPS = 12
#: Rows and columns of teacher-forced logits kept in the record.
_KEPT_ROWS, _KEPT_COLUMNS = 4, 16

ROOT = "forward over the whole sequence without a cache, eager"


@torch.no_grad()
def run(session: Session) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """All checks of a case, the proof kept in its record, and facts asked for and observed."""
    case = session.case
    tolerance = TOLERANCE[case.dtype]
    steps = min(STEPS, case.new_tokens)
    low, high = session.family.text_range(session.model.config)
    words = [inputs.text_tokens(steps, low, high, 1000 + row) for row in range(case.batch)]
    teacher = torch.tensor(words, device=session.model.device)  # [B, T]

    longer = session.family.extend(session.prompt, teacher)
    whole = session.forward_whole(longer)[:, session.length - 1 :].float()  # [B, T + 1, V]
    other = _other_image(session) if case.images else None
    session.ready()
    forced = _teacher_forced(session, session.first_logits, teacher)
    session.kind.empty(session.cache)
    _, logits = session.prefill(session.cache)
    session.take("prefill")
    again = _teacher_forced(session, logits, teacher)
    # From the narrowest cause to the widest: the first that fails is the record's reason.
    checks = [_finite(forced)]
    if other is not None:
        checks.append(_image(forced[:, 0], other, tolerance))
    checks.append(_equal("reference", whole, forced, tolerance, ROOT))
    checks.append(_equal("repeat", forced, again, tolerance, "the same steps before"))

    tokens, seen = phases.observe_generate(session)
    session.take("generate")
    checks.append(_greedy(session, tokens, tolerance))
    asked, observed = _facts(session, seen)
    checks += _asked(session, asked, observed)
    proof = {
        "rows": [[round(v, 6) for v in row] for row in _sample(forced)],
        "tokens": tokens[0].tolist()[:64],
        "weights": weights.fingerprint(session.model),
        "inputs": inputs.fingerprint(
            (name, value.float() if value.dtype == torch.bfloat16 else value) for name, value in longer.items()
        ),
    }
    return [asdict(check) for check in checks], proof, {"asked": asked, "observed": observed}


def _teacher_forced(session: Session, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Logits [B, T + 1, V]: those of the prefill just made, then of one decode step for each given token."""
    rows = [logits.float()]
    for i in range(teacher.shape[1]):
        # A clone has the strides of a token that a step returned; contiguous() would keep the row's.
        token = teacher[:, i : i + 1].clone(memory_format=torch.contiguous_format)
        _, logits = session.decode(token, session.cache, i)
        rows.append(logits.float().clone())
    session.take("decode")
    return torch.stack(rows, dim=1)


def _equal(name: str, want: torch.Tensor, got: torch.Tensor, tolerance: float, reference: str) -> Check:
    """Largest difference as a share of the largest reference logit, and the tokens the two pick.

    A token counts as different only where the reference prefers its own by more than the tolerance:
    bfloat16 has exact ties.
    """
    scale = want.abs().max().item() or 1.0
    difference = (want - got).abs().amax(dim=(0, 2)) / scale  # [T + 1]
    error, step = difference.max(0)
    if not torch.isfinite(got).all():
        return Check(name, False, reference, tolerance, None, None, "logits are not finite")
    wrong = _wrong_tokens(want, got.argmax(-1), tolerance * scale)
    passed = error.item() <= tolerance and not wrong
    detail = ""
    if not passed:
        detail = f"largest error {error.item():.3g} of the largest logit at step {step.item()}, tolerance {tolerance:g}"
        if wrong:
            detail += f"; token differs first at step {wrong[0]}"
    return Check(name, passed, reference, tolerance, error.item(), int(step), detail)


def _wrong_tokens(want: torch.Tensor, tokens: torch.Tensor, margin: float) -> list[int]:
    """Steps at which a token [B, T] is worse than the reference's best [B, T, V] by more than `margin`."""
    best = want.amax(-1)
    chosen = want.gather(-1, tokens[..., None])[..., 0]
    return torch.nonzero(((best - chosen) > margin).any(0))[:, 0].tolist()


def _finite(logits: torch.Tensor) -> Check:
    bad = torch.nonzero(~torch.isfinite(logits).all(-1).all(0))[:, 0].tolist()
    detail = f"NaN or infinity in the logits from step {bad[0]} on" if bad else ""
    return Check("finite", not bad, "no NaN, no infinity", step=bad[0] if bad else None, detail=detail)


def _other_image(session: Session) -> torch.Tensor:
    """First logits [B, V] of the same prompt with another picture, on a cache of its own."""
    _, logits = session.prefill(session.new_cache(), session.family.other_image(session.prompt))
    session.take("prefill")
    return logits.float()


def _image(logits: torch.Tensor, other: torch.Tensor, tolerance: float) -> Check:
    """Another picture must give other logits [B, V], or the picture is not used."""
    change = ((logits - other).abs().max() / logits.abs().max()).item()
    # What no rounding explains: float32's tolerance is above its noise, bfloat16's share is a tenth.
    least = min(tolerance, 6e-3)
    passed = change > least
    detail = "" if passed else f"another picture changes the first logits by {change:.3g} only: it is not used"
    return Check("image", passed, "the same prompt with the pixels negated", least, change, detail=detail)


def _greedy(session: Session, tokens: torch.Tensor, tolerance: float) -> Check:
    """Each token of generate() must be the root reference's best one behind those before it."""
    if tokens.shape[1] != session.case.new_tokens:
        detail = f"generate() made {tokens.shape[1]} tokens, not {session.case.new_tokens}"
        return Check("generate", False, ROOT, tolerance, detail=detail)
    # Behind an image token the reference would want a picture: what came before it is compared.
    image = (tokens == session.family.image_token(session.model.config)).any(0)
    if image.any():
        tokens = tokens[:, : max(1, int(image.int().argmax()))]
    longer = session.family.extend(session.prompt, tokens)
    whole = session.forward_whole(longer)[:, session.length - 1 : -1].float()
    scale = whole.abs().max().item() or 1.0
    wrong = _wrong_tokens(whole, tokens, tolerance * scale)
    worst = ((whole.amax(-1) - whole.gather(-1, tokens[..., None])[..., 0]).max() / scale).item()
    detail = f"token {wrong[0]} of generate() is not the reference's, off by {worst:.3g}" if wrong else ""
    return Check("generate", not wrong, ROOT, tolerance, worst, wrong[0] if wrong else None, detail)


def _facts(session: Session, seen: phases.GenerateFacts) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked for and what ran, under the same names."""
    case, kind = session.case, session.kind
    decode, generate = (kind.expected(session.compiling, phase) for phase in ("decode", "generate"))
    asked: dict[str, Any] = {
        "cache": kind.class_name,
        "attention": case.attention,
        "dtype": case.dtype,
        "device": case.device,
        "decode_compiled": decode.compiled,
        "generate_compiled": generate.compiled,
        "generate_cache": kind.class_name,
    }
    attention = compat.observed_attention(session.model)
    observed: dict[str, Any] = {
        "cache": type(session.cache).__name__,
        "attention": "/".join(sorted(set(attention.values()))),
        "dtype": str(session.model.dtype).removeprefix("torch."),
        "device": session.model.device.type,
        "decode_compiled": session.compiled["decode"].graphs > 0,
        "generate_compiled": seen.compiled and session.compiled["generate"].graphs > 0,
        "generate_cache": seen.cache_class,
    }
    if decode.graphs is not None and decode.compiled:
        asked |= {"decode_graphs": decode.graphs, "decode_graph_breaks": 0}
        observed |= {
            "decode_graphs": session.compiled["decode"].graphs,
            "decode_graph_breaks": session.compiled["decode"].graph_breaks,
        }
    return asked, observed


def _asked(session: Session, asked: dict[str, Any], observed: dict[str, Any]) -> list[Check]:
    """One check: everything observed is what was asked for. transformers replaces things silently."""
    wrong = [
        f"{name}: asked {want}, observed {observed[name]}" for name, want in asked.items() if observed[name] != want
    ]
    reasons = session.compiled["decode"].reasons
    if wrong and reasons:
        wrong.append(f"first reason: {reasons[0]}")
    return [
        Check(
            "asked",
            not wrong,
            "what the case, the cache kind and the runner declare",
            detail="; ".join(wrong),
        )
    ]


def _sample(logits: torch.Tensor) -> list[list[float]]:
    rows = torch.linspace(0, logits.shape[1] - 1, min(_KEPT_ROWS, logits.shape[1])).long()
    columns = torch.linspace(0, logits.shape[2] - 1, _KEPT_COLUMNS).long()
    return logits[0, rows][:, columns].tolist()
