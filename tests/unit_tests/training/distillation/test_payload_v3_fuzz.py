# SPDX-License-Identifier: Apache-2.0
"""A damaged payload of format v3 gives its rows or a CacheFormatError, also behind right checksums.

``LOGITS_FUZZ_CASES=10000`` tries that many payloads instead of the few of a normal run, and
``LOGITS_FUZZ_SEED`` others.
"""

import functools
import os
import random
import resource
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_layout import MAGIC
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload_v3 import decode_framed_rows, read_header
from tests.unit_tests.training.distillation.payload_v3_cases import (
    frames_of,
    make_member,
    with_frames,
)

CASES = int(os.environ.get("LOGITS_FUZZ_CASES", "600"))
SEED = os.environ.get("LOGITS_FUZZ_SEED", "1")
MAX_BYTES = 4 << 20
MAX_SECONDS = 5.0
MAX_GROWTH_KIB = 300 * 1024
EDGES = (0, 1, 2, 3, 7, 64, 255, 256, 257, 1 << 16, 1 << 20, 1 << 22, 1 << 31, (1 << 32) - 1)


@functools.cache
def payloads() -> list[bytes]:
    """Return payloads of one shape that differ in all else."""
    shape = (300, 3, 5)
    return [
        make_member(*shape, vocab_size=70000, is_masked=True).encode(),
        make_member(*shape, vocab_size=70000, is_masked=True, seed=1).encode(),
        make_member(*shape, dtype=torch.float32, vocab_size=1 << 31).encode(),
        make_member(*shape, vocab_size=500, has_extras=False).encode(eight_bit=True),
    ]


# ---- damage that checksums show ------------------------------------------------------------


def flip_bits(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[_anywhere(rng, data)] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    start = _anywhere(rng, data)
    length = min(rng.choice((1, 4, 100, 3000)), len(data) - start)
    data[start : start + length] = rng.choice((bytes(length), rng.randbytes(length)))


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[_anywhere(rng, data) :]


def append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.choice((1, 100)))


def cut_out(rng: random.Random, data: bytearray) -> None:
    start = _anywhere(rng, data)
    del data[start : start + rng.choice((1, 4, 100))]


# ---- damage behind checksums that are right again ------------------------------------------


def change_numbers(rng: random.Random, data: bytearray) -> None:
    """Change numbers of the header's fixed part or its list of lengths."""
    size = read_header(bytes(data)).nbytes
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.3:
            data[rng.randrange(32, 40)] = rng.choice((0, 1, 2, 3, 5, 16, 23, 31, 128, 255))
        else:
            place = rng.choice((12, 16, 20, 24, 28, *range(40, 80, 4)))
            (number,) = struct.unpack_from("<I", data, place)
            change = rng.choice((*EDGES, number + 1, number - 1, number * 2))
            struct.pack_into("<I", data, place, change % (1 << 32))
    struct.pack_into("<I", data, size - 4, zlib.crc32(data[: size - 4] + MAGIC))


def change_tables(rng: random.Random, data: bytearray) -> None:
    """Change what the coder reads from the header."""
    header = read_header(bytes(data))
    frames = data[header.nbytes :]
    match rng.randrange(6):
        case 0:
            header = replace(header, coder=rng.choice((b"", b"\0", b"\3", b"\4\0", b"\4\1\1")))
        case 1 | 2:
            parts = list(header.ranking)
            which = rng.randrange(2)
            parts[which] = _damaged(rng, parts[which])
            header = replace(header, ranking=(parts[0], parts[1]))
        case _:
            tables = [list(row) for row in header.tables]
            row = rng.choice(tables)
            which = rng.randrange(len(row))
            row[which] = _damaged(rng, rng.choice((row[which], rng.choice(row))))
            header = replace(header, tables=tables)
    data[:] = header.to_bytes() + frames


def change_frames(rng: random.Random, data: bytearray) -> None:
    """Change what the coder reads from frames."""
    header = read_header(bytes(data))
    frames = frames_of(header, data)
    which, other = rng.randrange(len(frames)), rng.randrange(len(frames))
    if rng.random() < 0.2:
        frames[which], frames[other] = frames[other], frames[which]
    else:
        frames[which] = _damaged(rng, frames[which])
    data[:] = with_frames(header, frames)[1]


