# SPDX-License-Identifier: Apache-2.0
"""Targets that a test makes up, in the form in which a loader hands them over."""

from collections.abc import Sequence

import torch

from megatron.training.distillation.packed_rows import (
    BlockLayout,
    PackedRows,
    TeacherRows,
    bits_by_token,
)
from megatron.training.distillation.payload import v2_pack_indices
from megatron.training.distillation.targets import IterationFailure, IterationTargets


def packed(rows: TeacherRows) -> PackedRows:
    """The same rows with their ids packed."""
    low, bit_17 = v2_pack_indices(rows.indices)
    return PackedRows(
        values=rows.values,
        indices_low=low,
        high_bits=bits_by_token(bit_17, rows.indices.shape),
        tail_logprob=rows.tail_logprob,
        label_fingerprints=rows.label_fingerprints,
    )


def targets(start: int, *microbatches: TeacherRows) -> IterationTargets:
    """An iteration with these microbatches, all of one shape."""
    return sliced_targets(start, *([rows] for rows in microbatches))


def sliced_targets(start: int, *microbatches: Sequence[TeacherRows]) -> IterationTargets:
    """An iteration whose microbatches have one slice per context-parallel rank."""
    first = microbatches[0][0]
    positions, samples, k = first.values.shape
    fingerprints = first.label_fingerprints
    layout = BlockLayout(
        positions=positions,
        samples=samples,
        k=k,
        high_planes=1,
        dtype=first.values.dtype,
        has_tail=first.tail_logprob is not None,
        chunks=0 if fingerprints is None else fingerprints.shape[0],
    )
    blocks = torch.empty(
        (len(microbatches), len(microbatches[0]), layout.nbytes), dtype=torch.uint8
    )
    for number, slices in enumerate(microbatches):
        for place, rows in enumerate(slices):
            room, content = layout.rows(blocks[number, place]), packed(rows)
            for name in PackedRows.__slots__:
                if (part := getattr(room, name)) is not None:
                    part.copy_(getattr(content, name))
    return IterationTargets(start=start, layout=layout, blocks=blocks)


class GivenTargets:
    """A stream that serves given items by their first sample, and remembers what was asked."""

    def __init__(self, *items: IterationTargets | IterationFailure) -> None:
        self.items = {item.start: item for item in items}
        self.asked: list[int] = []
        self.listings: list[Sequence[str]] = []

    def use_listing(self, names: Sequence[str]) -> None:
        self.listings.append(names)

    def iteration(self, start_sample: int) -> IterationTargets | IterationFailure:
        self.asked.append(start_sample)
        return self.items[start_sample]

    def take_wait(self) -> float:
        return 0.25
