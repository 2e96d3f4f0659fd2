# SPDX-License-Identifier: Apache-2.0
"""Format v1, read-only: what the saver inside megatron-core 0.19 writes.

A v1 shard ``cp0_dp{D}__{I}.tar`` counts iterations, up to its last one I, and the payload of
iteration ``i``, the member ``{i}.pt.zst``, is a list of microbatches. Under the teacher's batch
sizes that member is samples ``[i * gbs, (i + 1) * gbs)``, and its microbatches one after the other
are the rows of a v2 member. So the classes here only translate names, metadata and payloads, and
the reader of v2 does the rest.

v1 does not record its batch sizes: the student's must be the teacher's, and every payload that is
used is checked against them. Only the data-parallel size may change.

The package uses :func:`open_directory` and :func:`is_shard_name` of this module and nothing else;
tools that have no student take the batch sizes from the payloads, by :func:`recorded_layout`.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherLayoutError
from megatron.training.distillation.manifest import ExpectedRun
from megatron.training.distillation.open_shard import REPAIR_HINT, MemberRows, OpenShard
from megatron.training.distillation.payload import (
    LOGPROB_SENTINEL,
    MAX_PAYLOAD_BYTES,
    VALUE_DTYPES,
    PackedRows,
    check_tensor,
    load_archive,
)
from megatron.training.distillation.shard_directory import ShardDirectory
from megatron.training.distillation.targets import LoadLayout
from megatron.training.distillation.utils import (
    LOGPROBS_TAR_MEMBER_SUFFIX,
    SaverSettings,
    ShardMeta,
    ShardName,
    TarMember,
    parse_meta,
    read_member,
    read_meta_member,
    walk_tar,
)

logger = logging.getLogger(__name__)

_SHARD_RE = re.compile(r"cp(\d+)_dp(\d+)__(\d+)\.tar", re.ASCII)
_MEMBER_RE = re.compile(rf"(\d+){re.escape(LOGPROBS_TAR_MEMBER_SUFFIX)}", re.ASCII)
_PAYLOAD_KEYS = ("values", "indices_low", "bit_17")
_HASHED_IDENTIFIERS = {"seed", "train_samples", "blend"}


def is_shard_name(basename: str) -> bool:
    """Return whether *basename* is the name of a live v1 shard."""
    return _parse_name(basename) is not None


def open_directory(
    path: str, layout: LoadLayout, start_sample: int, names: Sequence[str] | None = None
) -> ShardDirectory:
    """Find the shards of a cache of either format. Those of v2 hide those of v1 beside them.

    Args:
        path: Directory of the cache, a local path or ``msc://`` URL.
        layout: The student's batches, which a v1 cache must have been recorded with.
        start_sample: Where reading starts.
        names: The directory's listing; None lists it here, once.

    Raises:
        OSError: The directory cannot be listed.
        TeacherLayoutError: It holds v1 shards only, and this layout or start does not suit them.
    """
    if names is None:
        names = storage.list_names(path)
    directory = ShardDirectory(path, names)
    if directory.shards or not any(map(is_shard_name, names)):
        return directory
    if start_sample % layout.gbs:
        raise TeacherLayoutError(
            f"{path} holds shards of format v1, which count iterations of {layout.gbs} samples "
            f"(--global-batch-size), and sample {start_sample} is not the start of one. Resume "
            "from a checkpoint between iterations, or dump the teacher again."
        )
    return LegacyDirectory(path, layout, names)


def recorded_layout(path: str, names: Sequence[str]) -> LoadLayout:
    """Return the batch sizes that a v1 cache was recorded with, as its first payload tells them.

    The layout is that of DP rank 0 of the teacher.

    Args:
        path: Directory of the cache.
        names: Its listing, with at least one v1 shard.

    Raises:
        CacheFormatError: No shard has a payload that can be read; says why the last one cannot.
        OSError: A shard cannot be read.
    """
    shards = sorted(filter(None, map(_parse_name, names)))
    dp_size = max(shard.dp_rank for shard in shards) + 1
    error = CacheFormatError(f"No shard of {path} has a payload.")
    for shard in shards:
        shard_path = storage.join(path, str(shard))
        with contextlib.closing(storage.open_read(shard_path)) as stream:
            try:
                return _layout_of_first_payload(stream, dp_size)
            except CacheFormatError as found:
                error = CacheFormatError(
                    f"The batch sizes of {path} are in its payloads, and none of them can be read; "
                    f"{shard_path} is damaged: {found}. {REPAIR_HINT}"
                )
    raise error


def _layout_of_first_payload(stream: BinaryIO, dp_size: int) -> LoadLayout:
    for entry in walk_tar(stream):
        if _MEMBER_RE.fullmatch(entry.name):
            microbatches = _microbatches(read_member(stream, entry), MAX_PAYLOAD_BYTES)[0]
            mbs = microbatches[0].shape[1]
            return LoadLayout(
                dp_rank=0, dp_size=dp_size, mbs=mbs, gbs=len(microbatches) * dp_size * mbs
            )
    raise CacheFormatError("it has no payload")


class _Name(NamedTuple):
    cp_rank: int
    dp_rank: int
    last_iteration: int

    def __str__(self) -> str:
        return f"cp{self.cp_rank}_dp{self.dp_rank}__{self.last_iteration}.tar"


def _parse_name(basename: str) -> _Name | None:
    match = _SHARD_RE.fullmatch(basename)
    if match is None:
        return None
    name = _Name(*map(int, match.groups()))
    return name if str(name) == basename else None


class LegacyDirectory(ShardDirectory):
    """The live v1 shards of a cache, addressed by sample under the student's global batch size.

    Raises:
        TeacherLayoutError: There is a shard of a context-parallel rank above 0, or none of a DP
            rank below the highest one.
    """

    def __init__(self, path: str, layout: LoadLayout, names: Sequence[str] | None = None) -> None:
        self._layout = layout
        self.dp_size = 0
        super().__init__(path, names)
        logger.warning(
            "%s holds teacher shards of format v1, which is deprecated: it can only be read with "
            "the teacher's batch sizes. Dump the teacher again to get the current format.",
            path,
        )

    def _parse_names(self, names: Sequence[str]) -> list[ShardName]:
        """Return the shards; one begins where the one before it of the same DP rank ends."""
        last_iterations: dict[int, list[int]] = {}
        for name in filter(None, map(_parse_name, names)):
            if name.cp_rank:
                raise TeacherLayoutError(
                    f"Teacher shard {name} in {self.path} is of context-parallel rank "
                    f"{name.cp_rank}, expected rank 0 only: shards of format v1 that were recorded "
                    "with context parallelism hold parts of sequences and cannot be read. Dump "
                    "the teacher again."
                )
            last_iterations.setdefault(name.dp_rank, []).append(name.last_iteration)
        self.dp_size = max(last_iterations, default=-1) + 1
        if missing := sorted(set(range(self.dp_size)) - last_iterations.keys()):
            raise TeacherLayoutError(
                f"{self.path} has shards of DP rank {self.dp_size - 1}, so it was recorded with "
                f"{self.dp_size} DP ranks, but no shard of DP rank {', '.join(map(str, missing))} "
                f"(expected names like {_Name(0, missing[0], last_iterations[self.dp_size - 1][0])}"
                "). Complete the cache."
            )
        gbs = self._layout.gbs
        shards = []
        for rank, iterations in last_iterations.items():
            begin = 0
            for end in sorted(iteration + 1 for iteration in iterations):
                shards.append(ShardName(rank, begin * gbs, end * gbs))
                begin = end
        return shards

    def file_name(self, shard: ShardName) -> str:
        """Return the basename of the file of *shard*."""
        return str(_Name(0, shard.dp_rank, shard.end // self._layout.gbs - 1))

    def open_shard(
        self,
        shard: ShardName,
        stream: BinaryIO,
        identity: ExpectedRun | None,
        *,
        with_members: bool = True,
    ) -> OpenShard:
        """Verify *shard*, whose content is *stream*, and find its members if they are wanted."""
        if identity is not None and self._layout.seq_length is not None:
            identity = identity.with_identifiers(sequence_length=self._layout.seq_length)
        return LegacyShard(
            self.path_of(shard),
            shard,
            stream,
            identity,
            layout=self._layout,
            dp_size=self.dp_size,
            with_members=with_members,
        )

    def describe(self) -> str:
        """Return in words what there is; only the shards' members tell the covered samples."""
        return f"shards of format v1 up to sample {self.end - 1}"


