# SPDX-License-Identifier: Apache-2.0
"""The statistics of the report against sums over tokens one by one, in plain Python."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tests.unit_tests.tools.report_caches import teacher_rows
from tools.cache.report.histogram import Scale
from tools.cache.report.statistics import (
    ENTROPY,
    MASS,
    P_GRID,
    PROBABILITY,
    Statistics,
    in_bins,
    k_grid,
    mean_entries,
)


def tokens_of(rows: TeacherRows) -> list[dict[str, Any]]:
    """Return what each token has, entry by entry."""
    found = []
    positions, samples, _ = rows.values.shape
    for position in range(positions):
        for sample in range(samples):
            logprobs = [v for v in rows.values[position, sample].tolist() if v != LOGPROB_SENTINEL]
            p = sorted((math.exp(v) for v in logprobs), reverse=True)
            tail = rows.tail_logprob
            rest = min(max(1 - math.fsum(p), 0.0), 1.0)
            found.append(
                {
                    "position": position,
                    "p": p,
                    "tail": rest if tail is None else math.exp(tail[position, sample].item()),
                }
            )
    return found


def nucleus(p: list[float], top_p: float) -> list[float]:
    """Return the entries before which less than P lies."""
    kept: list[float] = []
    for one in p:
        if math.fsum(kept) >= top_p:
            break
        kept.append(one)
    return kept


def entropy_of(p: list[float]) -> float:
    return -math.fsum(one * math.log(one) for one in p if one > 0)


def statistics_of(*rows: TeacherRows) -> Statistics:
    found = Statistics.nothing()
    for one in rows:
        found.add(one)
    return found


CASES = {
    "top-K": teacher_rows(1, 6),
    "top-P": teacher_rows(2, 6, p=0.8),
    "one entry": teacher_rows(3, 4, k=1),
    "no tails": dataclasses.replace(teacher_rows(4, 5), tail_logprob=None),
    "bf16": dataclasses.replace(r := teacher_rows(5, 3, k=40), values=r.values.bfloat16()),
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_sums_are_those_over_tokens(rows):
    found, tokens = statistics_of(rows), tokens_of(rows)
    assert found.k == rows.values.shape[-1]
    assert found.tokens == len(tokens)
    assert found.empty == 0
    assert found.with_tail == (0 if rows.tail_logprob is None else len(tokens))

    def total(value) -> Any:
        return pytest.approx(math.fsum(map(value, tokens)), rel=1e-6, abs=1e-9)

    assert found.entries == total(lambda t: len(t["p"]))
    assert found.kept == total(lambda t: math.fsum(t["p"]))
    assert found.tail == total(lambda t: t["tail"])
    assert found.top1 == total(lambda t: t["p"][0])
    assert found.entropy == total(lambda t: entropy_of([*t["p"], t["tail"]]))
    assert found.entropy_kept == total(
        lambda t: entropy_of([one / math.fsum(t["p"]) for one in t["p"]])
    )
    if rows.tail_logprob is not None:
        assert found.defect == total(lambda t: abs(1 - math.fsum(t["p"]) - t["tail"]))
    for place, k in enumerate(k_grid(found.k)):
        assert found.kept_at[place] == total(lambda t, k=k: math.fsum(t["p"][:k]))
        assert found.entries_at[place] == total(lambda t, k=k: len(t["p"][:k]))
    means = mean_entries(found.top_p_counts)
    for place, p in enumerate(P_GRID):
        assert means[place] * len(tokens) == total(lambda t, p=p: len(nucleus(t["p"], p)))
        assert found.top_p_kept[place] == total(lambda t, p=p: math.fsum(nucleus(t["p"], p)))
        assert found.top_p_short[place] == sum(math.fsum(t["p"]) < p for t in tokens)
    counts = np.bincount([len(t["p"]) for t in tokens], minlength=found.k + 1)
    assert found.entries_counts.tolist() == counts.tolist()


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_positions_have_their_own_means(rows):
    found, tokens = statistics_of(rows), tokens_of(rows)
    for position in range(rows.values.shape[0]):
        here = [t for t in tokens if t["position"] == position]
        assert found.position_tokens[position] == len(here)
        entropies = [entropy_of([*t["p"], t["tail"]]) for t in here]
        assert found.position_entropy[position] == pytest.approx(math.fsum(entropies), rel=1e-6)
        kept = [math.fsum(t["p"]) for t in here]
        assert found.position_kept[position] == pytest.approx(math.fsum(kept), rel=1e-6)


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95])
def test_quantiles_are_as_exact_as_their_bins(q):
    rows = teacher_rows(7, 200)
    found, tokens = statistics_of(rows), tokens_of(rows)
    for place, k in enumerate(k_grid(found.k)):
        exact = np.quantile([math.fsum(t["p"][:k]) for t in tokens], q, method="inverted_cdf")
        shown = MASS.quantile(found.kept_at_counts, q)[place]
        assert abs(shown - exact) <= MASS.widest()
        # Close to 0 and 1, bins are as much finer as the mass itself or what it lacks is smaller.
        assert abs(shown - exact) <= 0.015 * min(exact, 1 - exact) + 2e-6
    exact = np.quantile([entropy_of([*t["p"], t["tail"]]) for t in tokens], q)
    assert abs(ENTROPY.quantile(found.entropy_counts, q)[0] - exact) <= 0.05
    for place, p in enumerate(P_GRID):
        sizes = [len(nucleus(t["p"], p)) for t in tokens]
        exact = np.quantile(sizes, q, method="inverted_cdf")
        assert found.entries_quantile(q, place) == exact


def test_what_is_added_up_is_as_of_one():
    """Also where K and the number of positions differ."""
    parts = [
        teacher_rows(1, 3, k=12),
        teacher_rows(2, 2, k=40, positions=9),
        teacher_rows(3, 1, k=1, positions=30),
    ]
    together = statistics_of(*parts)
    again = Statistics.nothing()
    for part in reversed(parts):
        again += statistics_of(part)
    for field in dataclasses.fields(Statistics):
        np.testing.assert_allclose(
            getattr(together, field.name), getattr(again, field.name), rtol=1e-12, atol=1e-12
        )
    tokens = [token for part in parts for token in tokens_of(part)]
    assert together.k == 40
    assert together.tokens == len(tokens) == 3 * 16 + 2 * 9 + 30
    assert together.position_tokens.tolist() == [6] * 9 + [4] * 7 + [1] * 14
    for place, k in enumerate(k_grid(40)):
        kept = math.fsum(math.fsum(token["p"][:k]) for token in tokens)
        assert together.kept_at[place] == pytest.approx(kept, rel=1e-9)
        assert together.kept_at_counts[place].sum() == len(tokens)


def test_numbers_by_hand():
    """Two tokens: probabilities 1/2, 1/4 and 1/8 with a tail of 1/8; and 1/2 alone."""
    values = torch.tensor([[[0.5, 0.25, 0.125]], [[0.5, 1.0, 1.0]]]).log()
    values[1, 0, 1:] = LOGPROB_SENTINEL
    rows = TeacherRows(
        values=values,
        indices=torch.zeros(2, 1, 3, dtype=torch.int32),
        tail_logprob=torch.tensor([[0.125], [0.5]]).log(),
    )
    found = statistics_of(rows)
    assert k_grid(3) == [1, 2]
    assert found.kept_at.tolist() == pytest.approx([1.0, 1.25])
    assert found.kept == pytest.approx(1.375)
    assert found.tail == pytest.approx(0.625)
    assert found.entries_counts.tolist() == [0, 1, 0, 1]
    # H(1/2, 1/4, 1/8, 1/8) = 1.75 bits, H(1/2, 1/2) = 1 bit.
    assert found.entropy == pytest.approx(2.75 * math.log(2))
    # H(4/7, 2/7, 1/7), and 0 for a token of one entry.
    assert found.entropy_kept == pytest.approx(0.9556998911125343)
    assert found.top_p_counts[P_GRID.index(0.6)].tolist() == [0, 1, 1, 0]
    assert found.top_p_counts[P_GRID.index(0.8)].tolist() == [0, 1, 0, 1]
    assert found.top_p_short[P_GRID.index(0.8)] == 1
    assert found.top1_counts[0][50] + found.top1_counts[0][49] == 2
    assert found.defect == pytest.approx(0, abs=1e-7)


def test_tokens_without_entries_are_counted_apart():
    rows = teacher_rows(1, 4)
    rows.values[3, 2] = LOGPROB_SENTINEL
    found = statistics_of(rows)
    assert (found.tokens, found.empty) == (4 * 16 - 1, 1)
    assert found.position_tokens[3] == 3
    rows.values[:] = LOGPROB_SENTINEL
    nothing = statistics_of(rows)
    assert (nothing.tokens, nothing.empty, nothing.kept) == (0, 64, 0)


def test_entries_in_any_order_are_sorted():
    rows = teacher_rows(1, 4, p=0.8)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    mixed = dataclasses.replace(rows, values=rows.values[..., order])
    np.testing.assert_allclose(statistics_of(mixed).kept_at, statistics_of(rows).kept_at)
    np.testing.assert_array_equal(
        statistics_of(mixed).top_p_counts, statistics_of(rows).top_p_counts
    )


def test_entries_too_small_for_a_number_have_no_mass():
    values = torch.full((1, 1, 2), -900.0)
    rows = TeacherRows(values=values, indices=torch.zeros(1, 1, 2, dtype=torch.int32))
    found = statistics_of(rows)
    assert found.kept == 0
    assert found.tail == 1
    assert math.isfinite(found.entropy_kept)


@pytest.mark.parametrize("scale", [MASS, ENTROPY, PROBABILITY], ids=["mass", "entropy", "p"])
def test_bins_hold_what_lies_between_their_edges(scale):
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.random(5000), 10 ** -(rng.random(5000) * 8), 16 * rng.random(9)])
    if scale is not ENTROPY:
        values = values[values < 1]
    inside = values[(values > scale.low) & (values < scale.high)]
    places = scale.bin_of(inside)
    assert (inside >= scale.edges[places] * (1 - 1e-9)).all()
    assert (inside <= scale.edges[places + 1] * (1 + 1e-9)).all()
    outside = scale.bin_of(np.array([-1.0, 0.0, 1e9]))
    assert outside.tolist() == [0, 0, scale.bins - 1]


def test_quantiles_by_hand():
    scale = Scale(low=0, high=10, bins=10)
    counts = np.array([[0, 4, 0, 0, 4, 0, 0, 0, 0, 0], [0] * 10], dtype=float)
    # The second of four in [1, 2) is half way; the first of four in [4, 5) a quarter.
    assert scale.quantile(counts, 0.25)[0] == 1.5
    assert scale.quantile(counts, 0.625)[0] == 4.25
    assert scale.quantile(counts, 0.0)[0] == 1.0
    assert scale.quantile(counts, 1.0)[0] == 5.0
    assert math.isnan(scale.quantile(counts, 0.5)[1])


def test_bins_of_positions():
    sums, weights = np.arange(10.0), np.array([1.0] * 9 + [0.0])
    assert in_bins(sums, weights, 20) == (list(range(9)), list(range(9)))
    # Widths of 4, 4 and 2, of which the last has a token less.
    assert in_bins(sums, weights, 3) == ([1.5, 5.5, 8.5], [1.5, 5.5, 17.0])
