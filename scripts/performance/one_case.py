"""One compiled case by vlmbench and by the bare script, alternately, and by a process a metric.

.venv/bin/python scripts/performance/one_case.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vlmbench import kinds
from vlmbench.launch import LocalLauncher, worker_environment
from vlmbench.measure import measure

BARE = Path(__file__).parent / "bare.py"
PROCESSES = 3


def by_hand(*flags: str, inductor: Path) -> float:
    """Seconds of one process of the bare script."""
    start = time.monotonic()
    environment = {**os.environ, **worker_environment(1, inductor, None)}
    subprocess.run([sys.executable, BARE, *flags], env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def bare(folder: Path) -> float:
    """Seconds of the bare script's processes: one cold, the others warm."""
    inductor = Path(tempfile.mkdtemp(dir=folder))
    return by_hand("--cold", inductor=inductor) + sum(by_hand(inductor=inductor) for _ in range(PROCESSES - 1))


def ours(folder: Path) -> tuple[float, int]:
    """Seconds of a vlmbench record of the same case, and how many metrics it has."""
    start = time.monotonic()
    with LocalLauncher(directory=folder) as launcher:
        case = kinds.make_case("llava-tiny", "static", "compile")
        record = measure(case, launcher, processes=PROCESSES, folder=folder)
    assert record.status == "ok", record.reason
    return time.monotonic() - start, len(record.metrics)


def main() -> None:
    """Alternate the two, then time single processes as one metric each would need."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ratios, seconds = [], {"bare": [], "vlmbench": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(rounds):
            pair = {}
            for who in ("bare", "vlmbench") if turn % 2 else ("vlmbench", "bare"):
                if who == "bare":
                    pair[who] = bare(folder)
                else:
                    pair[who], metrics = ours(folder)
                seconds[who].append(round(pair[who], 1))
            ratios.append(pair["vlmbench"] / pair["bare"])
        inductor = Path(tempfile.mkdtemp(dir=folder))
        by_hand("--only", "decode", inductor=inductor)
        single = statistics.median(by_hand("--only", "decode", inductor=inductor) for _ in range(rounds))
    each = single * metrics
    print(
        json.dumps(
            {
                "seconds": seconds,
                "ratio": [round(r, 3) for r in ratios],
                "metrics": metrics,
                "one_metric_process_seconds": round(single, 1),
                "a_process_a_metric_over_vlmbench": round(each / statistics.median(seconds["vlmbench"]), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
