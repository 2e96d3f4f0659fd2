# SPDX-License-Identifier: Apache-2.0
"""Writes a shard again with payloads of another format, and proves that its rows are the same."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.training.distillation import eight_bit, storage
from megatron.training.distillation.frame_layout import FORMAT_VERSION_V3
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import (
    FORMAT_VERSION,
    INDEX_SENTINEL,
    LOGPROB_SENTINEL,
    MAX_VOCAB_SIZE,
    encode_logprobs_payload,
)
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.save_format import EIGHT_BIT
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.spool import Spool, SpooledBytes
from megatron.training.distillation.utils import (
    ShardName,
    read_meta_member,
    walk_tar,
    write_shard_tar,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a shard is converted to.

    Attributes:
        format_version: 2 or 3.
        eight_bit: Whether values become 8-bit codes, of format 3; else they stay as they are.
    """

    format_version: int
    eight_bit: bool = False

    def __post_init__(self) -> None:
        """Refuse what no format has."""
        if self.format_version not in (FORMAT_VERSION, FORMAT_VERSION_V3):
            raise ValueError(f"The format is {self.format_version}, expected 2 or 3.")
        if self.eight_bit and self.format_version != FORMAT_VERSION_V3:
            raise ValueError("8-bit values are of format 3: leave them out, or convert to 3.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What became of a shard."""

    name: str
    read_bytes: int
    written_bytes: int
    was_there: bool


class ConversionError(Exception):
    """A shard cannot be converted, or was not converted faithfully."""


def convert_shard(
    source: str, target: str, name: ShardName, to: Target, spool_dir: str | None
) -> Converted:
    """Write shard *name* of directory *source* again in *target*.

    One member is held in memory at a time. A shard that is there already is left alone: shards
    appear whole, so it is complete.

    Args:
        source: Directory of the cache.
        target: Another directory, which exists.
        name: The shard.
        to: What it is converted to.
        spool_dir: Where the new payloads wait until all of the shard are there; None for memory.

    Raises:
        ConversionError: A shard that is there already is another one; or ids do not fit the format.
        CacheFormatError: The shard is damaged.
        OSError: It cannot be read or written.
    """
    path, new_path = (storage.join(directory, str(name)) for directory in (source, target))
    with contextlib.closing(storage.open_read(path)) as stream:
        shard = OpenShard(path, name, stream, None)
        size = shard.size
        if storage.exists(new_path):
            return Converted(
                name=str(name),
                read_bytes=size,
                written_bytes=_size_if_converted(shard, new_path, to),
                was_there=True,
            )
        with contextlib.closing(Spool(spool_dir)) as spool:
            converted = [_convert_member(shard, member, to, spool) for member in shard.members]
            members: list[tuple[str, Content]] = [(one.name, one.payload) for one in converted]
            raw_meta = read_meta_member(stream, [next(walk_tar(stream))], path)
            meta = seal_meta(_converted_meta(raw_meta, to), str(name), members)
            storage.publish(new_path, lambda out: write_shard_tar(out, meta, members))
    written = _verify(new_path, name, [one.digest for one in converted])
    return Converted(name=str(name), read_bytes=size, written_bytes=written, was_there=False)


class _Member(NamedTuple):
    name: str
    payload: SpooledBytes
    digest: bytes
    """Of the rows that the payload must have."""


def _convert_member(shard: OpenShard, member: MemberRows, to: Target, spool: Spool) -> _Member:
    rows = unmasked(shard.decode(member).unpack_all())
    try:
        payload = encode(rows, to, _vocab_size(shard))
    except ValueError as error:
        raise ConversionError(
            f"Member {member.entry.name} of {shard.path} has no place in format "
            f"{to.format_version}: {error}"
        ) from error
    return _Member(member.entry.name, spool.append(payload), digest(_as_read(rows, to)))


def encode(rows: TeacherRows, to: Target, vocab_size: int) -> bytes:
    """Return the payload of *rows*, whose entries keep their order.

    Raises:
        ValueError: They do not fit the format.
    """
    parts = rows.values, rows.indices, rows.tail_logprob, rows.label_fingerprints
    if to.format_version == FORMAT_VERSION:
        return encode_logprobs_payload(*parts)
    return encode_framed_payload(
        *parts, vocab_size=vocab_size, sort_ties=False, eight_bit=to.eight_bit
    )


def unmasked(rows: TeacherRows) -> TeacherRows:
    """Return *rows* whose masked entries have the id -1, as a teacher gives them."""
    masked = rows.values == LOGPROB_SENTINEL
    return dataclasses.replace(rows, indices=rows.indices.masked_fill(masked, INDEX_SENTINEL))


def _as_read(rows: TeacherRows, to: Target) -> TeacherRows:
    """Return *rows* with the values that their new payload stands for."""
    if not to.eight_bit:
        return rows
    values = rows.values.half().numpy()
    codes = torch.from_numpy(eight_bit.from_codes(eight_bit.to_codes(values)))
    masked = rows.values == LOGPROB_SENTINEL
    return dataclasses.replace(rows, values=codes.masked_fill(masked, LOGPROB_SENTINEL))


def digest(rows: TeacherRows) -> bytes:
    """Return a digest of shape, type and bits of everything in *rows*."""
    found = hashlib.blake2b(digest_size=16)
    for part in (rows.values, rows.indices, rows.tail_logprob, rows.label_fingerprints):
        found.update(repr(part if part is None else (part.dtype, tuple(part.shape))).encode())
        if part is not None:
            found.update(part.contiguous().view(torch.uint8).numpy())
    return found.digest()


def _vocab_size(shard: OpenShard) -> int:
    """Return a number that all ids are below."""
    manifest = shard.meta.manifest
    known = None if manifest is None else manifest.padded_vocab_size or manifest.vocab_size
    return MAX_VOCAB_SIZE if known is None else max(known, 1)


def _converted_meta(meta: bytes, to: Target) -> bytes:
    """Return the metadata with the new format; everything else stays as it is."""
    content: dict[str, Any] = json.loads(meta)
    saver = content["saver"]
    saver["format_version"] = to.format_version
    if to.eight_bit:
        saver["save_dtype"] = EIGHT_BIT
    elif to.format_version == FORMAT_VERSION and saver.get("save_dtype") == EIGHT_BIT:
        saver["save_dtype"] = "fp16"  # what the codes stand for
    return json.dumps(content, separators=(",", ":")).encode()


def _size_if_converted(shard: OpenShard, path: str, to: Target) -> int:
    """Return the size of the shard at *path*; it must be what *shard* would become."""
    with contextlib.closing(storage.open_read(path, whole=False)) as stream:
        there = OpenShard(path, shard.name, stream, None)
        same = (
            there.meta.hash == shard.meta.hash
            and there.format_version == to.format_version
            and _spans(there.members) == _spans(shard.members)
        )
        if not same:
            raise ConversionError(
                f"{path} is there already, and is not {shard.path} in format "
                f"{to.format_version}. Convert to an empty directory."
            )
        return there.size


def _spans(members: Sequence[MemberRows]) -> list[tuple[int, int]]:
    return [(member.start, member.end) for member in members]


def _verify(path: str, name: ShardName, digests: Sequence[bytes]) -> int:
    """Read back what was written and return its size.

    Raises:
        ConversionError: It does not have the rows with these *digests*.
    """
    with contextlib.closing(storage.open_read(path)) as stream:
        written = OpenShard(path, name, stream, None)
        for member, expected in zip(written.members, digests, strict=True):
            if digest(unmasked(written.decode(member).unpack_all())) != expected:
                raise ConversionError(
                    f"Member {member.entry.name} of {path} does not have the rows that it was "
                    "made of. Remove the file: it must not be trained on."
                )
        return written.size
