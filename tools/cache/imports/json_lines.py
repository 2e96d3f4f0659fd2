# SPDX-License-Identifier: Apache-2.0
"""The lines of large files, in pieces that processes read side by side."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from megatron.training.distillation import storage
from megatron.training.distillation.utils import read_exactly

_PIECE_BYTES = 1 << 28
_READ_BYTES = 1 << 22


class Piece(NamedTuple):
    """Those lines of a file that begin at bytes ``[start, end)``."""

    file: int
    path: str
    start: int
    end: int


class Line(NamedTuple):
    """A line without its end, and the byte at which it begins."""

    offset: int
    content: bytes


def pieces(paths: Sequence[str], piece_bytes: int = _PIECE_BYTES) -> list[Piece]:
    """Cut files into pieces, in order.

    Raises:
        OSError: A file cannot be opened.
    """
    found = []
    for number, path in enumerate(paths):
        with contextlib.closing(storage.open_read(path, whole=False)) as stream:
            size = stream.seek(0, os.SEEK_END)
        found += [
            Piece(number, path, start, min(start + piece_bytes, size))
            for start in range(0, size, piece_bytes)
        ]
    return found


def lines(piece: Piece) -> Iterator[Line]:
    """Yield the lines that begin in a piece, one in memory at a time."""
    with contextlib.closing(storage.open_read(piece.path, whole=False)) as stream:
        # The line that the byte before belongs to is the piece's before.
        begin = max(0, piece.start - 1)
        offset = begin
        is_first = piece.start > 0
        for content in _split(stream, begin):
            if not is_first:
                if offset >= piece.end:
                    return
                yield Line(offset, content.removesuffix(b"\n").removesuffix(b"\r"))
            is_first = False
            offset += len(content)


def _split(stream: BinaryIO, begin: int) -> Iterator[bytes]:
    """Yield the rest of a file from byte *begin* on, line by line with their ends."""
    stream.seek(begin)
    parts: list[bytes] = []
    while data := read_exactly(stream, _READ_BYTES):
        start = 0
        while (end := data.find(b"\n", start) + 1) > 0:
            yield b"".join((*parts, data[start:end]))
            parts = []
            start = end
        if start < len(data):
            parts.append(data[start:])
    if parts:
        yield b"".join(parts)


def read_line(path: str, offset: int, size: int) -> bytes:
    """Return a line whose place is known; fewer bytes where the file ends first."""
    with contextlib.closing(storage.open_read(path, whole=False)) as stream:
        stream.seek(offset)
        return read_exactly(stream, size)
