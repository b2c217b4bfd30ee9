"""All differences between transformers releases (4.57 to 5.24), and nowhere else.

Signatures are looked at, never tried: releases up to 5.23 swallow an unknown `cache=` silently and
then decode with an empty cache.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import DynamicCache, GenerationConfig, StaticCache

from vlmbench.errors import Unsupported, unknown


def versions() -> dict[str, str]:
    """Versions that can change a number: torch, transformers, python-level friends are the caller's."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def quiet() -> None:
    """Keep transformers' warnings and progress bars out of the worker's stderr."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Arguments:
    """What one model's forward and generate call their arguments in the installed release.

    `network` is the part of the model that takes the cache, where that is not the model itself.
    """

    def __init__(self, model: torch.nn.Module, network: torch.nn.Module | None = None) -> None:
        names = set(inspect.signature((network or model).forward).parameters)
        #: `past_key_values` up to 5.23, `cache` from 5.24.
        self.cache = "cache" if "cache" in names else "past_key_values"
        #: `num_logits_to_keep` in 4.48, `logits_to_keep` since.
        self.logits = next((n for n in ("logits_to_keep", "num_logits_to_keep") if n in names), None)
        #: A full-graph decode step needs it explicitly up to 5.3; it is gone from 5.4.
        self.cache_position = "cache_position" in names
        self._model = set(inspect.signature(model.forward).parameters)

    def accepted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """`inputs` of a prompt without what this release's model does not name."""
        return {name: value for name, value in inputs.items() if name in self._model}

    def last_logits(self) -> dict[str, Any]:
        """Argument that asks for the logits of the last position only, empty where there is none."""
        return {self.logits: 1} if self.logits else {}


def dynamic_cache(config: Any) -> DynamicCache:
    """A DynamicCache that knows the model's layer types, where the release can be told."""
    if "config" in inspect.signature(DynamicCache.__init__).parameters:
        return DynamicCache(config=config)
    return DynamicCache()


def static_cache(config: Any, batch: int, length: int, device: str, dtype: torch.dtype) -> StaticCache:
    """A StaticCache of `length` positions; allocated at its first update from 4.56 on."""
    names = inspect.signature(StaticCache.__init__).parameters
    given = {"max_batch_size": batch, "batch_size": batch, "device": device, "dtype": dtype}
    return StaticCache(config=config, max_cache_len=length, **{n: v for n, v in given.items() if n in names})


def rewind(cache: Any, length: int) -> None:
    """Set a transformers cache back to its first `length` positions.

    `Cache.crop` means different things by release and is refused by some layers; what a rewind has
    to do is the same everywhere: a counter where there is one, a slice of what grew otherwise.
    """
    for layer in cache.layers:
        counter = getattr(layer, "cumulative_length", None)
        if getattr(layer, "is_sliding", False):
            raise Unsupported("a sliding-window layer has forgotten what a rewind would need")
        if isinstance(counter, torch.Tensor):
            counter.fill_(length)
        elif getattr(layer, "max_cache_len", None) is not None:
            # Before the counter existed a static layer's length was the number of non-zero rows.
            layer.keys[:, :, length:].zero_()
            layer.values[:, :, length:].zero_()
        else:
            # Copies: a view keeps the longer strides, for which a compiled step would compile anew.
            layer.keys = layer.keys[:, :, :length].contiguous()
            layer.values = layer.values[:, :, :length].contiguous()


def state_of(cache: Any) -> dict[str, torch.Tensor]:
    """Every tensor a transformers cache's layers hold, as `<attribute>_<layer>`."""
    return {
        f"{name}_{i}": value
        for i, layer in enumerate(cache.layers)
        for name, value in vars(layer).items()
        if isinstance(value, torch.Tensor)
    }


