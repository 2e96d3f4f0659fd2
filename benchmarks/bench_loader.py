# SPDX-License-Identifier: Apache-2.0
"""The student's data path beside that of the installed megatron-core, in one run.

::

    python -m benchmarks.bench_loader [--json FILE] [--case TITLE ...]

Each implementation dumps caches in its own format from the same logits, and reads them back in
processes of its own, in the layout of the dump and in others; they take turns. Every row is
verified to be of the right sample. What the installed one refuses, or gets wrong, stands in place
of its numbers. Shown are medians, quartiles, ours / installed, and a floor.

Two ways in are measured. *dataset* rows iterate over the dataset of DP rank 0 in one process with
one thread, as a tool would. *loss* rows call the loss object as a student does, with the defaults
of its flags: it starts its loader processes, and every rank of the TP x CP replica is a process.
Of several data parallel ranks only rank 0 exists. The loss itself is left out, and so is what
happens in it, such as unpacking rows on a device. What is added up is of all ranks of the replica.

* CPU time is of all threads and descendants of all ranks, by the scheduler's clocks of their
  processes; per token of the replica. Floor: decompression of the payloads alone, one copy of the
  packed rows, and for a loss, where it is counted too, the start of one process.
* *decoded / needed*: what zstd puts out, or of format 3 what frames are decoded to, counted in
  shared memory, to the share of it that belongs to the rows needed. *read / needed*: what ``read``
  returns (``rchar`` of ``/proc/PID/io``), to the compressed bytes of the members with those rows,
  which format 3 does not read whole; what a loader process reads to start is left out.
* *first sample*: the way to the rows of the first microbatch of a student that starts in the middle
  of shards of 128 members, with samples of a quarter of the length. Its time is that of the
  slowest rank, from opening the cache on; its bytes are what ``read`` returned by then. Loaders
  read nothing after the iteration that it is of, so that the count does not depend on how far they
  got. *its shards* are all those with rows of that iteration for the replica, together (those of
  several CP ranks of a teacher count as one); with several, the share of *one of them* is of their
  mean. Floor: the members with those rows.
* *peak memory* is in MB per rank: what the ranks' processes grow by together, divided by the ranks,
  and what the one that grows most does. It is measured in processes whose allocator gives back what
  is freed: the high-water mark of the dataset's process; the largest sample of the proportional set
  sizes of the loss objects' processes, which count shared memory once. Floor: one iteration of the
  DP rank's packed rows, and for a loss an idle loader process, once per replica.
* *stall* is how much longer the first and the last microbatch of an iteration take than two of
  those between, as the next iteration is fetched at either, in a loop that leaves the CPU alone
  before each iteration, as one that waits for a GPU: for ``--slack`` milliseconds per sample that
  the members of an iteration store, so that whoever decodes each member once has the same time for
  it in every layout. *waited* is what the loss object itself reports.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.loader_bench import SLOW_RUNS, Bench
from benchmarks.loader_cases import CASES, GBS, Caches, dumps
from benchmarks.loader_samples import Sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    titles = [case.title for case in CASES]
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument(
        "--iterations", type=int, default=8, help=f"of {GBS} samples, a multiple of 4"
    )
    parser.add_argument("--save-format", type=int, choices=(2, 3), default=2, help="of ours")
    parser.add_argument("--slack", type=float, default=4.0, help="ms per sample to be decoded")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--case", nargs="+", choices=titles, default=titles, metavar="TITLE")
    parser.add_argument("--scratch", help="a directory for the caches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    sizes = Sizes(args.seq_length, args.vocab_size, args.top_k, args.save_format)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        caches = Caches(Path(scratch), sizes.seq_length, dumps(args.iterations))
        bench = Bench(sizes, caches, args.runs, args.slack / 1000)
        bench.run([case for case in CASES if case.title in args.case])
    print(
        f"S {sizes.seq_length}, V {sizes.vocab_size}, K {sizes.top_k}, fp16, ours in format "
        f"{sizes.save_format}; megatron-core {metadata.version('megatron-core')}, medians and "
        f"quartiles of {args.runs}, of memory of {min(args.runs, SLOW_RUNS)}"
    )
    print("\n".join(bench.table.lines()))
    print(f"{time.monotonic() - began:.0f} s")
    if args.json is not None:
        results = {
            "sizes": vars(sizes),
            "results": bench.table.rows,
            "refusals": bench.table.refusals,
        }
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
