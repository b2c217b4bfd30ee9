"""The decode step as a worker reports it, against a bare loop over the same model, in live pairs.

Two processes are alive together: a vlmbench worker, asked for decode blocks, and this script's own
loop without marks, checks or protocol. Blocks alternate ABBA on one core; a pair's estimate is the
median log-ratio of neighbouring blocks.

    .venv/bin/python scripts/performance/overhead.py --pairs 6 --runner eager
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from vlmbench import kinds
from vlmbench.launch import LocalLauncher, worker_environment

CORE = max(os.sched_getaffinity(0))
#: Untimed steps before a block, as many as the worker makes.
WARM = 4


def loop(model: str, cache: str, runner: str) -> None:
    """The bare side: answers every line on stdin with the seconds per step of one block of all new tokens."""
    import gc
    import time

    import torch

    from vlmbench.compat import dynamic_cache, quiet, rewind, static_cache

    quiet()
    torch.set_num_threads(1)
    case = kinds.make_case(model, cache, runner)
    family = kinds.load("family", kinds.models()[model].family).FAMILY
    loaded = family.load(case, torch.float32)
    net, prompt = loaded.model, loaded.prompt(case, case.prompt_tokens)
    if cache == "dynamic":
        kept = dynamic_cache(net.config)
    else:
        kept = static_cache(net.config, 1, case.cache_length, "cpu", torch.float32)

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        out = net(input_ids=token, position_ids=position, cache=kept, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    run = torch.compile(step, dynamic=False) if runner == "compile" else step
    with torch.no_grad():
        out = net(**prompt, cache=kept, use_cache=True, logits_to_keep=1)
        first = out.logits[:, -1].argmax(-1, keepdim=True)
        length = prompt["input_ids"].shape[1]
        positions = family.positions(net, prompt, case.new_tokens)
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in sys.stdin:
            rewind(kept, length)
            os.sched_setaffinity(0, {CORE})
            token = first
            for position in positions[:WARM]:
                token = run(token, position)
            rewind(kept, length)
            token = first
            start = time.perf_counter()
            for position in positions:
                token = run(token, position)
            print((time.perf_counter() - start) / case.new_tokens, flush=True)


def pair(model: str, cache: str, runner: str, blocks: int, folder: Path) -> float:
    """Median log-ratio (worker over bare) of one pair of fresh processes."""
    case = kinds.make_case(model, cache, runner)
    environment = worker_environment(1, folder, None)
    command = [sys.executable, __file__, "--loop", "--model", model, "--cache", cache, "--runner", runner]
    bare = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert bare.stdin and bare.stdout
    with LocalLauncher() as launcher:
        worker = launcher.start(environment)
        worker.ask("hello", 120, device="cpu", threads=1, core=CORE, lock=None)
        worker.ask("open", 600, cases=[case.to_json()])

        def theirs() -> float:
            bare.stdin.write("block\n")
            bare.stdin.flush()
            return float(bare.stdout.readline())

        def ours() -> float:
            return statistics.fmean(worker.ask("block", 600, case=case.id, phase="decode", n=1)["samples"])

        for _ in range(4):
            theirs(), ours()
        ratios = []
        for i in range(blocks):
            a, b = (ours(), theirs()) if i % 2 else tuple(reversed((theirs(), ours())))
            ratios.append(math.log(a / b))
        worker.close()
    bare.stdin.close()
    bare.wait()
    return statistics.median(ratios)


def main() -> None:
    """Several pairs; prints the median overhead and each pair's, in percent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llava-tiny")
    parser.add_argument("--cache", default="static")
    parser.add_argument("--runner", default="eager")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=40)
    given = parser.parse_args()
    if given.loop:
        loop(given.model, given.cache, given.runner)
        return
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        found = [pair(given.model, given.cache, given.runner, given.blocks, Path(name)) for _ in range(given.pairs)]
    percent = [round(100 * math.expm1(value), 2) for value in found]
    print(json.dumps({"overhead_percent": round(statistics.median(percent), 2), "pairs": percent}))


if __name__ == "__main__":
    main()
