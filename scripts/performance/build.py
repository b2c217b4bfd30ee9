"""Building a model of a published checkpoint's dimensions: ours against the class's own random init.

Each in a fresh process, alternately, bfloat16, one thread.

    .venv/bin/python scripts/performance/build.py --model llava-interleave-qwen-0.5b --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from vlmbench import kinds


def once(model: str, how: str) -> float:
    """Seconds of one build in this process."""
    import torch

    from vlmbench import compat

    compat.quiet()
    torch.set_num_threads(1)
    case = kinds.make_case(model, "dynamic", "eager")
    family = kinds.load("family", kinds.models()[model].family).FAMILY
    cls, config = compat.model_class(family.model_class), family.config(model)
    start = time.perf_counter()
    if how == "ours":
        family.build(case, torch.bfloat16)
    else:
        compat.from_config(cls, config, torch.bfloat16, "sdpa")
    return time.perf_counter() - start


def main() -> None:
    """Alternate the two ways; prints medians, every value and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llava-interleave-qwen-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", choices=("ours", "own init"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(once(given.model, given.once))
        return
    seconds: dict[str, list[float]] = {"ours": [], "own init": []}
    for turn in range(given.rounds):
        for how in list(seconds) if turn % 2 else reversed(list(seconds)):
            command = [sys.executable, __file__, "--model", given.model, "--once", how]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds[how].append(round(float(done.stdout.split()[-1]), 2))
    ratio = statistics.median(seconds["ours"]) / statistics.median(seconds["own init"])
    print(json.dumps({"model": given.model, "seconds": seconds, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
