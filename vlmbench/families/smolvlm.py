"""SmolVLM: a SigLIP tower over tiles of a picture, pixel shuffle, a small Llama decoder.

Each tile stands in the prompt as that many image tokens between two fake tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from vlmbench import compat
from vlmbench.families import Family, require

MODELS = {
    "smolvlm-tiny": {
        "summary": "2 + 2 layers, width 64, one tile of 16 image tokens, 0.4 M parameters",
        "suite": "default",
        "caches": ["dynamic", "static", "tensor"],
        "why": "the other kinds are measured on llava-tiny, and checked on every family",
    },
    "smolvlm-256m": {
        "summary": "dimensions of HuggingFaceTB/SmolVLM-256M-Instruct, 0.26 B parameters, 17 tiles of 64 image tokens",
        "case": {"dtype": "bfloat16", "cache_length": 2048, "threads": 2},
    },
}

#: Parameters of the published checkpoint (the hub's safetensors metadata).
PUBLISHED = {"smolvlm-256m": 256_484_928}


def _tiny() -> dict[str, Any]:
    return dict(
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
        ),
        text_config=dict(
            model_type="llama",
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            pad_token_id=0,
        ),
        image_token_id=1000,
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _256m() -> dict[str, Any]:
    """Source: https://huggingface.co/HuggingFaceTB/SmolVLM-256M-Instruct/blob/main/config.json (its model_type
    is idefics3, the same architecture) and config.json of HuggingFaceTB/SmolLM2-135M for the decoder."""
    return dict(
        vision_config=dict(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            image_size=512,
            patch_size=16,
        ),
        text_config=dict(
            model_type="llama",
            vocab_size=49280,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100000.0,
            tie_word_embeddings=False,
            pad_token_id=2,
        ),
        image_token_id=49190,
        scale_factor=4,
        tie_word_embeddings=False,
    )


_CONFIGS: dict[str, Any] = {"smolvlm-tiny": _tiny, "smolvlm-256m": _256m}
#: Image-processor settings: the tiny model sees one tile; the published one splits (its preprocessor_config.json).
_PROCESSORS: dict[str, Any] = {
    "smolvlm-tiny": dict(do_image_splitting=False, size={"longest_edge": 64}, max_image_size={"longest_edge": 64}),
    "smolvlm-256m": dict(do_image_splitting=True, size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
}


class SmolVLM(Family):
    """SmolVLMForConditionalGeneration."""

    name = "smolvlm"
    model_class = "SmolVLMForConditionalGeneration"
    processor_stem = "SmolVLM"
    image_inputs = ("pixel_values", "pixel_attention_mask")

    def config(self, model: str) -> Any:
        """The transformers configuration of one of the models above."""
        return compat.model_class("SmolVLMConfig")(**require(_CONFIGS, model)())

    def image_processor(self, model: str) -> Any:
        """SmolVLM's processor with the model's tile size."""
        return compat.image_processor_class(self.processor_stem)(**require(_PROCESSORS, model))

    def pixels(self, processor: Any, rows: list[list[Any]]) -> dict[str, torch.Tensor]:
        """Tiles [B, T, 3, H, W] and their mask [B, T, H, W]; this processor takes a list a row."""
        return {**processor(images=rows, return_tensors="pt")}

    def placeholders(self, config: Any, pixels: dict[str, torch.Tensor], row: int, images: int) -> list[int]:
        """For every tile: fake token, image tokens, and a fake token at the end."""
        tiles = pixels["pixel_values"].shape[1]
        side = config.vision_config.image_size // config.vision_config.patch_size
        fake = config.image_token_id - 1
        tile = [fake] + [config.image_token_id] * (side**2 // config.scale_factor**2)
        return tile * tiles + [fake]

    def text_range(self, config: Any) -> tuple[int, int]:
        """Below the special ids, which end with the fake token and the image token."""
        return 3, config.image_token_id - 190


FAMILY = SmolVLM()