class LegacyShard(OpenShard):
    """An open v1 shard. Its batch sizes are the student's until a payload shows otherwise."""

    def __init__(
        self,
        path: str,
        name: ShardName,
        stream: BinaryIO,
        identity: ExpectedRun | None,
        *,
        layout: LoadLayout,
        dp_size: int,
        with_members: bool = True,
    ) -> None:
        self._saver = SaverSettings(
            format_version=1, mbs_save=layout.mbs, dp_size_save=dp_size, gbs_save=layout.gbs
        )
        super().__init__(path, name, stream, identity, with_members=with_members)

    def _read_meta(self, index: list[TarMember]) -> ShardMeta:
        """Return the identifiers with the hash that v2 computes over them; v1's covers one more."""
        content = parse_meta(
            read_meta_member(self._stream, index, self.path), self.path, versions=(None, 1)
        )
        settings = {key: content["saver"].get(key) for key in ("k", "p", "min_k", "save_dtype")}
        self._saver = replace(self._saver, **settings)
        identifiers = content.get("identifiers")
        if not isinstance(identifiers, dict) or not identifiers.keys() >= _HASHED_IDENTIFIERS:
            return ShardMeta(hash=None, identifiers=None, saver=self._saver)
        return ShardMeta.for_run(identifiers, self._saver)

    def _check_members(self, index: list[TarMember]) -> list[MemberRows]:
        gbs = self._saver.gbs_save
        members: list[MemberRows] = []
        for entry in index:
            match = _MEMBER_RE.fullmatch(entry.name)
            if match is None:
                continue
            start = int(match[1]) * gbs
            if start >= self.name.end or (members and start < members[-1].end):
                raise CacheFormatError(
                    f"Teacher shard {self.path} is damaged: member {entry.name} does not fit, "
                    f"expected ascending iterations up to {self.name.end // gbs - 1}. {REPAIR_HINT}"
                )
            members.append(MemberRows(start, start + gbs, entry))
        return members

    def _parse(self, data: bytes, max_bytes: int) -> PackedRows:
        values, low, high = _microbatches(data, max_bytes)
        self._check_batch_sizes(len(values), values[0].shape[1])
        high_bits = np.packbits(_join(high, True).numpy(), axis=-1)
        return PackedRows(
            values=_join(values, LOGPROB_SENTINEL),
            indices_low=_join([ids.view(torch.int16) for ids in low], -1).view(torch.uint16),
            high_bits=torch.from_numpy(high_bits),
            tail_logprob=None,
        )

    def _check_batch_sizes(self, microbatches: int, mbs: int) -> None:
        gbs = microbatches * self.dp_size * mbs
        for flag, saved, here in (
            ("--micro-batch-size", mbs, self._saver.mbs_save),
            ("--global-batch-size", gbs, self._saver.gbs_save),
        ):
            if saved != here:
                raise TeacherLayoutError(
                    f"Teacher shard {self.path} was recorded with {flag} {saved} ({microbatches} "
                    f"microbatches of {mbs} samples on each of {self.dp_size} DP ranks), here it "
                    f"is {here}. Format v1 allows only the data-parallel size to change: use "
                    f"{flag} {saved}, or dump the teacher again."
                )


