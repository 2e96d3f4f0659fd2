# SPDX-License-Identifier: Apache-2.0
"""Whether a student's step in the real trainer waits for its targets.

::

    python -m benchmarks.bench_student_step [--json FILE]

Trains a student on one rank on the CPU, on a cache that has just been dumped (so its files are in
the page cache), in two ways that alternate: with its loader, and with the targets of all iterations
read before the first step and the loader ended (``timed_targets.py``). All else is the same. Times
are of iterations as the trainer logs them, without the first ones and the last. The loader's
process computes beside the trainer: where they share cores, what it takes of them is part of the
ratio, and its CPU time per iteration stands beside it; the trainer of a GPU leaves its cores idle.
Where other jobs run, the trainer's CPU time tells more than its steps.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.bench_trainer import Case, dump_flags, train
from benchmarks.timed_targets import COSTS, HOLD
from benchmarks.worker_processes import KEEP_FREED

SKIPPED = 5
KINDS = {"loader": "0", "in memory": "1"}
METRICS = ("step", "waited for targets", "CPU of the trainer", "CPU of the loader's process")

Numbers = dict[str, list[float]]


def measure(case: Case, k: int, repetitions: int) -> dict[str, list[Numbers]]:
    """Return by kind, and by repetition, the milliseconds of each iteration."""
    found: dict[str, list[Numbers]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        train(case, dump_flags(case, Path(folder), k).split(), KEEP_FREED)
        load = ["--logits-load-dir", f"{folder}/cache", "--logits-load-kd-loss-alpha", "0.5"]
        for repetition in range(repetitions):
            # The order changes, so that a drift of the machine's speed cancels.
            for kind in sorted(KINDS, reverse=repetition % 2 == 0):
                environment = KEEP_FREED | {HOLD: KINDS[kind]}
                run = train(case, load, environment, "benchmarks/pretrain_timed_targets.py")
                targets = COSTS.findall(run.log)
                assert len(targets) == case.iterations, run.log[-3000:]
                costs = zip(*targets[SKIPPED:-1], strict=True)
                numbers = [run.milliseconds[SKIPPED:], *(list(map(float, cost)) for cost in costs)]
                found[kind].append(dict(zip(METRICS, numbers, strict=True)))
    return found


def show(found: dict[str, list[Numbers]]) -> None:
    """Print the table."""
    print(f"{'ms per iteration':32}" + "".join(f"{kind:>26}" for kind in KINDS))
    for metric in METRICS:
        line = f"{metric:32}"
        for kind in KINDS:
            low, middle, high = statistics.quantiles(
                [number for run in found[kind] for number in run[metric]], n=4
            )
            line += f"{middle:.2f} ({low:.2f} - {high:.2f})".rjust(26)
        print(line)
    for metric in ("step", "CPU of the trainer"):
        runs = [[run[metric] for run in found[kind]] for kind in KINDS]
        loader, memory = (statistics.median(itertools.chain(*part)) for part in runs)
        ratios = [
            f"{statistics.median(with_loader) / statistics.median(in_memory):.4f}"
            for with_loader, in_memory in zip(*runs, strict=True)
        ]
        print(f"{metric}, loader / in memory: {loader / memory:.4f}; of runs {', '.join(ratios)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    case = Case(seq_length=args.seq_length, vocab_size=args.vocab_size, iterations=args.iterations)
    found = measure(case, args.top_k, args.repetitions)
    print(
        f"S {case.seq_length}, V {case.vocab_size}, B 1, K {args.top_k}, bf16; medians and "
        f"quartiles of {args.repetitions} x {len(found['loader'][0]['step'])} iterations"
    )
    show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
