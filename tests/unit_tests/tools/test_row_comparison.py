# SPDX-License-Identifier: Apache-2.0
"""Two sides of a token are compared as a brute force over its ids does."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron.training.distillation.packed_rows import TeacherRows
from tools.cache.quantiles import Quantiles
from tools.cache.row_comparison import Comparison

MASKED = -1000.0


def rows(
    length: int,
    k: int,
    *,
    seed: int,
    vocab: int = 40,
    dtype: torch.dtype = torch.float32,
    ragged: bool = False,
    tail: bool = True,
    base: torch.Tensor | None = None,
) -> TeacherRows:
    """Return the top K of random logits, or of *base* with some noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(length, vocab, generator=generator).double()
    if base is not None:
        logits = base + 0.05 * logits
    logprobs = logits.log_softmax(-1)
    found = logprobs.topk(k)
    values, ids = found.values.to(dtype), found.indices.int()
    if ragged:
        counts = torch.randint(0, k + 1, (length, 1), generator=generator)
        dropped = torch.arange(k) >= counts
        values, ids = values.masked_fill(dropped, MASKED), ids.masked_fill(dropped, -1)
    kept = values != MASKED
    outside = 1 - (found.values.exp() * kept).sum(-1)
    return TeacherRows(
        values=values,
        indices=ids,
        tail_logprob=outside.clamp(min=1e-30).log().float() if tail else None,
    )


def tokens_of(side: TeacherRows) -> list[tuple[dict[int, float], float]]:
    """Return the kept entries and the tail's mass of each token."""
    found = []
    for position in range(len(side.values)):
        pairs = zip(side.indices[position].tolist(), side.values[position].tolist(), strict=True)
        entries = {token: value for token, value in pairs if value != MASKED}
        if side.tail_logprob is None:
            tail = max(0.0, 1 - math.fsum(map(math.exp, entries.values())))
        else:
            tail = math.exp(side.tail_logprob[position].item())
        found.append((entries, tail))
    return found


def divergence(a: tuple[dict, float], b: tuple[dict, float]) -> float:
    """Return the smallest divergence over what B leaves open, by bisection on the shares."""
    (p, p_tail), (q, q_tail) = a, b
    common = sorted(p.keys() & q.keys())
    alone = [math.exp(p[token]) for token in sorted(p.keys() - q.keys())]
    left = q_tail + math.fsum(math.exp(q[token]) for token in q.keys() - p.keys())
    left = max(left, 1e-25)
    limit = math.exp(min(q.values())) if q else math.inf

    def shares(factor: float) -> tuple[list[float], float]:
        return [min(limit, factor * each) for each in alone], factor * p_tail

    low, high = 1e-30, 1e30
    for _ in range(100):
        middle = math.sqrt(low * high)
        one, rest = shares(middle)
        low, high = (middle, high) if math.fsum(one) + rest < left else (low, middle)
    one, rest = shares(low)
    if p_tail:  # what no entry may take is the rest's
        rest = max(rest, left - math.fsum(one))
    sum_p = math.fsum(map(math.exp, p.values())) + p_tail
    sum_q = math.fsum(math.exp(q[token]) for token in common) + left
    pairs = [(math.exp(p[token]), math.exp(q[token])) for token in common]
    pairs += zip(alone, one, strict=True)
    pairs.append((p_tail, rest))
    return math.fsum(
        x / sum_p * (math.log(x / sum_p) - math.log(y / sum_q)) for x, y in pairs if x > 0
    )


GRID = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in itertools.product(
        [(6, 6), (8, 3), (3, 8), (1, 1), (40, 40)], ["near", "far"], [True, False], [False, True]
    )
]