def _microbatches(data: bytes, max_bytes: int) -> list[list[torch.Tensor]]:
    """Return values, low halves and bits of the ids in a payload, each by microbatch."""
    payload = load_archive(data, max_bytes)
    content = payload if isinstance(payload, dict) else {}
    lists = [part for key in _PAYLOAD_KEYS if isinstance(part := content.get(key), list)]
    if len(lists) < len(_PAYLOAD_KEYS) or len(set(map(len, lists))) > 1 or not lists[0]:
        raise CacheFormatError(
            f"its {', '.join(_PAYLOAD_KEYS)} are not lists with one tensor per microbatch"
        )
    values, low, high = lists
    for value, ids, bits in zip(values, low, high, strict=True):
        check_tensor("values", value, VALUE_DTYPES)
        check_tensor("indices_low", ids, (torch.uint16,), shape=value.shape)
        check_tensor("bit_17", bits, (torch.bool,), shape=value.shape)
    kinds = {(value.shape[:2], value.dtype) for value in values}
    if len(kinds) > 1:
        raise CacheFormatError(f"its microbatches differ in (S, mbs) or dtype: {kinds}")
    return lists


def _join(parts: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
    """Concatenate microbatches ``(S, mbs, K)``, the narrower ones filled up to the largest K."""
    seq, mbs, _ = parts[0].shape
    width = max(part.shape[2] for part in parts)
    joined = parts[0].new_full((seq, mbs * len(parts), width), fill)
    for microbatch, part in enumerate(parts):
        rows = slice(microbatch * mbs, (microbatch + 1) * mbs)
        joined[:, rows, : part.shape[2]] = part.detach()
    return joined
