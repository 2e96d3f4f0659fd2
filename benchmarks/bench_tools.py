# SPDX-License-Identifier: Apache-2.0
"""What the tools for a cache cost on a large one: time, CPU, memory, and what a kill loses.

::

    python -m benchmarks.bench_tools --directory /a/disk/with/60/GB [--shards 10000] [--verb info]

Makes a cache of ``--shards`` shards of about 2.6 MB each, of 16 DP ranks: 4 members a shard, 2
samples of 1024 tokens a member, K 128, vocabulary 32000, synthetic logits, from a pool of a few
payloads, sealed as a dump seals them. It stays there and is used again.

Each verb then runs as a user runs it. *Cores* is CPU time by time. *Memory* is that of all its
processes together, what they share counted once; importing torch is 0.3 to 0.5 GB of it in each.
``verify --full`` and ``convert`` (to the other format) are first killed, all their processes by
SIGKILL, after ``--kill-after`` seconds, and then started again; MB/s are of the whole cache, so
the share that had been done before makes them faster.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.bench_format import synthetic
from benchmarks.rank_usage import TreeMemory
from megatron.training.distillation.manifest import PACKAGE_VERSION, RunManifest
from megatron.training.distillation.payload import encode_logprobs_payload
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.shard_meta import SaverSettings, ShardMeta
from megatron.training.distillation.utils import ShardName, member_name, write_shard_tar

ROOT = Path(__file__).resolve().parents[1]
DP, MBS, MEMBERS = 16, 2, 4
GBS = DP * MBS
WINDOW = GBS * MEMBERS
SEQ, K, VOCAB = 1024, 128, 32000
POOL = 16
_MEMORY_INTERVAL = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a verb."""

    verb: str
    seconds: float
    cpu_seconds: float
    memory_mb: float
    status: int
    killed: bool = False

    @property
    def cores(self) -> float:
        """How many cores it kept busy."""
        return self.cpu_seconds / self.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the cache, run the verbs, print the table; return the exit status."""
    options = _parser().parse_args(arguments)
    cache = options.directory / f"cache-v{options.save_format}-{options.shards}"
    make_cache(cache, options.shards, options.save_format)
    size = sum(path.stat().st_size for path in cache.iterdir())
    print(f"{cache}: {options.shards} shards, {size / 1e9:.1f} GB, format {options.save_format}")
    runs: list[Run] = []
    for verb in options.verb or VERBS:
        for run in VERBS[verb](cache, options):
            runs.append(run)
            print(_line(run, size), flush=True)
    if options.json:
        found = {"bytes": size, "shards": options.shards, "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(found))
    return max((run.status for run in runs if not run.killed), default=0)


# ---- the cache ---------------------------------------------------------------------------------


def make_cache(cache: Path, shards: int, save_format: int) -> None:
    """Write what is missing of the cache."""
    names = [
        ShardName(rank, window * WINDOW, (window + 1) * WINDOW)
        for window in range(-(-shards // DP))
        for rank in range(DP)
    ][:shards]
    missing = [name for name in names if not (cache / str(name)).exists()]
    if not missing:
        return
    cache.mkdir(parents=True, exist_ok=True)
    payloads = _payloads(save_format)
    write = partial(_write_shard, cache, payloads, save_format)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(write, missing, chunksize=64):
            pass


def _payloads(save_format: int) -> list[bytes]:
    """Return payloads of two samples each."""
    case = synthetic(VOCAB, K, torch.bfloat16, SEQ)
    samples = torch.Generator().manual_seed(5)
    found = []
    for _ in range(POOL):
        pick = torch.randperm(case.values.shape[1], generator=samples)[:MBS]
        assert case.tail is not None
        assert case.proofs is not None
        parts = case.values[:, pick], case.ids[:, pick], case.tail[:, pick], case.proofs[:, pick]
        if save_format == 2:
            found.append(encode_logprobs_payload(*parts))
        else:
            found.append(encode_framed_payload(*parts, vocab_size=VOCAB))
    return found


def _write_shard(cache: Path, payloads: list[bytes], save_format: int, name: ShardName) -> None:
    saver = SaverSettings(
        k=K,
        p=None,
        min_k=1,
        save_dtype="fp16",
        format_version=save_format,
        mbs_save=MBS,
        dp_size_save=DP,
        gbs_save=GBS,
    )
    manifest = RunManifest(
        sequence_length=SEQ,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        package_version=PACKAGE_VERSION,
        teacher={"checkpoint": "synthetic", "step": 1},
    )
    identifiers = {"seed": 1, "train_samples": 10**6, "blend": {"kind": "mock", "mock": True}}
    members = [
        (member_name(first, first + GBS), payloads[hash((name.dp_rank, first)) % POOL])
        for first in range(name.start, name.end, GBS)
    ]
    meta = ShardMeta.for_run(identifiers, saver, manifest).to_bytes()
    with (cache / f"{name}.tmp").open("wb") as out:
        write_shard_tar(out, seal_meta(meta, str(name), members), members)
    (cache / f"{name}.tmp").rename(cache / str(name))


# ---- the verbs ---------------------------------------------------------------------------------


def _info(cache: Path, options: argparse.Namespace) -> Iterator[Run]:
    yield _run("info", [str(cache)])


def _report(cache: Path, options: argparse.Namespace) -> Iterator[Run]:
    yield _run("report", [str(cache), "--out", str(options.directory / "report.html")])


def _verify(cache: Path, options: argparse.Namespace) -> Iterator[Run]:
    state = options.directory / "verified.jsonl"
    state.unlink(missing_ok=True)
    flags = [str(cache), "--full", "--state", str(state)]
    yield _run("verify", flags, kill_after=options.kill_after)
    yield _run("verify", flags)


def _convert(cache: Path, options: argparse.Namespace) -> Iterator[Run]:
    target = options.directory / "converted"
    flags = [str(cache), str(target), "--format", "3" if options.save_format == 2 else "2"]
    shutil.rmtree(target, ignore_errors=True)
    yield _run("convert", flags, kill_after=options.kill_after)
    yield _run("convert", flags)


VERBS = {"info": _info, "report": _report, "verify": _verify, "convert": _convert}


def _run(verb: str, flags: Sequence[str], kill_after: float | None = None) -> Run:
    """Run a verb, and end all its processes after a time."""
    command = [sys.executable, "-m", "tools.logits_cache", verb, *flags]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    with TreeMemory([process.pid], _MEMORY_INTERVAL) as memory:
        if kill_after is not None:
            time.sleep(kill_after)
            os.killpg(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
    return Run(
        verb=verb,
        seconds=time.monotonic() - began,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        memory_mb=memory.together / 1e6,
        status=os.waitstatus_to_exitcode(status),
        killed=kill_after is not None,
    )


def _line(run: Run, size: int) -> str:
    if run.killed:
        return f"{run.verb:<8} killed after {run.seconds:.0f} s"
    return (
        f"{run.verb:<8} {run.seconds:7.1f} s  {run.cores:5.2f} cores  {run.memory_mb:6.0f} MB  "
        f"{size / 1e6 / run.seconds:7.0f} MB/s  status {run.status}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="where the caches lie")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--save-format", type=int, choices=(2, 3), default=2)
    parser.add_argument("--kill-after", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--verb", action="append", choices=VERBS, help="default: all of them")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
