# SPDX-License-Identifier: Apache-2.0
"""Which members a reader needs, against samples dealt one by one by Megatron's own sampler."""

import itertools

import pytest

from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from megatron.training.distillation.utils import LogprobsReshardPlan
from tools.load_plan.member_needs import member_uses, saved_ranks
from tools.load_plan.setting import Batches

SAVED = [(1, 1, 4), (2, 2, 8), (6, 1, 24), (4, 3, 24), (1, 3, 12), (3, 1, 6), (8, 1, 8)]
LOADED = [(1, 1, 1), (1, 2, 6), (4, 2, 16), (4, 1, 8), (3, 2, 24), (3, 4, 48), (5, 1, 15)]
SAMPLES = 480


def batches(dp: int, mbs: int, gbs: int) -> Batches:
    return Batches(dp=dp, mbs=mbs, gbs=gbs)


def dealt(side: Batches, start: int, end: int) -> dict[int, int]:
    """Return the DP rank of each sample."""
    return {
        sample: rank
        for rank in range(side.dp)
        for block in MegatronPretrainingSampler(end, start, side.mbs, rank, side.dp)
        for sample in block
    }


@pytest.mark.parametrize("load", LOADED)
@pytest.mark.parametrize("save", SAVED)
def test_uses_are_what_the_sampler_deals(save, load):
    save, load = batches(*save), batches(*load)
    owner = dealt(save, 0, SAMPLES)
    for start in (0, 3 * load.mbs * load.dp):
        iterations = (SAMPLES - start) // load.gbs
        reader = dealt(load, start, SAMPLES)
        expected: dict[tuple[int, int, int], list[int]] = {}
        for sample in range(start, start + iterations * load.gbs):
            # the rank that the sampler of a job which starts here deals the sample to
            key = (reader[sample], sample // save.gbs, owner[sample])
            expected.setdefault(key, []).append((sample - start) // load.gbs)
        uses = member_uses(save, load, start, iterations)
        found = zip(
            zip(uses.reader, uses.teacher_iteration, uses.saved_rank, strict=True),
            zip(uses.first, uses.last, uses.rows, strict=True),
            strict=True,
        )
        assert dict(found) == {k: (v[0], v[-1], len(v)) for k, v in expected.items()}
        assert len(uses) == len(expected)


def test_uses_come_in_the_order_in_which_a_reader_meets_them():
    uses = member_uses(batches(6, 1, 24), batches(4, 2, 16), 16, 20)
    met = list(zip(uses.reader, uses.first, strict=True))
    assert met == sorted(met)
    # Reader 1 has samples 18 and 19 of each turn 16-23, 24-31, ...: saved ranks 0, 1 and 2, 3.
    own = uses.reader == 1
    assert uses.teacher_iteration[own].tolist()[:4] == [0, 0, 1, 1]
    assert uses.saved_rank[own].tolist()[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("load", LOADED)
@pytest.mark.parametrize("save", SAVED)
def test_saved_ranks_are_those_of_the_plan(save, load):
    save, load = batches(*save), batches(*load)
    plan = LogprobsReshardPlan(save.mbs, save.dp, save.gbs, load.mbs, load.dp, load.gbs)
    for reader in range(load.dp):
        assert saved_ranks(save, load, reader) == plan.needed_d_saves(reader)


def test_every_pair_of_small_deals():
    sizes = [(dp, mbs) for dp, mbs in itertools.product(range(1, 8), range(1, 5))]
    for (dp_save, mbs_save), (dp_load, mbs_load) in itertools.product(sizes, sizes):
        save = batches(dp_save, mbs_save, dp_save * mbs_save)
        load = batches(dp_load, mbs_load, dp_load * mbs_load)
        meet = {
            (sample // mbs_load % dp_load, sample // mbs_save % dp_save)
            for sample in range(save.gbs * load.gbs)
        }
        for reader in range(dp_load):
            expected = sorted(rank for own, rank in meet if own == reader)
            assert saved_ranks(save, load, reader) == expected, (save, load, reader)


@pytest.mark.parametrize(
    ("save_dp", "members", "amplification"),
    [
        (156, 156, 1),  # the same deal
        (312, 312, 1),  # each reader has two saved ranks to itself
        (52, 156, 3),  # three readers share each saved rank
        (64, 2496, 39),  # 156 * m % 64 takes 16 values, so each reader needs 16 members of 39 rows
    ],
)
def test_amplification_worked_out_by_hand(save_dp, members, amplification):
    save, load = batches(save_dp, 1, 2496), batches(156, 1, 2496)
    uses = member_uses(save, load, 0, 3)
    assert len(uses) == 3 * members
    assert len(uses) * save.rows == amplification * uses.rows.sum()


def test_a_start_that_is_no_turn_of_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"first sample \(6\).*\(2 \* 4\)"):
        member_uses(batches(1, 1, 4), batches(4, 2, 8), 6, 1)