@pytest.mark.parametrize(("sizes", "distance", "tail", "ragged"), GRID)
def test_every_number_is_that_of_a_brute_force(sizes, distance, tail, ragged):
    length = 30
    base = 2 * torch.randn(length, 40, generator=torch.Generator().manual_seed(7)).double()
    common = {"base": base if distance == "near" else None, "tail": tail, "ragged": ragged}
    a = rows(length, sizes[0], seed=1, **common)
    b = rows(length, sizes[1], seed=2, dtype=torch.float16, **common)
    found = Comparison()
    found.add(5, a, b)

    sides = list(zip(tokens_of(a), tokens_of(b), strict=True))
    kept = [(p.keys(), q.keys()) for (p, _), (q, _) in sides]
    assert found.entries_a == sum(len(p) for p, _ in kept)
    assert found.entries_b == sum(len(q) for _, q in kept)
    assert found.common == sum(len(p & q) for p, q in kept)
    assert found.equal_sets == sum(p == q for p, q in kept)
    assert found.jaccard == pytest.approx(
        sum(len(p & q) / len(p | q) if p | q else 1.0 for p, q in kept)
    )
    tops = [
        {i for i, v in side.items() if v == max(side.values())}
        for token in sides
        for side, _ in token
    ]
    assert found.equal_top == sum(bool(p & q) or not p | q for p, q in itertools.batched(tops, 2))
    dropped = [math.fsum(math.exp(p[i]) for i in p.keys() - q.keys()) for (p, _), (q, _) in sides]
    assert found.dropped == pytest.approx(sum(dropped), abs=1e-12)
    gaps = [[abs(p[i] - q[i]) for i in p.keys() & q.keys()] for (p, _), (q, _) in sides]
    assert found.equal_values == sum(gap == 0 for token in gaps for gap in token)
    largest = [max(token, default=0.0) for token in gaps]
    assert found.value_difference.value == max(largest)
    assert found.value_difference.position == largest.index(max(largest))
    tails = [abs(p - q) for (_, p), (_, q) in sides]
    assert found.tail_difference == pytest.approx(sum(tails), abs=1e-12)
    assert found.largest_tail_difference.position == int(np.argmax(tails))

    expected = [divergence(*token) for token in sides]
    assert found.divergence == pytest.approx(sum(expected), rel=1e-9, abs=1e-12)
    worst = found.largest_divergence
    assert worst.value == pytest.approx(max(expected), rel=1e-9, abs=1e-12)
    assert (worst.sample, worst.position) == (5, int(np.argmax(expected)))
    assert found.stored_tails is tail


def entries(*tokens: dict[int, float], tail: list[float]) -> TeacherRows:
    """Return rows of the probabilities of ids."""
    k = max(map(len, tokens))
    values = torch.full((len(tokens), k), MASKED)
    ids = torch.full((len(tokens), k), -1, dtype=torch.int32)
    for position, token in enumerate(tokens):
        for number, (key, value) in enumerate(token.items()):
            values[position, number], ids[position, number] = math.log(value), key
    return TeacherRows(values=values, indices=ids, tail_logprob=torch.tensor(tail).log())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # 0.5 log(0.5 / 0.25) + 0.25 log(0.25 / 0.5) + 0.25 log(0.25 / 0.25)
        (({1: 0.5, 2: 0.25}, 0.25), ({1: 0.25, 2: 0.5}, 0.25), 0.25 * math.log(2)),
        # 2 is one of the rest of B, and B's 3 one of the rest of A: 0.5 log 1 + 0.5 log 1
        (({1: 0.5, 2: 0.25}, 0.25), ({1: 0.5, 3: 0.25}, 0.25), 0.0),
        # B gives 2 at most 0.125, which leaves 0.375: 0.25 log(0.25 / 0.125) + 0.25 log(2 / 3)
        (({1: 0.5, 2: 0.25}, 0.25), ({1: 0.5, 3: 0.125}, 0.375), 0.25 * math.log(4 / 3)),
        # Nothing in common: all mass of A on an id that B gives at most 0.25
        (({1: 1.0}, 0.0), ({2: 0.25}, 0.75), math.log(4)),
    ],
)
def test_divergences_by_hand(a, b, expected):
    found = Comparison()
    found.add(0, entries(a[0], tail=[a[1]]), entries(b[0], tail=[b[1]]))
    assert found.divergence == pytest.approx(expected, abs=1e-6)


def test_order_of_equal_entries_means_nothing():
    found = Comparison()
    one = entries({1: 0.25, 2: 0.25, 3: 0.125}, tail=[0.375])
    two = entries({2: 0.25, 1: 0.25, 3: 0.125}, tail=[0.375])
    found.add(0, one, two)
    assert (found.same, found.equal_top, found.equal_sets) == (1, 1, 1)
    assert found.divergence == 0