def with_state(cache: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A transformers cache like `cache` whose layers hold `tensors`, named as `state_of` names them."""
    made = copy.copy(cache)
    made.layers = []
    for i, layer in enumerate(cache.layers):
        own = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                setattr(own, name, tensors[f"{name}_{i}"])
        made.layers.append(own)
    return made


def layer_types(config: Any) -> list[str]:
    """What each decoder layer's attention sees: "full_attention", "sliding_attention", "cross_attention", ..."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    if types:
        return list(types)
    across = set(getattr(text, "cross_attention_layers", None) or ())
    count = getattr(text, "num_hidden_layers", None) or text.num_layers
    usual = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    return ["cross_attention" if i in across else usual for i in range(count)]


def image_processor_class(stem: str) -> Any:
    """The image processor of `stem` that works on PIL images, without torchvision.

    From 5.0 it is `<stem>ImageProcessorPil`, before that the plain "slow" class.
    """
    cls = getattr(transformers, f"{stem}ImageProcessorPil", None) or getattr(
        transformers, f"{stem}ImageProcessor", None
    )
    if cls is None:
        raise Unsupported(f"transformers {transformers.__version__} has no image processor '{stem}'")
    return cls


def model_class(name: str) -> Any:
    """A model or configuration class by name. Raises Unsupported where the release has none."""
    cls = getattr(transformers, name, None)
    if cls is None:
        raise Unsupported(f"transformers {transformers.__version__} has no {name}")
    return cls


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """Build models with parameters allocated but not initialised, buffers as usual."""
    for place in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            manager = getattr(importlib.import_module(place), "no_init_weights", None)
        except ImportError:
            continue
        if manager is not None:
            with manager():
                yield
            return
    raise Unsupported(f"transformers {transformers.__version__} has no no_init_weights")


def from_config(cls: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    """`cls` built from `config` in `dtype` with that attention implementation in every sub-model.

    Raises UsageError for an attention that the release does not know, Unsupported with transformers'
    own sentence where it cannot be had.
    """
    known = ["eager", *transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if attention not in known and "/" not in attention:
        raise unknown("attention", attention, dict.fromkeys(known))
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    try:
        return cls._from_config(config, attn_implementation=attention, **{key: dtype})
    except (ValueError, ImportError) as error:
        raise Unsupported(f"attention '{attention}': {str(error).splitlines()[0]}") from None


def from_pretrained(cls: Any, where: str, dtype: torch.dtype, attention: str) -> Any:
    """Load a checkpoint with real weights."""
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    return cls.from_pretrained(where, attn_implementation=attention, **{key: dtype})


def observed_attention(model: Any) -> dict[str, str]:
    """Attention implementation of every sub-configuration, as the model holds it after building."""
    found = {"model": getattr(model.config, "_attn_implementation", None)}
    for name in getattr(model.config, "sub_configs", {}):
        found[name] = getattr(getattr(model.config, name, None), "_attn_implementation", None)
    return {name: str(value) for name, value in found.items()}


def compile_options(device: str, dynamic: bool | None) -> dict[str, Any]:
    """How generate() compiles on this device: reduce-overhead (CUDA graphs) where there are any."""
    mode = "reduce-overhead" if device == "cuda" else "default"
    return {"fullgraph": False, "dynamic": dynamic, "mode": mode}


def generation_config(model: Any, new_tokens: int, compiled: bool, device: str) -> GenerationConfig:
    """Greedy generation of exactly `new_tokens`, compiled by generate() itself or not at all.

    On a CPU generate() compiles only with the private switch `_compile_all_devices`; on a GPU it
    compiles every compileable cache unless `disable_compile` is set.
    """
    # The model's own default would stop at its end token; what is left None here it fills in again.
    for holder in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        if getattr(holder, "eos_token_id", None) is not None:
            holder.eos_token_id = None
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, num_beams=1, pad_token_id=0, use_cache=True)
    config.eos_token_id = None
    if compiled:
        options = transformers.generation.CompileConfig(**compile_options(device, dynamic=False))
        options._compile_all_devices = True
        config.compile_config = options
    else:
        config.disable_compile = True
    return config


@dataclass
class Seen:
    """What a call of generate() was seen to do."""

    compiled: bool = False
    cache_class: str = ""


@contextlib.contextmanager
def watch_generate(model: Any, arguments: Arguments) -> Iterator[Seen]:
    """Watch generate() decide whether to compile, and which cache it hands to the forward.

    The class is patched, not the object: an attribute on the model would fail the guards of what is
    compiled already.
    """
    seen = Seen()
    cls = type(model)
    decide, prepare = cls._valid_auto_compile_criteria, cls.prepare_inputs_for_generation

    def deciding(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = decide(self, *args, **kwargs)
        seen.compiled = seen.compiled or bool(answer)
        return answer

    def preparing(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        seen.cache_class = type(prepared.get(arguments.cache)).__name__
        return prepared

    with (
        mock.patch.object(cls, "_valid_auto_compile_criteria", deciding),
        mock.patch.object(cls, "prepare_inputs_for_generation", preparing),
    ):
        yield seen
