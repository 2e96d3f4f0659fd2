# SPDX-License-Identifier: Apache-2.0
"""The seal of a shard: its own name, its size and its members' checksums, kept in its metadata.

A reader that finds the seal intact knows that the shard is whole, that it has the name it was
written under, and that each member is the one that belongs there.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.member_content import Content, checksum

CONTENT_KEY = "content"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContent:
    """What a shard holds, as its metadata says."""

    name: str
    """The file's base name."""
    size: int
    """Bytes of the whole archive."""
    members: int
    """Members after the metadata."""
    checksums: tuple[int, ...]
    """CRC-32 of each of them, as stored."""

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], where: str) -> ShardContent | None:
        """Return what the JSON of a ``_meta.json`` says; None if it says nothing.

        Raises:
            CacheFormatError: The seal is not one, or not of this metadata (found in *where*).
        """
        content = meta.get(CONTENT_KEY)
        if content is None:
            return None
        if not _is_seal(content):
            raise CacheFormatError(
                f"The metadata in {where} has {CONTENT_KEY} {str(content)[:80]!r}, expected name, "
                "bytes, members and a crc32 for each member."
            )
        found = _checksum_of_meta(meta)
        if found != content["meta_crc32"]:
            raise CacheFormatError(
                f"The metadata in {where} is damaged: its checksum is {found}, the recorded one "
                f"{content['meta_crc32']}."
            )
        return cls(
            name=content["name"],
            size=content["bytes"],
            members=content["members"],
            checksums=tuple(content["crc32"]),
        )


def seal_meta(meta_bytes: bytes, name: str, members: Sequence[tuple[str, Content]]) -> bytes:
    """Return *meta_bytes*, a JSON object, with the content of the shard *name* described.

    An older description is replaced; everything else stays as it is.

    Raises:
        CacheFormatError: *meta_bytes* is not a JSON object.
    """
    try:
        meta = json.loads(meta_bytes)
    except (ValueError, RecursionError) as error:
        raise CacheFormatError(f"The metadata of {name} is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CacheFormatError(f"The metadata of {name} is not a JSON object.")
    meta.pop(CONTENT_KEY, None)
    content = {
        "name": name,
        "bytes": 0,
        "members": len(members),
        "crc32": [checksum(data) for _, data in members],
        "meta_crc32": _checksum_of_meta(meta),
    }
    while True:  # the size has digits of its own; it only grows, and by few of them
        sealed = _compact_json({**meta, CONTENT_KEY: content}).encode()
        size = tar_size([len(sealed), *(len(data) for _, data in members)])
        if size == content["bytes"]:
            return sealed
        content["bytes"] = size


def tar_size(sizes: Iterable[int]) -> int:
    """Return the bytes of an archive with members of these *sizes*, as ``tarfile`` writes it."""
    block, record = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
    used = sum(block + -(-size // block) * block for size in sizes) + 2 * block
    return -(-used // record) * record


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in meta.items() if key != CONTENT_KEY}
    return zlib.crc32(_compact_json(rest).encode())


def _is_seal(content: Any) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return False
    numbers = [content.get(key) for key in ("bytes", "members", "meta_crc32")]
    checksums = content.get("crc32")
    if not isinstance(checksums, list) or len(checksums) != content.get("members"):
        return False
    return all(type(number) is int and number >= 0 for number in (*numbers, *checksums))


def _compact_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
