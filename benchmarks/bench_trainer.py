# SPDX-License-Identifier: Apache-2.0
"""What a dump and a student cost in the real trainer: time per iteration and peak memory.

Runs ``pretrain_gpt.py`` on one rank with a model whose output layer and loss are most of its work::

    python -m benchmarks.bench_trainer --case 256x32000 --case 1024x32000 --case 256x128256

Runs of one case:

* ``plain``: training without distillation;
* ``student``: both losses, alpha 0.5; ``student, alpha 1``: the LM loss as a number only;
* ``forward``: frozen weights and no loss, the least a teacher does (``pretrain_forward.py``);
* ``dump``: frozen weights, top-K recorded.

The runs of a case alternate and are repeated. Times are of iterations as the trainer logs them,
without the first two and the last, which saves; medians over all repetitions, with the quartiles
beside them. A dump has ``dump, top-k alone`` beside it: the forward pass plus ``torch.topk`` and
``logsumexp`` of as many logits, timed here. Peak memory is the trainer process's up to the end of
the last timed iteration, over that of ``plain`` and counted in logits of a micro batch, from runs
of their own in which the allocator gives back what is freed; the timed runs keep it, as a GPU's
allocator does. What comes after the iterations is left out: the end of a run maps libraries that
take more memory than the steps of a small model.

``--json FILE`` also writes all numbers.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rank_usage import peak_bytes_of
from benchmarks.worker_processes import KEEP_FREED, RETURN_FREED, ROOT

ITERATIONS = 8
SKIPPED = 2
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one micro batch, which is the global batch, and how many of them there are."""

    seq_length: int
    vocab_size: int
    iterations: int = ITERATIONS

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return the case of ``SEQxVOCAB``."""
        seq_length, vocab_size = map(int, text.split("x"))
        return cls(seq_length=seq_length, vocab_size=vocab_size)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the bf16 logits of a micro batch."""
        return self.seq_length * self.vocab_size * 2

    def arguments(self) -> list[str]:
        """Return the flags that all runs share."""
        return (
            "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type "
            f"rope --seq-length {self.seq_length} --max-position-embeddings {self.seq_length} "
            "--attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer "
            f"--vocab-size {self.vocab_size - 1} --make-vocab-size-divisible-by 64 --bf16 "
            "--lr 1e-3 --lr-decay-style constant "
            f"--micro-batch-size 1 --global-batch-size 1 --train-iters {self.iterations} "
            "--distributed-backend gloo --log-interval 1 --num-workers 0 --split 100,0,0 "
            "--eval-iters 0 --eval-interval 1000"
        ).split()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of the trainer took: milliseconds per iteration and peak bytes; and its log."""

    milliseconds: list[float]
    peak_bytes: int
    log: str


def train(
    case: Case, flags: list[str], allocator: Mapping[str, str], script: str = "pretrain_gpt.py"
) -> Run:
    """Run the trainer on one rank and read its log.

    Raises:
        RuntimeError: It failed; with the end of its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        **allocator,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",  # memory is read when an iteration is told of
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / script), *case.arguments(), *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, peaks = [], []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if _MILLISECONDS.search(line):
            peaks.append(peak_bytes_of(process.pid))
    log = "".join(lines)
    if process.wait() != 0:
        raise RuntimeError(f"{command} exited with {process.returncode}:\n{log[-3000:]}")
    times = [float(number) for number in _MILLISECONDS.findall(log)]
    assert len(times) == case.iterations, log[-3000:]
    return Run(milliseconds=times[SKIPPED:-1], peak_bytes=peaks[-2], log=log)


def dump_flags(case: Case, place: Path, k: int) -> str:
    """Return the flags of a dump into ``cache`` in *place*."""
    return (
        f"--freeze-all-layers --logits-save-dir {place}/cache --logits-save-top-k {k} "
        f"--async-save --use-persistent-ckpt-worker --save {place}/save "
        f"--save-interval {case.iterations}"
    )


def topk_milliseconds(case: Case, k: int, repetitions: int) -> float:
    """Return the median time of torch's top-k and log-sum-exp of a micro batch's logits."""
    torch.set_num_threads(1)
    logits = torch.randn(case.seq_length, case.vocab_size).bfloat16()
    times = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        logits.topk(k, -1)
        for row in logits.split(16):
            row.float().logsumexp(-1)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[1:])


def measure(case: Case, k: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return by run its ``ms`` per iteration and its ``peak_bytes``, of all repetitions."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(repetitions + 1):
            place = Path(folder) / str(repetition)
            dump = dump_flags(case, place, k)
            load = f"--logits-load-dir {Path(folder)}/0/cache --logits-load-kd-loss-alpha"
            # The first repetition is for the memory.
            allocator = RETURN_FREED if repetition == 0 else KEEP_FREED
            for name, flags, script in (
                ("forward", "--freeze-all-layers", "benchmarks/pretrain_forward.py"),
                ("dump", dump, "pretrain_gpt.py"),
                ("plain", "", "pretrain_gpt.py"),
                ("student", f"{load} 0.5", "pretrain_gpt.py"),
                ("student, alpha 1", f"{load} 1", "pretrain_gpt.py"),
            ):
                run = train(case, flags.split(), allocator, script)
                entry = found.setdefault(name, {"ms": [], "peak_bytes": []})
                if repetition == 0:
                    entry["peak_bytes"].append(run.peak_bytes)
                else:
                    entry["ms"] += run.milliseconds
    floor = topk_milliseconds(case, k, repetitions)
    found["dump, top-k alone"] = {
        "ms": [ms + floor for ms in found["forward"]["ms"]],
        "peak_bytes": [],
    }
    return found


def show(case: Case, found: dict[str, dict[str, list[float]]]) -> None:
    """Print the table of one case."""
    plain = statistics.median(found["plain"]["ms"])
    plain_peak = found["plain"]["peak_bytes"][0]
    print(f"\nS {case.seq_length}, V {case.vocab_size}, B 1, bf16")
    print(f"{'':20}{'ms/iteration':>14}{'quartiles':>18}{'/ plain':>9}{'peak - plain, logits':>22}")
    for name in ("plain", "student", "student, alpha 1", "forward", "dump, top-k alone", "dump"):
        times = found[name]["ms"]
        low, middle, high = statistics.quantiles(times, n=4)
        peaks = found[name]["peak_bytes"]
        peak = f"{(peaks[0] - plain_peak) / case.logits_bytes:+.2f}" if peaks else ""
        spread = f"{low:.0f} - {high:.0f}"
        print(f"{name:20}{middle:14.1f}{spread:>18}{middle / plain:9.2f}{peak:>22}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", type=Case.parse, metavar="SEQxVOCAB")
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = args.case or [Case.parse(text) for text in ("256x32000", "1024x32000", "256x128256")]
    results = {}
    for case in cases:
        found = measure(case, args.top_k, args.repetitions)
        show(case, found)
        results[f"{case.seq_length}x{case.vocab_size}"] = found
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
