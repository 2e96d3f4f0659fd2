# SPDX-License-Identifier: Apache-2.0
"""Columns of unsigned integers to bytes and back: pcodec, in pages that are decoded alone.

A column is coded with one table, learned from all of its numbers, and one page per frame. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

from megatron.training.distillation.errors import CacheFormatError

# The first byte of a table with pcodec's classic mode and without its differences.
_CLASSIC = b"\0"
_NAMES = {1: "u8", 2: "u16", 4: "u32"}


class Column(NamedTuple):
    """An encoded column: the table, and a page for each frame."""

    table: bytes
    """Empty if there is no number at all."""
    pages: Sequence[bytes]
    """Empty where a frame has no number, or where the table tells them all."""


def coder_header() -> bytes:
    """Return the header that says which version of the coder wrote a payload."""
    return bytes(wrapped.FileCompressor().write_header())


def encode_column(numbers: np.ndarray, sizes: Sequence[int]) -> Column:
    """Encode a column.

    Args:
        numbers: 1-D uint8, uint16 or uint32, at most 2^24 of them.
        sizes: How many of them each frame has.
    """
    assert numbers.size == sum(sizes), (numbers.size, sum(sizes))
    filled = [size for size in sizes if size]
    if not filled:
        return Column(b"", [b""] * len(sizes))
    config = ChunkConfig(
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes(filled),
        enable_8_bit=True,
    )
    compressor = wrapped.FileCompressor().chunk_compressor(numbers, config)
    pages = map(compressor.write_page, range(len(filled)))
    return Column(compressor.write_meta(), [next(pages) if size else b"" for size in sizes])


class ColumnDecoder:
    """Decodes the pages of one column. Not to be shared by threads.

    Args:
        coder: What :func:`coder_header` returned to the writer.
        table: The table of the column.
        width: Bytes of its numbers.

    Raises:
        CacheFormatError: The table is damaged, or of a coder that is not known here.
    """

    def __init__(self, coder: bytes, table: bytes, width: int) -> None:
        self._decoder = None
        if not table:
            return
        if not table.startswith(_CLASSIC):  # the others cost memory that no limit here knows
            raise CacheFormatError(
                f"a coder table begins with {table[:1]!r}, expected {_CLASSIC!r}: pcodec's classic "
                "mode without differences"
            )
        try:
            file, _ = wrapped.FileDecompressor.new(coder)
            self._decoder, _ = file.chunk_decompressor(table, _NAMES[width])
        except RuntimeError as error:
            raise CacheFormatError(f"its coder tables cannot be read: {error}") from error

    def read(self, data: bytes, begin: int, into: np.ndarray) -> int:
        """Decode a page that begins at byte *begin* of *data* and return where it ends.

        Args:
            data: What holds it; more may follow.
            begin: Where it begins.
            into: 1-D and contiguous; it is filled.

        Raises:
            CacheFormatError: It is damaged.
        """
        if not into.size:
            return begin
        if self._decoder is None:
            raise CacheFormatError("it has numbers of a column without a table")
        try:
            progress, used = self._decoder.read_page_into(data[begin:], into.size, into)
        except RuntimeError as error:
            raise CacheFormatError(f"one of its pages cannot be decoded: {error}") from error
        if progress.n_processed != into.size:
            raise CacheFormatError(
                f"one of its pages has {progress.n_processed} numbers, expected {into.size}"
            )
        return begin + int(used)


def differences(numbers: np.ndarray) -> np.ndarray:
    """Return unsigned *numbers*, each less the one before, modulo 2 to the power of their bits."""
    result = numbers.copy()
    result[1:] -= numbers[:-1]
    return result
