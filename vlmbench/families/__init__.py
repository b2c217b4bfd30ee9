"""Families: one VLM architecture a file, named by its transformers `model_type`.

A family file holds the literal `MODELS` (its sizes, read without importing it) and a `FAMILY`
object of a subclass of `Family`. Adding a file adds its models everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vlmbench import compat, inputs, weights
from vlmbench.errors import Unsupported, UsageError
from vlmbench.schema import Case

#: Seed of a row's text; rows and the parts of a prompt get different numbers.
_SEED = 7


@dataclass(frozen=True)
class Loaded:
    """A model and how its prompts are made: `prompt(case, text tokens)` gives a prefill's arguments."""

    model: Any
    prompt: Callable[[Case, int], dict[str, torch.Tensor]]
    facts: dict[str, Any]


class Family:
    """What differs between architectures. The base class fits a LLaVA-like model.

    `model_class` names the transformers class, `processor_stem` its image processor without the
    ending "ImageProcessor…", `image_inputs` the pixel arguments that both `get_image_features` and
    `forward` take.
    """

    name: str
    model_class: str
    processor_stem: str
    image_inputs: tuple[str, ...] = ("pixel_values",)

    def config(self, model: str) -> Any:
        """The transformers configuration of one of the family's models."""
        raise KeyError(model)

    def image_processor(self, model: str) -> Any:
        """An image processor for PIL images with that model's settings."""
        raise KeyError(model)

    def image_token(self, config: Any) -> int:
        """Id of the token that image features take the place of."""
        found = getattr(config, "image_token_id", None)
        return config.image_token_index if found is None else found

    def pixels(self, processor: Any, rows: list[list[Any]]) -> dict[str, torch.Tensor]:
        """Pixel arguments for `rows` of pictures: all pictures of all rows, one after the other."""
        return {**processor(images=[image for row in rows for image in row], return_tensors="pt")}

    def placeholders(self, config: Any, pixels: dict[str, torch.Tensor], row: int, images: int) -> list[int]:
        """Ids that stand for the pictures of one row, markers around them included."""
        side = pixels["pixel_values"].shape[-1] // config.vision_config.patch_size
        return [self.image_token(config)] * (images * side * side)

    def text_range(self, config: Any) -> tuple[int, int]:
        """Ids [low, high) of plain text: below every special id of the tiny and the published vocabularies."""
        return 3, min(self.image_token(config), config.get_text_config().vocab_size)

    def token_types(self, config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Further arguments that follow from the prompt's ids, [B, S] each."""
        return {}

    def build(self, case: Case, dtype: torch.dtype) -> Any:
        """The model of `case` with random weights, on the CPU."""
        config = self.config(case.model)
        model = weights.build(compat.model_class(self.model_class), config, dtype, case.attention)
        # Random weights would pick an image token now and then, behind which a picture is expected.
        with torch.no_grad():
            model.get_output_embeddings().weight[self.text_range(config)[1] :] = 0
        return model

    def prompt(self, case: Case, config: Any, processor: Any, text: int) -> dict[str, torch.Tensor]:
        """All arguments of a prefill with `text` made-up text ids a row.

        Raises UsageError for an image that cannot be read.
        """
        low, high = self.text_range(config)
        words = [inputs.text_tokens(text, low, high, _SEED + row) for row in range(case.batch)]
        return self.lay_out(case, config, processor, words)

    def lay_out(self, case: Case, config: Any, processor: Any, words: list[list[int]]) -> dict[str, torch.Tensor]:
        """Prefill arguments: half of a row's `words`, its pictures, the other half; ids [B, S]."""
        rows = inputs.pictures(case.image, case.batch, case.images)
        pixels = self.pixels(processor, rows) if case.images else {}
        ids = []
        for row, text in enumerate(words):
            middle = self.placeholders(config, pixels, row, case.images) if case.images else []
            ids.append(text[: len(text) // 2] + middle + text[len(text) // 2 :])
        input_ids = torch.tensor(ids)  # [B, S]
        return {"input_ids": input_ids, **pixels, **self.token_types(config, input_ids)}

    def extend(self, prompt: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same prompt with text `tokens` [B, T] behind it, for a forward over the whole sequence."""
        longer = dict(prompt)
        longer["input_ids"] = torch.cat([prompt["input_ids"], tokens], dim=-1)
        for name, value in prompt.items():
            if name.endswith("token_type_ids"):
                longer[name] = torch.cat([value, torch.zeros_like(tokens, dtype=value.dtype)], dim=-1)
        return longer

    def other_image(self, prompt: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same prompt with another picture: the pixels negated, shapes and ids unchanged."""
        return {**prompt, "pixel_values": -prompt["pixel_values"]}

    # --- how it runs: the base class fits a decoder whose own forward takes pictures and a cache ---

    def network(self, model: Any) -> Any:
        """The module whose forward takes the cache; its signature says how arguments are called."""
        return model

    def run_prompt(self, model: Any, prompt: dict[str, torch.Tensor], **further: Any) -> Any:
        """Forward over a whole prompt, pictures included; `further` holds the cache and its like."""
        return self.network(model)(**prompt, **further)

    def run_step(self, model: Any, token: torch.Tensor, position: torch.Tensor, **further: Any) -> Any:
        """Forward over one token [B, 1]; `further` holds the cache and what `carried` gave."""
        return self.network(model)(input_ids=token, position_ids=position, **further)

    def carried(self, model: Any, prompt: dict[str, torch.Tensor], output: Any) -> dict[str, Any]:
        """Further arguments of every decode step that follow from the prompt's forward `output`."""
        return {}

    def run_generate(self, model: Any, prompt: dict[str, torch.Tensor], **further: Any) -> torch.Tensor:
        """Tokens [B, T] that the model's own generate() appends to a prompt."""
        out = model.generate(**prompt, attention_mask=torch.ones_like(prompt["input_ids"]), **further)
        return out[:, prompt["input_ids"].shape[1] :]

    def cached_positions(self, prompt: dict[str, torch.Tensor]) -> int:
        """Positions that a self-attention layer holds after the prefill of `prompt`."""
        return prompt["input_ids"].shape[1]

    def features(self, model: Any, prompt: dict[str, torch.Tensor]) -> Any:
        """Image features of the prompt's pictures: the phase `vision`."""
        return model.get_image_features(**{name: prompt[name] for name in self.image_inputs if name in prompt})

    def positions(self, model: Any, prompt: dict[str, torch.Tensor], steps: int) -> list[torch.Tensor]:
        """Position ids of the decode steps behind `prompt`, one tensor [B, 1] a step.

        Called after its prefill, whose picture may shift the positions (see qwen2_vl).
        """
        batch, start = prompt["input_ids"].shape
        return [torch.full((batch, 1), start + i, dtype=torch.long, device=model.device) for i in range(steps)]

    def load(self, case: Case, dtype: torch.dtype) -> Loaded:
        """The model of `case` on the CPU and what makes its prompts.

        Raises UsageError with one sentence where a checkpoint cannot be used, Unsupported where the
        release or the attention implementation is missing.
        """
        if case.checkpoint:
            from vlmbench.families import _checkpoint

            return _checkpoint.load(self, case, dtype)
        try:
            processor = self.image_processor(case.model)
        except ImportError as error:
            # Some releases' PIL processors ask for torchvision all the same (SmolVLM's in 5.17).
            raise Unsupported(str(error).strip().split(". ")[0]) from None
        model = self.build(case, dtype)
        return Loaded(
            model,
            lambda of, text: self.prompt(of, model.config, processor, text),
            {"weights": "random", "processor": type(processor).__name__},
        )


def require(settings: dict[str, Any], model: str) -> Any:
    """`settings[model]`. Raises UsageError for a model the family does not have."""
    if model not in settings:
        raise UsageError(f"unknown model '{model}': this family has {', '.join(settings)}")
    return settings[model]
