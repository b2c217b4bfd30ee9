"""Real checkpoints: a local folder or a hub id, with its own processor and chat template.

Where AutoProcessor cannot load (no torchvision, no num2words), tokenizer and PIL image processor are
put together here, and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from vlmbench import compat, inputs, kinds
from vlmbench.errors import UsageError
from vlmbench.schema import Case

if TYPE_CHECKING:
    from vlmbench.families import Family, Loaded


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def config(where: str) -> Any:
    """The checkpoint's configuration. Raises UsageError for a missing, gated or empty one."""
    kinds.check_checkpoint(where)
    try:
        return AutoConfig.from_pretrained(where)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"checkpoint '{where}' cannot be loaded ({_first_line(error)}): check the name, your access to it, "
            "and that it is downloaded if the hub cannot be reached"
        ) from None


def load(family: Family, case: Case, dtype: torch.dtype) -> Loaded:
    """Model and prompts of `case.checkpoint`. Raises UsageError where it is none of ours."""
    from vlmbench.families import Loaded

    config(case.checkpoint)
    try:
        model = compat.from_pretrained(AutoModelForImageTextToText, case.checkpoint, dtype, case.attention)
    except (OSError, ValueError) as error:
        raise UsageError(f"checkpoint '{case.checkpoint}' cannot be loaded ({_first_line(error)})") from None
    model.eval()
    try:
        processor = AutoProcessor.from_pretrained(case.checkpoint)
        if not hasattr(processor, "image_processor"):
            raise ValueError(f"{type(processor).__name__} has no image processor")
        how = f"AutoProcessor: {type(processor).__name__}"
        make: Callable[[Case, int], dict[str, torch.Tensor]] = _Processed(processor)
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        tokenizer, pictures = _parts(family, case.checkpoint)
        how = (
            f"put together from {type(tokenizer).__name__} and {type(pictures).__name__}, "
            f"since AutoProcessor fails: {_first_line(error)}"
        )
        make = _Assembled(family, model.config, tokenizer, pictures)
    return Loaded(model, make, {"weights": case.checkpoint, "processor": how})


def _parts(family: Family, where: str) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        return tokenizer, compat.image_processor_class(family.processor_stem).from_pretrained(where)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"checkpoint '{where}' has no usable tokenizer and image processor ({_first_line(error)}): "
            "save the processor into the folder too"
        ) from None


def _words(tokenizer: Any, count: int) -> str:
    """Text of `count` tokens of this tokenizer, as near as decoding and encoding again lets it be."""
    ids = tokenizer(inputs.QUESTION, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UsageError("the checkpoint's tokenizer makes no tokens of plain English text")
    return tokenizer.decode((ids * (count // len(ids) + 1))[:count])


class _Processed:
    """Prompts by the checkpoint's own processor and, where it has one, its chat template."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, case: Case, text: int) -> dict[str, torch.Tensor]:
        words = _words(self.processor.tokenizer, text)
        if getattr(self.processor, "chat_template", None):
            content = [{"type": "image"}] * case.images + [{"type": "text", "text": words}]
            prompt = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        else:
            prompt = getattr(self.processor, "image_token", "<image>") * case.images + words
        rows = inputs.pictures(case.image, case.batch, case.images)
        images = {"images": rows} if case.images else {}
        made = self.processor(text=[prompt] * case.batch, return_tensors="pt", **images)
        # Rows are equally long, so that the mask says nothing; generate() gets one of its own.
        return {name: value for name, value in made.items() if name != "attention_mask"}


class _Assembled:
    """Prompts from the tokenizer and the image processor alone, laid out as for random weights."""

    def __init__(self, family: Family, config: Any, tokenizer: Any, pictures: Any) -> None:
        self.family, self.config, self.tokenizer, self.pictures = family, config, tokenizer, pictures

    def __call__(self, case: Case, text: int) -> dict[str, torch.Tensor]:
        words = self.tokenizer(_words(self.tokenizer, text), add_special_tokens=False)["input_ids"]
        return self.family.lay_out(case, self.config, self.pictures, [words] * case.batch)