@pytest.mark.parametrize("reversed_ties", [False, True])
def test_rows_of_next_to_no_mass_do_not_diverge_from_themselves(reversed_ties):
    """They are no distributions, and still the same."""
    one = entries({1: 1.0, 2: 1.0, 3: 0.5}, tail=[0.5])
    one.values.sub_(300.0)
    one.tail_logprob.sub_(300.0)
    order = [1, 0, 2] if reversed_ties else [0, 1, 2]
    two = TeacherRows(
        values=one.values[:, order], indices=one.indices[:, order], tail_logprob=one.tail_logprob
    )
    found = Comparison()
    found.add(0, one, two)
    assert (found.same, found.equal_sets, found.equal_top, found.equal_values) == (1, 1, 1, 3)
    assert found.divergence == pytest.approx(0.0, abs=1e-12)
    assert found.jaccard == 1.0


@pytest.mark.parametrize("what", ["value", "id", "tail", "no tail", "length"])
def test_any_difference_makes_a_row_another(what):
    one = entries({1: 0.5, 2: 0.25}, {3: 0.5, 4: 0.25}, tail=[0.25, 0.25])
    two = entries({1: 0.5, 2: 0.25}, {3: 0.5, 4: 0.25}, tail=[0.25, 0.25])
    if what == "value":
        two.values[1, 1] += 1e-3
    elif what == "id":
        two.indices[1, 1] = 9
    elif what == "tail":
        two.tail_logprob[1] += 1e-6
    elif what == "no tail":
        two = TeacherRows(values=two.values, indices=two.indices)
    else:
        two = TeacherRows(
            values=two.values[:1], indices=two.indices[:1], tail_logprob=two.tail_logprob[:1]
        )
    found = Comparison()
    found.add(3, one, two)
    assert (found.same, found.different.first) == (0, [3])
    assert found.lengths.count == (what == "length")
    assert found.tokens == (1 if what == "length" else 2)


def with_fingerprints(length: int, changed: int | None = None) -> TeacherRows:
    fingerprints = torch.arange(-(-length // 64))
    if changed is not None:
        fingerprints[changed] += 100
    return TeacherRows(
        values=torch.full((length, 1), -1.0),
        indices=torch.zeros(length, 1, dtype=torch.int32),
        label_fingerprints=fingerprints,
    )


@pytest.mark.parametrize(
    ("lengths", "changed", "proven", "at"),
    [
        ((200, 200), None, 1, None),
        ((200, 200), 2, 0, 128),
        ((200, 128), None, 1, None),
        ((200, 128), 0, 0, 0),
        ((200, 128), 1, 1, None),  # the chunk with the last position of the shorter one
        ((200, 64), 0, 0, None),  # nothing to compare
    ],
)
def test_fingerprints_of_labels(lengths, changed, proven, at):
    found = Comparison()
    found.add(4, with_fingerprints(lengths[0]), with_fingerprints(lengths[1], changed))
    assert found.proven == proven
    assert found.contradicted_at == ({} if at is None else {4: at})
    assert found.contradicted.count == (at is not None)


def test_merged_comparisons_are_those_of_one():
    sides = [(rows(8, 4, seed=seed, ragged=True), rows(8, 4, seed=seed + 50)) for seed in range(30)]
    whole, parts = Comparison(), [Comparison() for _ in range(3)]
    for sample, pair in enumerate(sides):
        whole.add(sample, *pair)
        parts[sample % 3].add(sample, *pair)
    merged = parts[2]
    merged.merge(parts[0])
    merged.merge(parts[1])
    for name in ("samples", "tokens", "common", "same", "largest_divergence", "different"):
        assert getattr(merged, name) == getattr(whole, name)
    assert merged.divergence == pytest.approx(whole.divergence)
    assert merged.divergences.quantile(0.9) == whole.divergences.quantile(0.9)
    assert whole.different.count == 30
    assert whole.different.first == list(range(20))


def test_quantiles_are_within_a_per_cent():
    numbers = np.exp(np.random.default_rng(1).normal(-8, 4, 10_000))
    found = Quantiles()
    for part in np.array_split(numbers, 7):
        found.add(part)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(numbers, share, method="inverted_cdf")
        assert found.quantile(share) == pytest.approx(exact, rel=0.0051)
    assert math.isnan(Quantiles().quantile(0.5))
    found.add(np.zeros(20_000))
    assert found.quantile(0.5) == 0.0
