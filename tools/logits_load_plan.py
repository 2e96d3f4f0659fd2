# SPDX-License-Identifier: Apache-2.0
"""Predict what reading a cache will ask of store and hosts, before a student is started.

For a parallel layout, a store and a step time: the listing, requests and bytes per second, host
memory, and how long training waits at its start, on resume, at the boundaries of shards and in
between. Flags have Megatron's names where Megatron has the value; ``--save-...`` are the dump's::

    python -m tools.logits_load_plan --world-size 2048 --tensor-model-parallel-size 8 \
        --micro-batch-size 1 --global-batch-size 1024 --seq-length 8192 --train-samples 20480000 \
        --save-data-parallel-size 256 --save-interval 100 --step-time 8 --store object

With ``--runs FILE`` every line of FILE, a name and flags, is a column; flags on the command line
hold for all of them.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.load_plan.prediction import Prediction, predict
from tools.load_plan.setting import (
    FILESYSTEM,
    GIB,
    OBJECT_STORE,
    Batches,
    Dump,
    Loader,
    Setting,
    Store,
    Student,
)
from tools.load_plan.table import table

_STORE_DEFAULTS = {
    FILESYSTEM: {"requests_per_second": 20_000.0, "latency_ms": 2.0, "connection_gb_s": 1.5},
    OBJECT_STORE: {"requests_per_second": 5_500.0, "latency_ms": 30.0, "connection_gb_s": 0.09},
}
"""Of one client's read on Lustre, and of one prefix and connection of S3."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the predictions; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    first, rest = _first_parser().parse_known_args(arguments)
    try:
        lines = {"": ""} if first.runs is None else _read_runs(first.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    predictions: dict[str, Prediction] = {}
    for name, flags in lines.items():
        options = parser.parse_args([*shlex.split(flags), *rest])
        try:
            predictions[name] = predict(_setting(options), options.iterations)
        except ValueError as error:
            parser.error(f"{name}: {error}" if name else str(error))
    if first.json:
        plain = {name: dataclasses.asdict(found) for name, found in predictions.items()}
        print(json.dumps(plain if first.runs else plain[""], indent=2))
    else:
        print(table(predictions))
    return 0


def _read_runs(path: Path) -> dict[str, str]:
    """Return the flags of each named line; comments and empty lines do not count."""
    runs: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, flags = line.partition("#")[0].strip().partition(" ")
        if name in runs:
            raise ValueError(f"{path} has two runs named {name}. Rename one.")
        if name:
            runs[name] = flags
    if not runs:
        raise ValueError(f"{path} names no run: expected lines of a name and flags.")
    return runs


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults, except where there is none or the text says what it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def _first_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs", type=Path, help="file of runs, one a line: a name and flags")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.logits_load_plan",
        description=(__doc__ or "").partition("\n")[0],
        parents=[_first_parser()],
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    student = parser.add_argument_group("student")
    student.add_argument("--world-size", type=int, required=True, help="ranks")
    for name in ("tensor-model", "pipeline-model", "context"):
        student.add_argument(f"--{name}-parallel-size", type=int, default=1, help="Megatron's")
    for name in ("micro-batch-size", "global-batch-size", "seq-length", "train-samples"):
        student.add_argument(f"--{name}", type=int, required=True, help="Megatron's")
    student.add_argument("--step-time", type=float, required=True, help="seconds per iteration")
    student.add_argument("--gpus-per-node", type=int, default=8, help="consecutive ranks on a node")

    loader = parser.add_argument_group("loader")
    loader.add_argument("--logits-load-decode-threads", type=int, default=4, help="the student's")
    loader.add_argument(
        "--logits-load-msc-prefetch-depth", type=int, default=2, help="the student's"
    )
    loader.add_argument(
        "--logits-load-max-ahead-bytes", type=int, default=2 * GIB, help="the student's"
    )
    loader.add_argument(
        "--queued-iterations",
        type=int,
        help="finished iterations on their way to the trainer; default 3, object stores 2",
    )
    loader.add_argument(
        "--decode-us-per-token", type=float, default=2.0, help="CPU time of a thread"
    )
    loader.add_argument("--msc-cache", action="store_true", help="shards go to a disk of the node")

    dump = parser.add_argument_group("dump; batch sizes and DP default to the student's")
    for name in ("data-parallel-size", "micro-batch-size", "global-batch-size"):
        dump.add_argument(f"--save-{name}", type=int, help="the teacher's")
    dump.add_argument("--save-interval", type=int, required=True, help="iterations per shard")
    dump.add_argument("--stored-bytes-per-token", type=float, default=340, help="compressed")
    dump.add_argument("--packed-bytes-per-token", type=float, default=533, help="in memory")

    store = parser.add_argument_group("store; what it gives to this run")
    store.add_argument(
        "--store", choices=(FILESYSTEM, OBJECT_STORE), default=FILESYSTEM, help="what it is"
    )
    store.add_argument("--store-gb-s", type=float, default=100, help="GB per second, all readers")
    store.add_argument(
        "--store-requests-s", type=float, help="reads per second; default 20000, object stores 5500"
    )
    store.add_argument(
        "--store-latency-ms", type=float, help="to the first byte; default 2, object stores 30"
    )
    store.add_argument(
        "--connection-gb-s", type=float, help="of one read; default 1.5, object stores 0.09"
    )
    parser.add_argument("--iterations", type=int, default=200, help="iterations to simulate")
    return parser


def _setting(options: argparse.Namespace) -> Setting:
    """Return the options as one value; ValueError says what does not fit."""
    student = Student(
        world_size=options.world_size,
        tp=options.tensor_model_parallel_size,
        pp=options.pipeline_model_parallel_size,
        cp=options.context_parallel_size,
        mbs=options.micro_batch_size,
        gbs=options.global_batch_size,
        seq_length=options.seq_length,
        gpus_per_node=options.gpus_per_node,
        step_time=options.step_time,
    )
    batches = Batches(
        dp=_or(options.save_data_parallel_size, student.batches.dp),
        mbs=_or(options.save_micro_batch_size, student.mbs),
        gbs=_or(options.save_global_batch_size, student.gbs),
    )
    dump = Dump(
        batches=batches,
        save_interval=options.save_interval,
        train_samples=options.train_samples,
        stored_bytes_per_token=options.stored_bytes_per_token,
        packed_bytes_per_token=options.packed_bytes_per_token,
    )
    defaults = _STORE_DEFAULTS[options.store]
    store = Store(
        kind=options.store,
        bandwidth=options.store_gb_s * 1e9,
        requests_per_second=_or(options.store_requests_s, defaults["requests_per_second"]),
        latency=_or(options.store_latency_ms, defaults["latency_ms"]) / 1e3,
        connection_bandwidth=_or(options.connection_gb_s, defaults["connection_gb_s"]) * 1e9,
    )
    # A thread of the trainer holds one and has one ready; a loader process, which object stores do
    # not have because their client does not survive a fork, has one more.
    queued = 3 if options.store == FILESYSTEM else 2
    loader = Loader(
        decode_threads=options.logits_load_decode_threads,
        prefetch_depth=options.logits_load_msc_prefetch_depth,
        max_ahead_bytes=options.logits_load_max_ahead_bytes,
        queued_iterations=_or(options.queued_iterations, queued),
        decode_seconds_per_token=options.decode_us_per_token / 1e6,
        node_cache=options.msc_cache,
    )
    return Setting(student=student, dump=dump, store=store, loader=loader)


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value


if __name__ == "__main__":
    sys.exit(main())
