# SPDX-License-Identifier: Apache-2.0
"""The loss and the teacher's hook beside those of the installed megatron-core, in one run.

::

    python -m benchmarks.bench_tensor_work [--json FILE]

Both implementations run in processes of their own, on the same inputs, one after the other, several
times; one thread, CPU time. Times come from processes whose allocator keeps freed memory, as a
GPU's does, memory from processes that give it back at once. Shown are medians, quartiles of ours,
and ours / theirs. Lines without a second column are floors, or the trainer's own loss.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.worker_processes import (
    KEEP_FREED,
    RETURN_FREED,
    ROOT,
    Samples,
    Worker,
    alternate,
    closing_all,
    installed_root,
)

TIMES = {
    "KD loss, forward + backward": ["time_loss", "kd"],
    "LM loss + KD loss": ["time_loss", "both"],
    "teacher hook": ["time_hook"],
}
MEMORY = {
    "KD loss": ["memory_of_loss", "kd"],
    "LM loss + KD loss": ["memory_of_loss", "both"],
    "teacher hook": ["memory_of_hook"],
    "gradient error, fp32 logits": ["gradient_error"],
}
MEMORY_ALONE = {"the trainer's LM loss alone": ["memory_of_loss", "lm"]}
ALONE = {
    "the trainer's LM loss alone": ["time_loss", "lm"],
    "torch cross_entropy": ["time_loss", "torch_cross_entropy"],
    "floor": ["floors"],
}


def measure(
    roots: Mapping[str, Path],
    sizes: list[int],
    allocator: Mapping[str, str],
    requests: Mapping[str, list[str]],
    runs: int,
) -> Iterator[tuple[str, str, Samples]]:
    """Yield name, metric and the samples by implementation; implementations alternate."""
    started = {
        name: Worker("benchmarks.tensor_worker", [root, *sizes], allocator)
        for name, root in roots.items()
    }
    with closing_all(started) as workers:
        for what, request in requests.items():
            samples = alternate(workers, dict.fromkeys(workers, request), runs)
            for metric, found in samples.items():
                yield what, metric, found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    sizes = [args.tokens, args.vocab_size, args.top_k]
    both = {"installed": installed_root(), "ours": ROOT}
    print(
        f"{args.tokens} tokens, V {args.vocab_size}, K {args.top_k}, bf16, one thread; torch "
        f"{metadata.version('torch')}, megatron-core {metadata.version('megatron-core')}, "
        f"medians of {args.runs}"
    )
    print(f"{'':30}{'':26}{'installed':>11}{'ours':>10}{'quartiles':>20}{'ratio':>8}")
    results: dict[str, Any] = {}
    for roots, allocator, requests in (
        (both, KEEP_FREED, TIMES),
        (both, RETURN_FREED, MEMORY),
        ({"ours": ROOT}, RETURN_FREED, MEMORY_ALONE),
        ({"ours": ROOT}, KEEP_FREED, ALONE),
    ):
        for what, metric, found in measure(roots, sizes, allocator, requests, args.runs):
            results.setdefault(what, {})[metric] = found
            ours = statistics.median(found["ours"])
            low, _, high = statistics.quantiles(found["ours"], n=4)
            line = f"{what:30}{metric:26}"
            spread = f"{low:.3g} - {high:.3g}"
            if "installed" not in found:
                print(f"{line}{'':>11}{ours:10.4g}{spread:>20}")
                continue
            theirs = statistics.median(found["installed"])
            ratio = f"{ours / theirs:8.3f}" if theirs else ""
            print(f"{line}{theirs:11.4g}{ours:10.4g}{spread:>20}{ratio}")
    if args.json is not None:
        args.json.write_text(json.dumps({"sizes": sizes, "results": results}, indent=1))


if __name__ == "__main__":
    main()
