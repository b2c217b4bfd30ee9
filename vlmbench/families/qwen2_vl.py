"""Qwen2-VL: patches of any resolution, merged 2 x 2, with three-dimensional rotary positions.

A picture moves the text positions behind it (`rope_deltas`, kept on the model after a prefill), so a
decode step's position is not the length of the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from vlmbench import compat
from vlmbench.families import Family, require

MODELS = {
    "qwen2_vl-tiny": {
        "summary": "2 + 2 layers, width 64, 16 image tokens, 0.4 M parameters",
        "suite": "default",
        "caches": ["dynamic", "static", "tensor"],
        "why": "the other kinds are measured on llava-tiny, and checked on every family",
    },
    "qwen2-vl-2b": {
        "summary": "dimensions of Qwen/Qwen2-VL-2B-Instruct, 2.21 B parameters, 324 image tokens for 512 x 512",
        "case": {"dtype": "bfloat16", "cache_length": 1024, "threads": 2},
    },
}

#: Parameters of the published checkpoint, tied embeddings once.
PUBLISHED = {"qwen2-vl-2b": 2_208_985_600}


def _tiny() -> dict[str, Any]:
    return dict(
        vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2, patch_size=14),
        text_config=dict(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        image_token_id=1000,
        video_token_id=1001,
        vision_start_token_id=1002,
        vision_end_token_id=1003,
        tie_word_embeddings=False,
    )


def _2b() -> dict[str, Any]:
    """Source: https://huggingface.co/Qwen/Qwen2-VL-2B-Instruct/blob/main/config.json."""
    return dict(
        vision_config=dict(depth=32, embed_dim=1280, hidden_size=1536, num_heads=16, mlp_ratio=4, patch_size=14),
        text_config=dict(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            use_sliding_window=False,
            max_window_layers=28,
            tie_word_embeddings=True,
        ),
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        tie_word_embeddings=True,
    )


_CONFIGS: dict[str, Any] = {"qwen2_vl-tiny": _tiny, "qwen2-vl-2b": _2b}
#: Most pixels a picture is shrunk to: 8 x 8 patches of 14 for the tiny model; the published setting
#: (preprocessor_config.json) lets a picture be as large as it is.
_MAX_PIXELS = {"qwen2_vl-tiny": 112 * 112, "qwen2-vl-2b": 12_845_056}


class Qwen2VL(Family):
    """Qwen2VLForConditionalGeneration."""

    name = "qwen2_vl"
    model_class = "Qwen2VLForConditionalGeneration"
    processor_stem = "Qwen2VL"
    image_inputs = ("pixel_values", "image_grid_thw")

    def config(self, model: str) -> Any:
        """The transformers configuration of one of the models above."""
        return compat.model_class("Qwen2VLConfig")(**require(_CONFIGS, model)())

    def image_processor(self, model: str) -> Any:
        """Qwen2-VL's processor with the model's limit of pixels."""
        return compat.image_processor_class(self.processor_stem)(
            min_pixels=56 * 56, max_pixels=require(_MAX_PIXELS, model)
        )

    def placeholders(self, config: Any, pixels: dict[str, torch.Tensor], row: int, images: int) -> list[int]:
        """Start, one id for each merged group of patches, end, for every picture."""
        grids = pixels["image_grid_thw"][row * images : (row + 1) * images]
        merge = config.vision_config.spatial_merge_size**2
        ids: list[int] = []
        for grid in grids:
            ids += [config.vision_start_token_id]
            ids += [config.image_token_id] * (int(grid.prod()) // merge)
            ids += [config.vision_end_token_id]
        return ids

    def text_range(self, config: Any) -> tuple[int, int]:
        """Below the ids of the picture's markers and of the chat's."""
        return 3, min(config.vision_start_token_id, config.image_token_id) - 16

    def token_types(self, config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """1 where an image token stands: releases from 5.0 compute the three-dimensional positions from it."""
        return {"mm_token_type_ids": (ids == config.image_token_id).int()}

    def positions(self, model: Any, prompt: dict[str, torch.Tensor], steps: int) -> list[torch.Tensor]:
        """Position ids [3, B, 1] a step: the prompt's length, shifted by what the prefill's picture saved.

        A prompt without a picture leaves the shift of the one before on the model, so it must not be read.
        """
        batch, start = prompt["input_ids"].shape
        shift = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
        if "image_grid_thw" in prompt:
            shift = model.model.rope_deltas
        return [(shift + start + i).expand(3, batch, 1).contiguous() for i in range(steps)]


FAMILY = Qwen2VL()
