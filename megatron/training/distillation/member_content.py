# SPDX-License-Identifier: Apache-2.0
"""The stored bytes of a member of a shard, in memory or wherever else they lie, pure."""

import io
import zlib
from typing import BinaryIO, Protocol


class StoredContent(Protocol):
    """Bytes that lie outside of this process's memory; ``len()`` tells how many."""

    @property
    def checksum(self) -> int:
        """CRC-32 of the bytes."""

    def __len__(self) -> int:
        """Return the number of bytes."""

    def open(self) -> BinaryIO:
        """Open what holds them, at their beginning; more may follow their end."""


type Content = bytes | StoredContent


def checksum(content: Content) -> int:
    """Return the CRC-32 of *content*."""
    return zlib.crc32(content) if isinstance(content, bytes) else content.checksum


def open_content(content: Content) -> BinaryIO:
    """Return a stream that stands at the beginning of *content*."""
    return io.BytesIO(content) if isinstance(content, bytes) else content.open()
