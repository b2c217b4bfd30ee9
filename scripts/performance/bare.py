"""What one would write by hand for one case: llava-tiny, static cache, compiled decode. No vlmbench in it.

One process of it imports, builds, compiles and times what a vlmbench worker does for the same case, and
prints the seconds of each; `--only decode` stops after what a single metric needs, as a benchmark with a
process of its own does. scripts/performance/one_case.py runs both side by side.

    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python scripts/performance/bare.py --cold
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--cold", action="store_true")
parser.add_argument("--only", choices=("decode",))
options = parser.parse_args()

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipImageProcessorPil,
    StaticCache,
)
from transformers.generation import CompileConfig  # noqa: E402

torch.set_num_threads(1)
NEW, LENGTH, TEXT = 32, 128, 32

config = LlavaConfig(
    vision_config=dict(
        model_type="clip_vision_model",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
        projection_dim=64,
    ),
    text_config=dict(
        model_type="qwen2",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=16384,
    ),
    image_token_index=1000,
    vision_feature_layer=-1,
)
model = LlavaForConditionalGeneration(config).eval()
photo = Image.open(os.path.join(os.path.dirname(__file__), "../../vlmbench/data/astronaut.jpg")).convert("RGB")
pixels = SiglipImageProcessorPil(size={"height": 56, "width": 56})(images=[photo], return_tensors="pt")["pixel_values"]


def prompt(text):
    ids = torch.randint(3, 1000, (1, text + 16))
    ids[:, text // 2 : text // 2 + 16] = 1000
    return ids


ids, short = prompt(TEXT), prompt(TEXT // 2)
LONG = ids.shape[1]
positions = [torch.full((1, 1), LONG + i) for i in range(NEW)]
results = {}


def step(token, cache, position):
    logits = model(input_ids=token, position_ids=position, cache=cache, use_cache=True).logits[:, -1]
    return logits.argmax(-1, keepdim=True), logits


def new_cache():
    return StaticCache(config=config, max_cache_len=LENGTH)


def prefill(cache):
    out = model(input_ids=ids, pixel_values=pixels, cache=cache, logits_to_keep=1, use_cache=True)
    return out.logits[:, -1].argmax(-1, keepdim=True)


def generate(tokens=ids, new=NEW):
    compiling = CompileConfig(fullgraph=False, dynamic=False, mode="default")
    compiling._compile_all_devices = True
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, compile_config=compiling)
    generation.eos_token_id = None
    return model.generate(
        input_ids=tokens,
        pixel_values=pixels,
        attention_mask=torch.ones_like(tokens),
        cache=new_cache(),
        generation_config=generation,
    )


def timed(name, runs, run, before=lambda: None):
    seconds = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    results[name] = seconds


with torch.no_grad():
    cache = new_cache()
    fast = torch.compile(step, fullgraph=False, dynamic=False)
    first = prefill(cache)

    def rewind(length):
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    def compile_calls():
        token = first
        rewind(LONG)
        for i in range(4):
            token, _ = fast(token, cache, positions[i])

    def requests():
        generate()
        generate(short, NEW // 2)
        generate()

    def decode():
        token = first
        rewind(LONG)
        for position in positions:
            token, _ = fast(token, cache, position)

    if options.only:
        timed("compile", 1, compile_calls)
        timed("decode", 5, decode)
    else:
        for name, run in (
            (("compile", compile_calls), ("requests", requests))
            if options.cold
            else (("requests", requests), ("compile", compile_calls))
        ):
            timed(name, 1, run)
        timed("vision", 3, lambda: model.get_image_features(pixel_values=pixels))
        timed("prefill", 3, lambda: prefill(cache), before=lambda: rewind(0))
        timed("decode", 5, decode)
        timed("generate", 3, generate)
print(json.dumps(results))
