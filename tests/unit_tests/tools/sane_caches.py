# SPDX-License-Identifier: Apache-2.0
"""Small caches whose log-probabilities are those of a distribution, whole or damaged."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.payload import encode_logprobs_payload
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta, member_name
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS

VOCAB, SEQ, K, GBS, DP = 40, 6, 8, 4, 2
SAVER = SaverSettings(
    k=K,
    p=None,
    min_k=1,
    save_dtype="fp16",
    format_version=2,
    mbs_save=1,
    dp_size_save=DP,
    gbs_save=GBS,
)
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows_of(seed: int, positions: int = SEQ, rows: int = GBS // DP) -> Rows:
    """Return the top K of distributions over VOCAB tokens, and the tails."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((positions, rows, VOCAB), generator=generator, dtype=torch.float64)
    values, ids = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    return values[..., :K].half(), ids[..., :K], values[..., K:].logsumexp(-1).float()


def encode(rows: Sequence[torch.Tensor], version: int) -> bytes:
    if version == 2:
        return encode_logprobs_payload(*rows)
    return encode_framed_payload(*rows, vocab_size=VOCAB, sort_ties=False)


def meta_of(version: int, *, seed: int = 1, manifest: bool = True) -> bytes:
    """Return the metadata of a run."""
    saver: dict[str, Any] = {name: getattr(SAVER, name) for name in SAVER.__slots__}
    saver |= {"format_version": version}
    run = RunManifest(sequence_length=SEQ, vocab_size=VOCAB) if manifest else None
    identifiers = IDENTIFIERS | {"seed": seed, "train_samples": 24}
    return ShardMeta.for_run(identifiers, SaverSettings(**saver), run).to_bytes()


def write(
    cache: Path,
    version: int,
    rank: int,
    start: int,
    end: int,
    *,
    changed: dict[int, Sequence[torch.Tensor]] | None = None,
    left_out: Sequence[int] = (),
    seed: int = 1,
) -> Path:
    """Write a shard; *changed* has other rows of a member by its start, *left_out* are holes."""
    cache.mkdir(exist_ok=True, parents=True)
    members = [
        (
            member_name(first, first + GBS),
            encode((changed or {}).get(first, rows_of(1000 * rank + first)), version),
        )
        for first in range(start, end, GBS)
        if first not in left_out
    ]
    path = cache / f"dp{rank}__{start}-{end}.tar"
    write_batched_tar(str(path), meta_of(version, seed=seed), members)
    return path


def write_cache(cache: Path, version: int) -> Path:
    """Write samples 0 to 23, three shards of two members for each of two DP ranks."""
    for rank in range(DP):
        for start in (0, 8, 16):
            write(cache, version, rank, start, start + 8)
    return cache


def unsealed(path: Path) -> None:
    """Take the seal off a shard, as other writers have none."""
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]  # type: ignore[union-attr]
    meta = json.loads(members[0][1])
    del meta["content"], meta["manifest"]
    data = json.dumps(meta).encode()
    with tarfile.open(path, "w") as tar:
        import io

        for info, content in [(members[0][0], data), *members[1:]]:
            new = tarfile.TarInfo(info.name)
            new.size = len(content)
            tar.addfile(new, io.BytesIO(content))


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def members_of(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()