def take_foreign_tables(rng: random.Random, data: bytearray) -> None:
    """Decode the frames with another payload's tables."""
    header = read_header(bytes(data))
    other = read_header(rng.choice(payloads()))
    frames = data[header.nbytes :]
    tables = [
        [*theirs[: len(ours)], *ours[len(theirs) :]]
        for ours, theirs in zip(header.tables, other.tables, strict=True)
    ]
    data[:] = replace(header, tables=tables).to_bytes() + frames


def _damaged(rng: random.Random, part: bytes) -> bytes:
    if not part:
        return rng.randbytes(rng.choice((1, 9, 40)))
    data = bytearray(part)
    rng.choice((flip_bits, flip_bits, overwrite, truncate, append, cut_out))(rng, data)
    return bytes(data)


def _anywhere(rng: random.Random, data: bytearray) -> int:
    """Return a place, often near the beginning, where every byte means something."""
    return rng.randrange(rng.choice((len(data), len(data), min(len(data), 40))))


SHOWN = (flip_bits, overwrite, truncate, append, cut_out)
HIDDEN = (change_numbers, change_tables, change_frames, take_foreign_tables)


# ---- what must hold ------------------------------------------------------------------------


def read(data: bytes) -> PackedRows | None:
    """Return all rows, of which there are as many as the header says; None if they are refused."""
    try:
        header = read_header(data)
        rows = range(min(header.rows, 8))
        found = None
        for positions in (slice(0, 1), slice(header.positions - 1, None), None):
            count = len(range(header.positions)[positions or slice(None)])
            found = decode_framed_rows(header, data, rows, positions, max_bytes=MAX_BYTES)
            shape = (count, len(rows), header.k)
            assert found.values.shape == found.indices_low.shape == shape
            planes = max(1, header.id_bits - 16)
            assert found.high_bits.shape == (count, len(rows), planes * -(-header.k // 8))
            proofs = found.label_fingerprints
            assert found.nbytes - (0 if proofs is None else proofs.nbytes) <= MAX_BYTES
    except CacheFormatError:
        return None
    return found


def is_same(found: PackedRows, expected: PackedRows) -> bool:
    """Return whether two are the same, bit by bit."""
    for name in PackedRows.__slots__:
        ours, theirs = getattr(found, name), getattr(expected, name)
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and ours.numpy(force=True).tobytes() != theirs.numpy().tobytes():
            return False
    return True


@pytest.mark.timeout(60 + CASES // 10)
def test_damage_gives_the_rows_or_a_named_error(record_property) -> None:
    originals = payloads()
    expected = [read(data) for data in originals]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[tuple[str, bool]] = Counter()
    slowest = 0.0
    for case in range(CASES):
        rng = random.Random(f"{SEED}-{case}")
        which = rng.randrange(len(originals))
        kind: Callable[[random.Random, bytearray], None] = rng.choice(SHOWN + HIDDEN)
        data = bytearray(originals[which])
        kind(rng, data)
        begin = time.monotonic()
        try:
            found = read(bytes(data))
            if found is not None and kind in SHOWN:
                assert is_same(found, expected[which])
        except BaseException as error:  # a panic of the coder is no Exception
            error.add_note(f"case {SEED}-{case}, {kind.__name__}")
            raise
        outcomes[kind.__name__, found is not None] += 1
        slowest = max(slowest, time.monotonic() - begin)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    record_property("outcomes", {str(key): count for key, count in sorted(outcomes.items())})
    print(f"{CASES} cases, slowest {slowest:.2f} s, {growth} KiB more memory, {dict(outcomes)}")
    assert slowest < MAX_SECONDS
    assert growth < MAX_GROWTH_KIB
    # Damage reaches the coder, and is refused there or gives other numbers.
    for kind in (change_tables, change_frames):
        assert outcomes[kind.__name__, True] > 0
        assert outcomes[kind.__name__, False] > 0
    assert not any(outcomes[kind.__name__, True] for kind in (truncate, cut_out))
