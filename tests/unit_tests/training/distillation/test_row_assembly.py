# SPDX-License-Identifier: Apache-2.0
"""Rows of members whose ids need different numbers of bits, put together, against plain int64."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.training.distillation import row_assembly
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.row_assembly import RowAssembler, RowSource
from megatron.training.distillation.targets import IterationTargets, LoadLayout

S, ROWS = 8, 4


def ids_of(member: int, k: int, bits: int) -> np.ndarray:
    """Ids ``(S, ROWS, K)`` of up to *bits* bits, int64."""
    generator = np.random.default_rng(member)
    ids = generator.integers(0, 1 << bits, (S, ROWS, k))
    ids[..., 0] = (1 << bits) - 1
    return ids


def job_of(ids: np.ndarray, bits: int) -> Future[PackedRows]:
    """The finished decoding of a member with these ids."""
    planes = [np.packbits(ids >> bit & 1, axis=-1) for bit in range(16, bits)]
    job: Future[PackedRows] = Future()
    job.set_result(
        PackedRows(
            values=torch.zeros(ids.shape, dtype=torch.float16),
            indices_low=torch.from_numpy((ids & 0xFFFF).astype(np.uint16)),
            high_bits=torch.from_numpy(np.concatenate(planes, axis=-1)),
        )
    )
    return job


def assemble(members: list[tuple[np.ndarray, int]], layout: LoadLayout) -> IterationTargets:
    """Put whole members, each its ids and their bits, together one after another."""
    nowhere = SimpleNamespace()
    sources = {
        job_of(ids, bits): [RowSource(nowhere, nowhere, 0, ROWS, number * ROWS)]
        for number, (ids, bits) in enumerate(members)
    }
    return RowAssembler(layout, "cache").assemble(0, sources)


# (K, bits) of each member: one plane, more of them, and members that differ in either.
MEMBERS = [
    [(8, 17)],
    [(13, 18)],
    [(5, 31)],
    [(8, 17), (8, 18)],
    [(13, 31), (13, 18), (13, 17)],
    [(3, 17), (13, 31)],
    [(13, 17), (3, 31), (8, 18)],
    [(16, 18), (9, 18), (1, 18)],
]


@pytest.mark.parametrize("members", MEMBERS, ids=str)
@pytest.mark.parametrize("mbs", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_ids_are_those_of_the_members(
    members: list[tuple[int, int]], mbs: int, cp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory that is not written to would show.
    room = partial(torch.full, fill_value=0xA5, dtype=torch.uint8)
    monkeypatch.setattr(row_assembly, "_room", room)
    content = [(ids_of(number, k, bits), bits) for number, (k, bits) in enumerate(members)]
    layout = LoadLayout(
        dp_rank=0,
        dp_size=1,
        mbs=mbs,
        gbs=ROWS * len(members),
        cp_rank=None if cp_size > 1 else 0,
        cp_size=cp_size,
    )
    targets = assemble(content, layout)
    width, bits = (max(part) for part in zip(*members, strict=True))
    assert targets.layout.high_planes == bits - 16
    rows = targets.layout.rows(targets.blocks)
    ids = rows.unpack_all().indices.long().numpy()
    quarter = S // (2 * cp_size)
    for row in range(layout.gbs):
        source, kept = content[row // ROWS][0], members[row // ROWS][0]
        for cp_rank in range(cp_size):
            chunks = (cp_rank, 2 * cp_size - 1 - cp_rank)
            expected = np.concatenate(
                [source[chunk * quarter : (chunk + 1) * quarter, row % ROWS] for chunk in chunks]
            )
            found = ids[row // mbs, cp_rank, :, row % mbs]
            assert np.array_equal(found[:, :kept], expected)
            # Where a member has fewer entries than another: masked, with all bits set.
            assert (found[:, kept:] == (1 << bits) - 1).all()
            values = rows.values[row // mbs, cp_rank, :, row % mbs]
            assert (values[:, :kept] == 0).all()
            assert (values[:, kept:] == -1000.0).all()
    assert rows.values.shape[-1] == width
