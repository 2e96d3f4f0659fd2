# SPDX-License-Identifier: Apache-2.0
"""What a dump costs besides its hook: buffering, hand-over, write, and the memory in between.

Measures this package and the one inside the installed megatron-core in one run, each in processes
of its own that take turns, single-threaded on the CPU::

    python -m benchmarks.bench_flush

Both are driven as the trainer does: microbatches pass a model's output layer and its loss, then
``_write_batched_tar(*take_pending_data())``. Logits are bf16 with a Zipf-like prior; *raw* is a
payload before compression, ``K * (2 + 2 + 1/8)`` bytes per token. CPU times are per token, of the
training thread, or of all threads of the process where the row says so. The hook's own time, that
of microbatches that end no iteration, is taken off; the vocabulary is small so that it is, too.
Memory is resident memory and files in memory. Times and memory are of processes of their own: where
times are taken, freed memory is kept, as a GPU's allocator does; where memory is, it goes back.
"""

import argparse
import ctypes
import gc
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("megatron-core", "in memory", "on a disk")
ROWS = {
    "end": "end of an iteration, us",
    "flush": "take_pending_data + pickling, us",
    "together": "both, all threads, us",
    "write": "write in the worker, all threads, us",
    "pickled": "pickled bytes / raw",
    "held": "memory per buffered iteration / raw",
    "peak": "memory during the flush / raw of the window",
    "stored": "shard bytes / raw",
}
TIMES = ("end", "flush", "together", "write")


# ---- one measurement, in a process of its own -------------------------------------------------


