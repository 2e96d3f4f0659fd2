# SPDX-License-Identifier: Apache-2.0
"""Which members of a cache each reader of a student needs, and when, from integers alone.

Megatron's sampler deals blocks of ``mbs`` samples to ``dp`` ranks in turn, and every global batch
is a multiple of ``mbs * dp``: so the rank of a sample is ``sample // mbs % dp`` on both sides,
whatever the batch sizes.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.load_plan.setting import Batches

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberUses:
    """One entry per reader and member that it needs, by reader and then by first needed sample.

    Attributes:
        reader: DP rank of the student.
        teacher_iteration: Number of the member in the cache, from 0 on.
        saved_rank: DP rank of the teacher.
        first: Iteration of the student that needs it first, counted from the first one read.
        last: The one that needs it last.
        rows: Samples of it that this reader needs.
    """

    reader: Ints
    teacher_iteration: Ints
    saved_rank: Ints
    first: Ints
    last: Ints
    rows: Ints

    def __len__(self) -> int:
        """Return the number of entries: how many members all readers decode."""
        return len(self.reader)


def member_uses(save: Batches, load: Batches, start: int, iterations: int) -> MemberUses:
    """Return what *iterations* of the student from sample *start* on need.

    Raises:
        ValueError: Sample *start* is not the first of a turn of the student's ranks.
    """
    if start < 0 or start % (load.mbs * load.dp):
        raise ValueError(
            f"The first sample ({start}) must be a multiple of the student's micro batch size "
            f"times its data-parallel size ({load.mbs} * {load.dp})."
        )
    # No boundary of either side lies inside of a block, so one sample stands for it.
    block = math.gcd(save.mbs, load.mbs)
    sample = np.arange(start, start + iterations * load.gbs, block, dtype=np.int64)
    iteration = (sample - start) // load.gbs
    reader = sample // load.mbs % load.dp
    member = sample // save.gbs
    # (reader, teacher iteration, saved rank) as one number
    key = (reader * (member[-1] + 1) + member) * save.dp + sample // save.mbs % save.dp
    _, first, count = np.unique(key, return_index=True, return_counts=True)
    _, from_end = np.unique(key[::-1], return_index=True)
    order = np.lexsort((first, reader[first]))
    first, last = first[order], len(key) - 1 - from_end[order]
    return MemberUses(
        reader=reader[first],
        teacher_iteration=member[first],
        saved_rank=sample[first] // save.mbs % save.dp,
        first=iteration[first],
        last=iteration[last],
        rows=count[order] * block,
    )


def saved_ranks(save: Batches, load: Batches, reader: int) -> list[int]:
    """Return the saved DP ranks whose shards *reader* ever needs, over a cache without end.

    Both deals repeat, after ``mbs * dp`` samples each. So a block of the reader meets a block of a
    saved rank at some time exactly if they overlap modulo the greatest common divisor of the two
    periods.
    """
    common = math.gcd(save.mbs * save.dp, load.mbs * load.dp)
    found = []
    for rank in range(save.dp):
        distance = (reader * load.mbs - rank * save.mbs) % common
        if distance < save.mbs or common - distance < load.mbs:
            found.append(rank)
    return found
