# SPDX-License-Identifier: Apache-2.0
"""Writes some shards again as a teacher with other flags would have, and proves what they hold."""

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.training.distillation import storage
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import (
    FORMAT_VERSION,
    MAX_VOCAB_SIZE,
    decode_packed_rows,
    encode_logprobs_payload,
)
from megatron.training.distillation.payload_v3 import decode_framed_payload, encode_framed_payload
from megatron.training.distillation.save_format import EIGHT_BIT
from megatron.training.distillation.shard_content import CONTENT_KEY, seal_meta
from megatron.training.distillation.spool import Spool, SpooledBytes
from megatron.training.distillation.utils import (
    SaverSettings,
    ShardName,
    member_name,
    read_member,
    write_shard_tar,
)
from tools.cache.conversion_target import Target
from tools.cache.coverage import Span
from tools.cache.entry_change import EntryChange, trimmed, unmasked
from tools.cache.regrouping import Layout
from tools.cache.source_rows import READ_ERRORS, MissingRows, Rows, Source, SourceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Shards that are written together, as they are made of the same members; picklable.

    Attributes:
        names: The shards, of the same samples and different DP ranks.
        sources: What they are made of.
        layout: What their members hold; None keeps the members and rows of the only source.
        old_ranks: The DP ranks that have recorded the rows.
    """

    names: tuple[ShardName, ...]
    sources: tuple[Source, ...]
    layout: Layout | None = None
    old_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A shard that is there; *read_bytes* are its share of the source."""

    name: str
    read_bytes: int
    written_bytes: int
    was_there: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Why a shard was not converted."""

    name: str
    reason: str


class Encoding(NamedTuple):
    """A format version, 2 or 3, and whether values are 8-bit codes, of format 3."""

    format_version: int
    eight_bit: bool = False

    @classmethod
    def of(cls, settings: SaverSettings) -> "Encoding":
        """Return the one that settings of format 2 or 3 tell."""
        return cls(settings.format_version, settings.save_dtype == EIGHT_BIT)


class ConversionError(Exception):
    """A shard cannot be converted, or was not converted faithfully."""


def convert(
    work: Work, directory: str, to: Target, spool_dir: str | None
) -> tuple[Converted | Failed, ...]:
    """Write the shards of *work* in *directory*, which exists; return what became of each.

    A few decoded members are held in memory at a time. A shard that is there already is left
    alone: shards appear whole and proven, so it is complete. What is wrong with one shard does not
    keep the others from being converted.

    Args:
        work: What is to be written, of what.
        directory: Where.
        to: What it becomes.
        spool_dir: Where payloads wait until all of their shard are there; None for memory.
    """
    with (
        SourceRows(work.sources) as source,
        contextlib.closing(Spool(spool_dir)) as spool,
    ):
        shards = [_NewShard(name, work, source, directory, to, spool) for name in work.names]
        for shard in shards:
            shard.attempt(shard.begin)
        # All ranks' members of one iteration come of the same members of the source.
        for _ in range(max(shard.members_left for shard in shards)):
            for shard in shards:
                shard.attempt(shard.add_member)
        for shard in shards:
            shard.attempt(shard.finish)
        return tuple(shard.result for shard in shards if shard.result is not None)


class _NewMember(NamedTuple):
    span: Span
    parts: list[Rows]


class _NewShard:
    """A shard that is being written."""

    def __init__(
        self,
        name: ShardName,
        work: Work,
        source: SourceRows,
        directory: str,
        to: Target,
        spool: Spool,
    ) -> None:
        self.name = name
        self.result: Converted | Failed | None = None
        self._path = storage.join(directory, str(name))
        self._work = work
        self._source = source
        self._to = to
        self._spool = spool
        self._left: list[_NewMember] = []
        self._payloads: list[tuple[str, SpooledBytes]] = []
        self._read_bytes = 0.0

    @property
    def members_left(self) -> int:
        """How many members have not been added."""
        return len(self._left)

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step unless it has been told what became of the shard; an error is told."""
        if self.result is not None:
            return
        try:
            step()
        except (ConversionError, MissingRows, ValueError, *READ_ERRORS) as error:
            self.result = Failed(name=str(self.name), reason=str(error))
        if self.result is not None:
            for member in self._left:
                self._source.give_up(member.parts)
            self._left = []

    def begin(self) -> None:
        """Find the rows, unless the shard is there."""
        if not self._work.sources:
            raise MissingRows(
                f"Samples {Span(self.name.start, self.name.end)} were recorded by DP rank "
                f"{', '.join(map(str, self._work.old_ranks))}, of which there is no shard: "
                "complete the cache, or dump these samples again."
            )
        first = self._source.first_shard()
        self._settings = self._to.settings_for(first.meta.saver)
        self._change = EntryChange.between(first.meta.saver, self._settings)
        self._vocab_size = _vocab_size(first)
        self._meta = _new_meta(first, self._settings)
        self._left = self._find_members()
        for member in self._left:
            self._source.announce(member.parts)
        self._read_bytes = sum(map(self._share_of_source, self._left))
        if storage.exists(self._path):
            self._finish(self._size_if_same(), was_there=True)

    def _find_members(self) -> list[_NewMember]:
        if self._work.layout is None:
            (source,) = self._work.sources
            shard = self._source.shard(source)
            found = []
            for member in shard.members:
                rows = tuple(range((member.end - member.start) // shard.dp_size))
                span = Span(member.start, member.end)
                found.append(_NewMember(span, [Rows(source, member, rows)]))
            return found
        layout = self._work.layout
        return [
            _NewMember(span, self._source.find(layout.blocks(span, self.name.dp_rank)))
            for span in layout.members(Span(self.name.start, self.name.end))
        ]

    def _share_of_source(self, member: _NewMember) -> float:
        """Return how many bytes of the source's files a member stands for."""
        size = 0.0
        for part in member.parts:
            shard = self._source.shard(part.source)
            rows = (part.member.end - part.member.start) // shard.dp_size
            size += part.member.entry.size * len(part.rows) / rows
        return size

    def add_member(self) -> None:
        """Encode the next member."""
        span, parts = self._left[0]
        rows = unmasked(self._source.take(parts))
        try:
            rows = self._change.apply(rows)
            if self._change.drops or self._work.layout is not None:
                rows = trimmed(rows)
            payload = encode(rows, Encoding.of(self._settings), self._vocab_size)
        except ValueError as error:
            raise ConversionError(
                f"Samples {span} of DP rank {self.name.dp_rank} have no place in format "
                f"{self._settings.format_version}: {error}"
            ) from error
        spooled = self._spool.append(payload)
        with contextlib.closing(spooled.open()) as stream:
            stored = decode(stream.read(len(spooled)), self._settings.format_version)
        if not same_rows(unmasked(stored), rows):
            raise ConversionError(
                f"The payload of samples {span} of DP rank {self.name.dp_rank} does not have the "
                "rows that it was made of, so it is not written. Please report this."
            )
        self._payloads.append((member_name(*span), spooled))
        self._source.give_up(parts)
        del self._left[0]

    def finish(self) -> None:
        """Publish the shard and read it back."""
        members: list[tuple[str, Content]] = list(self._payloads)
        meta = seal_meta(self._meta, str(self.name), members)
        storage.publish(self._path, lambda out: write_shard_tar(out, meta, members))
        self._finish(self._read_back(), was_there=False)

    def _finish(self, size: int, *, was_there: bool) -> None:
        self.result = Converted(
            name=str(self.name),
            read_bytes=round(self._read_bytes),
            written_bytes=size,
            was_there=was_there,
        )

    def _read_back(self) -> int:
        """Compare the shard with the payloads that it was written of; return its size."""
        with contextlib.closing(storage.open_read(self._path)) as stream:
            written = OpenShard(self._path, self.name, stream, None)
            for member, (_, payload) in zip(written.members, self._payloads, strict=True):
                if zlib.crc32(read_member(stream, member.entry)) != payload.checksum:
                    raise ConversionError(
                        f"Member {member.entry.name} of {self._path} was not stored as it was "
                        "written. Remove the file, and check the disk."
                    )
            return written.size

    def _size_if_same(self) -> int:
        """Return the size of the shard that is there; it must be what this one would become."""
        with contextlib.closing(storage.open_read(self._path, whole=False)) as stream:
            there = OpenShard(self._path, self.name, stream, None)
            different = [
                f"{key} is {found!r} there, {expected!r} here"
                for key, found, expected in _differences(there.read_meta(), self._meta)
            ]
            spans = [(member.start, member.end) for member in there.members]
            if spans != [tuple(member.span) for member in self._left]:
                different.append("its members are of other samples")
            if different:
                raise ConversionError(
                    f"{self._path} is there already, and is not what would be written: "
                    f"{'; '.join(different)}. Convert to an empty directory."
                )
            return there.size


def encode(rows: TeacherRows, encoding: Encoding, vocab_size: int | None = None) -> bytes:
    """Return the payload of *rows*, whose entries keep their order.

    Args:
        rows: Masked entries have the id -1.
        encoding: The format.
        vocab_size: A number that all ids are below; None for what they need.

    Raises:
        ValueError: They do not fit the format.
    """
    parts = rows.values, rows.indices, rows.tail_logprob, rows.label_fingerprints
    if encoding.format_version == FORMAT_VERSION:
        return encode_logprobs_payload(*parts)
    if vocab_size is None:
        vocab_size = max(MAX_VOCAB_SIZE, 1 << int(rows.indices.max()).bit_length())
    return encode_framed_payload(
        *parts, vocab_size=vocab_size, sort_ties=False, eight_bit=encoding.eight_bit
    )


def decode(payload: bytes, format_version: int) -> TeacherRows:
    """Return the rows of a payload."""
    if format_version == FORMAT_VERSION:
        return decode_packed_rows(payload).unpack_all()
    return decode_framed_payload(payload).unpack_all()


def same_rows(rows: TeacherRows, others: TeacherRows) -> bool:
    """Return whether shape, type and bits of everything in two sets of rows are the same."""
    for part, other in (
        (rows.values, others.values),
        (rows.indices, others.indices),
        (rows.tail_logprob, others.tail_logprob),
        (rows.label_fingerprints, others.label_fingerprints),
    ):
        if part is None or other is None:
            if part is not other:
                return False
        elif part.dtype != other.dtype or not torch.equal(_bits(part), _bits(other)):
            return False
    return True


def _bits(part: torch.Tensor) -> torch.Tensor:
    """Return numbers that are equal where the bits of *part* are, unlike floats."""
    if not part.is_floating_point():
        return part
    return part.view(torch.int16 if part.itemsize == 2 else torch.int32)


def _vocab_size(shard: OpenShard) -> int | None:
    """Return a number that all ids are below; None if the metadata tell none."""
    manifest = shard.meta.manifest
    known = None if manifest is None else manifest.padded_vocab_size or manifest.vocab_size
    return None if known is None else max(known, 1)


def _new_meta(source: OpenShard, settings: SaverSettings) -> bytes:
    """Return the metadata of *source* with other settings; everything else stays as it is."""
    legacy = source.format_version not in (FORMAT_VERSION, FORMAT_VERSION + 1)
    content: dict[str, Any] = json.loads(source.meta.to_bytes() if legacy else source.read_meta())
    content.pop(CONTENT_KEY, None)
    before, after = map(dataclasses.asdict, (source.meta.saver, settings))
    content["saver"] |= {key: after[key] for key in after if after[key] != before[key]}
    return json.dumps(content, separators=(",", ":")).encode()


def _differences(there: bytes, here: bytes) -> Sequence[tuple[str, Any, Any]]:
    """Return what two metadata do not share: name and both values."""
    found, expected = json.loads(there), json.loads(here)
    found.pop(CONTENT_KEY, None)
    flat = [{**content, **content.pop("saver")} for content in (found, expected)]
    return [
        (key, flat[0].get(key), flat[1].get(key))
        for key in dict.fromkeys((*flat[0], *flat[1]))
        if flat[0].get(key) != flat[1].get(key)
    ]
