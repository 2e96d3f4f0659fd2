# SPDX-License-Identifier: Apache-2.0
"""Writes a shard from the lines of its samples, one iteration in memory at a time."""

import contextlib
import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.fingerprint import LabelFingerprinter
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.payload import INDEX_SENTINEL, LOGPROB_SENTINEL
from megatron.training.distillation.save_format import TORCH_DTYPES, SaveFormat
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.spool import Spool
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p
from megatron.training.distillation.utils import ShardName, member_name, write_shard_tar
from tools.cache.imports.json_lines import read_line
from tools.cache.imports.server_formats import LineError, read_prompt
from tools.cache.imports.top_entries import Expected, TopEntries, tokens_key, top_entries


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all shards of an import share; picklable.

    Attributes:
        target: Directory of the cache, which exists.
        meta: The metadata of its shards, but for what each holds.
        save_format: How payloads are encoded.
        expected: What lines have.
        p: The mass that is kept of the top K; None for all.
        min_k: Entries kept whatever *p* says.
        paths: The files of lines.
        spool_dir: Where payloads wait until their shard is complete; None for memory.
    """

    target: str
    meta: bytes
    save_format: SaveFormat
    expected: Expected
    p: float | None
    min_k: int
    paths: tuple[str, ...]
    spool_dir: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWork:
    """A shard to write.

    Attributes:
        name: Its name.
        members: The samples of each iteration.
        lines: Of each iteration, the lines of its rows; of ``line_index.LINE``.
    """

    name: ShardName
    members: list[tuple[int, int]]
    lines: list[np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What became of a shard."""

    name: str
    size: int
    was_there: bool


def import_shard(work: ShardWork, recipe: Recipe) -> Written:
    """Write a shard. One that is there already is left alone: shards appear whole.

    Raises:
        ValueError: A shard of that name is there and is another one; or a line is no longer what
            it was.
        CacheFormatError: A shard of that name is there and damaged.
        OSError: A file cannot be read or written.
    """
    path = storage.join(recipe.target, str(work.name))
    if storage.exists(path):
        return Written(name=str(work.name), size=_size_if_same(path, work, recipe), was_there=True)
    encode = recipe.save_format.encoder()
    with contextlib.closing(Spool(recipe.spool_dir)) as spool:
        members: list[tuple[str, Content]] = [
            (
                member_name(start, end),
                spool.append(encode(*_rows(lines, recipe))),
            )
            for (start, end), lines in zip(work.members, work.lines, strict=True)
        ]
        meta = seal_meta(recipe.meta, str(work.name), members)
        storage.publish(path, lambda stream: write_shard_tar(stream, meta, members))
    return Written(name=str(work.name), size=_size_if_same(path, work, recipe), was_there=False)


def _size_if_same(path: str, work: ShardWork, recipe: Recipe) -> int:
    """Return the size of the shard at *path*, which must be of this import; its seal is checked."""
    with contextlib.closing(storage.open_read(path, whole=False)) as stream:
        try:
            there = OpenShard(path, work.name, stream, None)
        except CacheFormatError as error:
            raise CacheFormatError(
                f"{path} is there already: {error}. Set it aside to import it again."
            ) from error
        spans = [(member.start, member.end) for member in there.members]
        found = dataclasses.replace(there.meta, content=None).to_bytes()
        if found != recipe.meta or spans != work.members:
            raise ValueError(
                f"{path} is there already and was written with other settings: {found.decode()}, "
                f"here they are {recipe.meta.decode()}. Import to another directory."
            )
        return there.size


def _entries(line: np.void, recipe: Recipe) -> TopEntries:
    """Read a line again, which must be what it was."""
    path = recipe.paths[line["file"]]
    content = read_line(path, int(line["offset"]), int(line["size"]))
    try:
        entries = top_entries(read_prompt(content), recipe.expected)
        found = np.array([tokens_key(entries.tokens), entries.digest()], "S16")
        if (found != [line["key"], line["digest"]]).any():
            raise LineError("it says something else")
    except LineError as error:
        raise ValueError(
            f"{path} line {line['number']} is no longer what it was: {error}. Leave the files "
            "alone until the import has ended, and start it again."
        ) from error
    return entries


def _rows(
    lines: np.ndarray, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a payload is made of: values, ids, tails and fingerprints of n samples."""
    length, n = recipe.expected.positions, len(lines)
    dtype = TORCH_DTYPES[recipe.save_format.save_dtype]
    # (S, n, K), (S, n, K), (S, n), (n, S)
    values = torch.empty(length, n, recipe.expected.k, dtype=dtype)
    ids = torch.empty(values.shape, dtype=torch.int32)
    tail = torch.empty(length, n)
    labels = torch.empty(n, length, dtype=torch.int64)
    for row, line in enumerate(lines):
        entries = _entries(line, recipe)
        found = _kept(entries, recipe)
        values[:, row] = found.logprobs[:, 0]
        ids[:, row] = found.indices[:, 0]
        tail[:, row] = found.tail_logprob[:, 0]
        labels[row] = torch.from_numpy(entries.tokens[1:])
    # Rounding may make the marker of masked entries of one that is as small.
    masked = values == LOGPROB_SENTINEL
    ids.masked_fill_(masked, INDEX_SENTINEL)
    # As a dump does: of falling entries, those that any token keeps come first.
    width = int((~masked).any(dim=(0, 1)).sum())
    fingerprints = LabelFingerprinter(torch.arange(length), length)(labels)
    return values[..., :width], ids[..., :width], tail, fingerprints


def _kept(entries: TopEntries, recipe: Recipe) -> TeacherTopK:
    """Return the entries ``(S, 1, K)`` that are kept of a sample."""
    found = TeacherTopK(
        logprobs=torch.from_numpy(entries.logprobs).float().unsqueeze(1),
        indices=torch.from_numpy(entries.ids).unsqueeze(1),
        tail_logprob=torch.from_numpy(entries.tail_logprob).float().unsqueeze(1),
    )
    return found if recipe.p is None else apply_top_p(found, recipe.p, recipe.min_k)[0]
