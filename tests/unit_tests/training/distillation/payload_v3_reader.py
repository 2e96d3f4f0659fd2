# SPDX-License-Identifier: Apache-2.0
"""A reader of format v3 written from the specification in the package's README, and nothing else.

It imports nothing of the package, and is slow and plain.
"""

import itertools
import struct
import zlib
from typing import Any

import numpy as np
from pcodec import wrapped

KINDS = [np.uint16, np.uint16, np.uint32, np.uint8]
NAMES = {np.uint8: "u8", np.uint16: "u16", np.uint32: "u32"}


def read_page(
    coder: bytes, table: bytes, kind: Any, data: bytes, count: int
) -> tuple[list[int], bytes]:
    """Return *count* numbers of the page that *data* begins with, and what follows it."""
    if not count:
        return [], data
    assert table[0] == 0
    numbers = np.empty(count, kind)
    file, _ = wrapped.FileDecompressor.new(coder)
    decoder, _ = file.chunk_decompressor(table, NAMES[kind])
    _, used = decoder.read_page_into(data, count, numbers)
    return numbers.tolist(), data[used:]


def read_payload(data: bytes) -> dict[str, Any]:
    """Return the header, fingerprints, and of each (row, position) its entries and its tail."""
    _, size, s, n, p, g, r, k, bits, kind, flags, c, _ = struct.unpack_from("<8s6IHBBBBH", data)
    assert data[:8] == b"\x89LOGKD3\n"
    assert zlib.crc32(data[: size - 4] + data[:8]) == struct.unpack_from("<I", data, size - 4)[0]
    groups = [(0, 1)]
    while groups[-1][1] < k:
        groups.append((groups[-1][1], min(2 * groups[-1][1], k)))
    values = [KINDS[kind]] * len(groups)
    streams = [np.uint16] * (flags >> 2) + [np.uint32, *values] + [np.uint32] * (flags & 1)
    frames = n * -(-s // p)
    columns = -(-frames // g) * len(streams)
    lengths = struct.unpack_from(f"<{2 + columns}I", data, 40)
    ends = np.cumsum([40 + 4 * len(lengths), c, *lengths])
    coder, table, page, *tables = (data[a:b] for a, b in itertools.pairwise(ends))
    steps = read_page(coder, table, np.uint32, page, r)[0]
    ranked = [total % (1 << 32) for total in itertools.accumulate(steps)]
    index = struct.unpack_from(f"<{2 * frames}I", data, ends[-1])
    chunks = -(-s // 64) * (flags >> 1 & 1)
    proofs = struct.unpack_from(f"<{n * chunks}q", data, ends[-1] + 8 * frames)
    assert ends[-1] + 8 * (frames + n * chunks) + 4 == size
    tokens = {}
    for f in range(frames):
        frame, data = data[size : size + index[2 * f]], data[:size] + data[size + index[2 * f] :]
        assert zlib.crc32(frame) == index[2 * f + 1]
        row, first = f // -(-s // p), f % -(-s // p) * p
        places = range(min(p, s - first))
        own = zip(tables[f // g * len(streams) :], streams, strict=False)
        counts, tails = [k] * len(places), [None] * len(places)
        if flags & 4:
            counts, frame = read_page(coder, *next(own), frame, len(places))
        order = [(e, q) for e in range(k) for q in places if e < counts[q]]
        rises, frame = read_page(coder, *next(own), frame, len(order))
        steps = []
        for a, b in groups:
            numbers, frame = read_page(coder, *next(own), frame, sum(a <= e < b for e, _ in order))
            steps += numbers
        if flags & 1:
            tails, frame = read_page(coder, *next(own), frame, len(places))
        assert frame == b""
        entries = [[] for _ in places]  # (value, rank)
        for (e, q), rise, step in zip(order, rises, steps, strict=True):
            value, rank = entries[q][-1] if e else (0, 0)
            rank = (rise + (rank if e and step == 0 else 0)) % (1 << 32)
            entries[q].append(((value + step) % (1 << 8 * np.dtype(values[0]).itemsize), rank))
        for q in places:
            ids = [(value, ranked[rank] if rank < r else rank - r) for value, rank in entries[q]]
            tokens[row, first + q] = ids, tails[q]
    assert len(data) == size
    return {"sizes": (s, n, k, bits, kind), "proofs": proofs, "tokens": tokens}