class Teacher:
    """A model whose logits are given, recorded by the saver of whichever package is found."""

    def __init__(self, cache: str, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.training import global_vars
        from megatron.training.arguments import add_megatron_arguments
        from megatron.training.distillation import LogitsSaverHooks

        torch.set_num_threads(1)
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        self.args = parser.parse_args([])
        if options.variant != "megatron-core":
            from megatron.training.distillation.arguments import add_distillation_args

            spools = ["--logits-save-spool-dir", cache] if options.variant == "on a disk" else []
            self.args = add_distillation_args(parser).parse_args(spools)
        samples = options.microbatches
        vars(self.args).update(
            mock_data=True,
            train_samples=10**6,
            micro_batch_size=1,
            global_batch_size=samples,
            data_parallel_size=1,
            seq_length=options.seq_length,
            freeze_all_layers=True,
        )
        global_vars.set_args(self.args)
        dist.init_process_group("gloo", init_method=f"file://{cache}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, samples, 1, 1, False)
        self.saver = LogitsSaverHooks(f"{cache}/cache", options.top_k)
        model: Any = torch.nn.Module()
        model.output_layer = torch.nn.Identity()
        model.compute_language_model_loss = lambda labels, logits: logits
        self.saver.attach_hooks(model.train())
        self.model = model
        self.labels = torch.zeros(1, options.seq_length, dtype=torch.long)

    def feed(self, logits: Any, iteration: int) -> float:
        """Run the hook on one microbatch; return the CPU seconds of this thread."""
        self.args.curr_iteration = self.args.iteration = iteration
        self.args.consumed_train_samples = iteration * self.args.global_batch_size
        began = time.thread_time()
        self.model.output_layer(logits)
        self.model.compute_language_model_loss(self.labels, logits)
        return time.thread_time() - began


def make_logits(options: argparse.Namespace) -> list[Any]:
    """Return the logits ``(S, 1, V)`` bf16 of the microbatches of an iteration."""
    import torch

    generator = torch.Generator().manual_seed(0)
    prior = -1.1 * torch.log(torch.arange(options.vocab_size) + 3.0)
    shape = (options.seq_length, 1, options.vocab_size)
    return [
        (prior + 2 * torch.randn(shape, generator=generator)).bfloat16()
        for _ in range(options.microbatches)
    ]


def memory_in_use() -> int:
    """Return resident memory and the files in memory that this process holds, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as stream:
        resident = int(stream.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    for entry in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{entry}"
        if os.path.lexists(path) and "memfd:" in os.readlink(path):
            resident += os.stat(path).st_blocks * 512
    return resident


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Dump one window and return the numbers of :data:`ROWS`."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as cache:
        teacher = Teacher(cache, options)
        logits = make_logits(options)
        tokens_each = options.microbatches * options.seq_length
        tokens = options.iterations * tokens_each
        raw_each = tokens_each * options.top_k * 4.125
        for warm_up in range(2):  # scratch memory and threads are there, the window begins empty
            for part in logits:
                teacher.feed(part, warm_up)
            teacher.saver._write_batched_tar(*teacher.saver.take_pending_data())
        # A window that has been written is given up; process groups have threads that poll.
        idle = time.process_time()
        time.sleep(2)
        idle = (time.process_time() - idle) / 2

        before = memory_in_use()
        hooks: list[float] = []
        ends: list[float] = []
        process_began, clock = time.process_time(), time.monotonic()
        for iteration in range(2, 2 + options.iterations):
            seconds = [teacher.feed(part, iteration) for part in logits]
            hooks += seconds[:-1]
            ends.append(seconds[-1])
        hook = statistics.median(hooks)
        settle()
        buffered = time.process_time()
        held = memory_in_use() - before

        process_again, thread = time.process_time(), time.thread_time()
        pending = teacher.saver.take_pending_data()
        pickled = pickle.dumps((teacher.saver._write_batched_tar, pending))
        flush = time.thread_time() - thread
        process_ended = time.process_time()
        idle *= time.monotonic() - clock
        peak = memory_in_use() - before
        size = len(pickled)
        del pickled
        write, arguments = teacher.saver._write_batched_tar, pending
        stored = -shard_bytes(cache)
        began = time.process_time()
        write(*arguments)
        written = time.process_time() - began
        stored += shard_bytes(cache)
    together = buffered - process_began + process_ended - process_again
    together -= sum(hooks) + hook * options.iterations + idle
    raw = raw_each * options.iterations
    return {
        "end": statistics.median(end - hook for end in ends) / tokens_each * 1e6,
        "flush": flush / tokens * 1e6,
        "together": together / tokens * 1e6,
        "write": written / tokens * 1e6,
        "pickled": size / raw,
        "held": held / raw,
        "peak": peak / raw,
        "stored": stored / raw,
    }


def shard_bytes(cache: str) -> int:
    """Return the bytes of all shards."""
    return sum(path.stat().st_size for path in Path(cache, "cache").glob("*.tar"))


def settle() -> None:
    """Wait until no background thread has computed for a second."""
    quiet, before = 0, time.process_time()
    while quiet < 5:
        time.sleep(0.2)
        now = time.process_time()
        quiet = quiet + 1 if now - before < 0.02 else 0  # process groups have threads that poll
        before = now


# ---- the table --------------------------------------------------------------------------------


def run_variant(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure *variant*: its memory in one process, its times in another."""
    memory = _run(variant, options, {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)})
    times = _run(
        variant, options, {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    )
    return memory | {row: times[row] for row in TIMES}


def _run(
    variant: str, options: argparse.Namespace, allocator: Mapping[str, str]
) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if variant != "megatron-core":
        environment["PYTHONPATH"] = str(ROOT)
    environment |= {"OMP_NUM_THREADS": "1", **allocator}
    command = [sys.executable, __file__, "--variant", variant, "--scratch", options.scratch]
    for name in ("seq_length", "vocab_size", "top_k", "microbatches", "iterations"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    # In a directory without the repository's half of the package.
    ended = subprocess.run(
        command, env=environment, cwd=options.scratch, stdout=subprocess.PIPE, text=True, check=True
    )
    numbers: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    """Measure all variants in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--json", metavar="FILE", help="also write every run's numbers to FILE")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.runs):
        for variant in VARIANTS:
            found[variant].append(run_variant(variant, options))
    print(
        f"S {options.seq_length}, V {options.vocab_size}, K {options.top_k}, fp16, "
        f"{options.microbatches} microbatches, {options.iterations} iterations; "
        f"median (spread) of {options.runs} runs"
    )
    print(f"{'':44}" + "".join(f"{variant:>22}" for variant in VARIANTS))
    for row, title in ROWS.items():
        line = f"{title:44}"
        for variant in VARIANTS:
            numbers = [run[row] for run in found[variant]]
            spread = max(numbers) - min(numbers)
            line += f"{statistics.median(numbers):13.4f} ({spread:.4f})".rjust(22)
        print(line)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
