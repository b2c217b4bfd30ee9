"""LLaVA: a CLIP or SigLIP tower, a two-layer projector, a Llama- or Qwen-like decoder.

The picture's patches stand in the prompt as that many image tokens; the mask is causal throughout.
"""

from __future__ import annotations

from typing import Any

from vlmbench import compat
from vlmbench.families import Family, require

MODELS = {
    "llava-tiny": {
        "summary": "2 + 2 layers, width 64, 16 image tokens, 0.3 M parameters",
        "suite": "default",
    },
    "llava-wide-8k": {
        "summary": "2 + 2 layers, 8 key-value heads of 64, cache length 8192: its cache is most of a step's bytes",
        "suite": "default",
        "case": {"cache_length": 8192},
        "caches": ["static", "tensor"],
        "why": "it shows the traffic of a preallocated cache, and only static and tensor preallocate",
    },
    "llava-interleave-qwen-0.5b": {
        "summary": "dimensions of llava-hf/llava-interleave-qwen-0.5b-hf, 0.86 B parameters, 729 image tokens",
        "case": {"dtype": "bfloat16", "cache_length": 1024, "threads": 2},
    },
}

#: Parameters of the published checkpoint, tied embeddings once (reported for the loaded checkpoint at
#: revision 1090956dd1c79bc93ae98dcf395590369435ec91).
PUBLISHED = {"llava-interleave-qwen-0.5b": 864_031_264}


def _tiny_vision(width: int) -> dict[str, Any]:
    return dict(
        model_type="clip_vision_model",
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
        projection_dim=width,
    )


def _tiny_text(width: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return dict(
        model_type="qwen2",
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=1024,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
    )


def _interleave() -> dict[str, Any]:
    """Sources: transformers' convert_llava_weights_to_hf.py, which made the checkpoint (tower, image token,
    feature layer, vocabulary padded to 152000), and config.json of Qwen/Qwen1.5-0.5B (decoder)."""
    return dict(
        vision_config=dict(
            model_type="siglip_vision_model",
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=26,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
            vision_use_head=False,
        ),
        text_config=dict(
            model_type="qwen2",
            vocab_size=152000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            use_sliding_window=False,
            tie_word_embeddings=True,
        ),
        image_token_index=151646,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


_CONFIGS: dict[str, Any] = {
    "llava-tiny": lambda: dict(
        vision_config=_tiny_vision(64),
        text_config=_tiny_text(64, 4, 2),
        image_token_index=1000,
        vision_feature_layer=-1,
    ),
    "llava-wide-8k": lambda: dict(
        vision_config=_tiny_vision(64),
        text_config={**_tiny_text(128, 8, 8), "head_dim": 64},
        image_token_index=1000,
        vision_feature_layer=-1,
    ),
    "llava-interleave-qwen-0.5b": _interleave,
}


class Llava(Family):
    """LlavaForConditionalGeneration."""

    name = "llava"
    model_class = "LlavaForConditionalGeneration"
    processor_stem = "Siglip"

    def config(self, model: str) -> Any:
        """The transformers configuration of one of the models above."""
        return compat.model_class("LlavaConfig")(**require(_CONFIGS, model)())

    def image_processor(self, model: str) -> Any:
        """SigLIP's processor at the tower's size (384 for the published one, 56 for the tiny ones)."""
        side = require(_CONFIGS, model)()["vision_config"]["image_size"]
        return compat.image_processor_class(self.processor_stem)(size={"height": side, "width": side})


FAMILY = Llava()
