# SPDX-License-Identifier: Apache-2.0
"""What two caches say of the same tokens: kept entries, values, tails, divergence. Pure.

The divergence of a token is from A to B, over A's kept entries and one bucket for the rest, as the
loss has one for what the teacher did not keep::

    KL = sum_k p_k (log p_k - log q_k) + p_r (log p_r - log q_r)

What B gives an id that it did not keep is not stored: at most its smallest kept probability, and
all of them and the rest together have its tail and its entries that A did not keep. Of the ``q``
that this leaves open, those that make the divergence smallest are taken, so it is a lower bound of
the divergence of the whole distributions. That is one bucket for the rest and all such ids, except
for those that would get more than that smallest probability. Where B kept all that A kept, nothing
is left open.

A tail that is not stored is the complement of the kept mass, but not less than 0. Both sides are
divided by their sum, which rounding of the stored values moves away from 1, so the divergence is
never negative. What is left for the rest counts as at least 1e-25 of all, as a student's tail does
in the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from megatron.training.distillation.fingerprint import CHUNK, comparable_chunks
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tools.cache.quantiles import Quantiles

_REST_FLOOR = 1e-25
_LISTED_SAMPLES = 20


@dataclass(slots=True)
class Extreme:
    """The largest number that was met, and where."""

    value: float = 0.0
    sample: int | None = None
    position: int | None = None

    def note(self, sample: int, numbers: np.ndarray) -> None:
        """Look at *numbers*, one per position of *sample*."""
        position = int(numbers.argmax())
        if self.sample is None or numbers[position] > self.value:
            self.value, self.sample, self.position = float(numbers[position]), sample, position

    def merge(self, other: "Extreme") -> None:
        """Take what *other* has met; of equal ones the earlier sample."""
        if other.sample is not None and (
            self.sample is None or (-other.value, other.sample) < (-self.value, self.sample)
        ):
            self.value, self.sample, self.position = other.value, other.sample, other.position


@dataclass(slots=True)
class SampleList:
    """How many samples have something, and the first of them."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, sample: int) -> None:
        """Add one."""
        self.count += 1
        self.first = sorted([*self.first, sample])[:_LISTED_SAMPLES]

    def merge(self, other: "SampleList") -> None:
        """Add those of *other*."""
        self.count += other.count
        self.first = sorted(self.first + other.first)[:_LISTED_SAMPLES]


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Sums over the tokens that were compared; those of several processes can be merged.

    Attributes:
        samples: Samples that were compared.
        tokens: Tokens that were compared.
        entries_a: Entries that A kept.
        entries_b: Entries that B kept.
        common: Entries that both kept.
        jaccard: Sum over tokens of common over all kept ids; 1 where neither kept any.
        equal_sets: Tokens with the same kept ids.
        equal_top: Tokens whose most probable id is the same; of equal ones any.
        equal_values: Common entries with the same log-probability.
        value_difference: Of the log-probabilities of common entries, in nats.
        tail_difference: Sum of the differences of the tails' probability.
        largest_tail_difference: The largest of them.
        stored_tails: Whether both sides store tails, in all rows.
        dropped: Sum of the probability of A's entries that B did not keep.
        largest_dropped: The largest of it.
        divergence: Sum over tokens, in nats.
        divergences: Their distribution.
        largest_divergence: The largest of them.
        same: Samples whose entries and tails are all the same.
        different: Samples whose entries or tails are not.
        lengths: Samples whose sequences have other lengths; as many positions as both have count.
        proven: Samples whose labels have the same fingerprints on both sides.
        contradicted: Samples whose labels do not: they are other tokens.
        contradicted_at: The first 64 positions of each of the first of these that differ.
    """

    samples: int = 0
    tokens: int = 0
    entries_a: int = 0
    entries_b: int = 0
    common: int = 0
    jaccard: float = 0.0
    equal_sets: int = 0
    equal_top: int = 0
    equal_values: int = 0
    value_difference: Extreme = field(default_factory=Extreme)
    tail_difference: float = 0.0
    largest_tail_difference: Extreme = field(default_factory=Extreme)
    stored_tails: bool = True
    dropped: float = 0.0
    largest_dropped: Extreme = field(default_factory=Extreme)
    divergence: float = 0.0
    divergences: Quantiles = field(default_factory=Quantiles)
    largest_divergence: Extreme = field(default_factory=Extreme)
    same: int = 0
    different: SampleList = field(default_factory=SampleList)
    lengths: SampleList = field(default_factory=SampleList)
    proven: int = 0
    contradicted: SampleList = field(default_factory=SampleList)
    contradicted_at: dict[int, int] = field(default_factory=dict)

    def merge(self, other: "Comparison") -> None:
        """Add what *other* has compared."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(ours, bool):
                setattr(self, each.name, ours and theirs)
            elif isinstance(ours, dict):
                ours |= theirs
                _keep_first(ours)
            elif isinstance(ours, int | float):
                setattr(self, each.name, ours + theirs)
            else:
                ours.merge(theirs)

    def add(self, sample: int, a: TeacherRows, b: TeacherRows) -> None:
        """Compare one sample: ``(S, K)`` rows of each cache, whose S and K may differ."""
        self._compare_labels(sample, a, b)
        length = min(len(a.values), len(b.values))
        is_same = len(a.values) == len(b.values)
        if not is_same:
            self.lengths.add(sample)
        self.samples += 1
        self.tokens += length
        self.stored_tails &= a.tail_logprob is not None and b.tail_logprob is not None
        if _are_equal(a, b):
            found = _TokenComparison.of_equal((a.values != LOGPROB_SENTINEL).sum(-1).numpy())
        else:
            found = _TokenComparison.of(_Side.of(a, length), _Side.of(b, length))
        self.entries_a += int(found.kept_a.sum())
        self.entries_b += int(found.kept_b.sum())
        self.common += int(found.common.sum())
        self.jaccard += float(found.jaccard.sum())
        self.equal_sets += int(found.equal_sets.sum())
        self.equal_top += int(found.equal_top.sum())
        self.equal_values += int(found.equal_values.sum())
        self.value_difference.note(sample, found.value_difference)
        self.tail_difference += float(found.tail_difference.sum())
        self.largest_tail_difference.note(sample, found.tail_difference)
        self.dropped += float(found.dropped.sum())
        self.largest_dropped.note(sample, found.dropped)
        self.divergence += float(found.divergence.sum())
        self.divergences.add(found.divergence)
        self.largest_divergence.note(sample, found.divergence)
        if is_same and found.equal_sets.all() and (found.equal_values == found.common).all():
            is_same = _have_same_tails(a, b)
        else:
            is_same = False
        if is_same:
            self.same += 1
        else:
            self.different.add(sample)

    def _compare_labels(self, sample: int, a: TeacherRows, b: TeacherRows) -> None:
        if a.label_fingerprints is None or b.label_fingerprints is None:
            return
        chunks = comparable_chunks(
            max(len(a.values), len(b.values)), min(len(a.values), len(b.values))
        )
        differs = (a.label_fingerprints[:chunks] != b.label_fingerprints[:chunks]).numpy()
        if differs.any():
            self.contradicted.add(sample)
            self.contradicted_at[sample] = int(differs.argmax()) * CHUNK
            _keep_first(self.contradicted_at)
        elif chunks:
            self.proven += 1


def _keep_first(by_sample: dict[int, int]) -> None:
    for sample in sorted(by_sample)[_LISTED_SAMPLES:]:
        del by_sample[sample]


def _are_equal(a: TeacherRows, b: TeacherRows) -> bool:
    """Return whether entries and tails are the same in the same order, which is most often so."""
    pairs = ((a.values, b.values), (a.indices, b.indices))
    return _have_same_tails(a, b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


def _have_same_tails(a: TeacherRows, b: TeacherRows) -> bool:
    tails = a.tail_logprob, b.tail_logprob
    if tails[0] is None or tails[1] is None:
        return tails[0] is tails[1]
    return torch.equal(tails[0], tails[1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Side:
    """One cache's entries of the positions of a sample, in float64.

    Attributes:
        logprobs: ``(S, K)``, -inf where masked.
        ids: ``(S, K)`` int64, -1 where masked.
        kept: ``(S, K)`` bool.
        tail: ``(S,)`` probability outside the entries.
    """

    logprobs: np.ndarray
    ids: np.ndarray
    kept: np.ndarray
    tail: np.ndarray

    @classmethod
    def of(cls, rows: TeacherRows, length: int) -> "_Side":
        values = rows.values[:length].double().numpy()
        kept = values != LOGPROB_SENTINEL
        logprobs = np.where(kept, values, -np.inf)
        if rows.tail_logprob is None:
            tail = np.maximum(1 - np.exp(logprobs).sum(-1), 0)
        else:
            tail = np.exp(rows.tail_logprob[:length].double().numpy())
        ids = np.where(kept, rows.indices[:length].numpy().astype(np.int64), -1)
        return cls(logprobs=logprobs, ids=ids, kept=kept, tail=tail)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TokenComparison:
    """One number per position; see :class:`Comparison`."""

    kept_a: np.ndarray
    kept_b: np.ndarray
    common: np.ndarray
    jaccard: np.ndarray
    equal_sets: np.ndarray
    equal_top: np.ndarray
    equal_values: np.ndarray
    value_difference: np.ndarray
    tail_difference: np.ndarray
    dropped: np.ndarray
    divergence: np.ndarray

    @classmethod
    def of_equal(cls, kept: np.ndarray) -> "_TokenComparison":
        """Return the comparison of tokens with so many entries, which are the same."""
        zeros, ones = np.zeros(len(kept)), np.ones(len(kept))
        return cls(
            kept_a=kept,
            kept_b=kept,
            common=kept,
            jaccard=ones,
            equal_sets=ones,
            equal_top=ones,
            equal_values=kept,
            value_difference=zeros,
            tail_difference=zeros,
            dropped=zeros,
            divergence=zeros,
        )

    @classmethod
    def of(cls, a: _Side, b: _Side) -> "_TokenComparison":
        matched, is_common = _match(a, b)  # (S, K of A)
        kept_a, kept_b, common = (part.sum(-1) for part in (a.kept, b.kept, is_common))
        union = kept_a + kept_b - common
        difference = np.abs(np.subtract(a.logprobs, matched, where=is_common, out=_zeros(a)))
        is_top = (a.logprobs == _largest(a)) & (matched == _largest(b)) & is_common
        dropped = np.exp(np.where(is_common, -np.inf, a.logprobs)).sum(-1)
        # Of a difference of sums nothing is left over where there is nothing.
        added = np.exp(b.logprobs).sum(-1) - np.exp(np.where(is_common, matched, -np.inf)).sum(-1)
        added = np.where(common == kept_b, 0.0, np.maximum(added, 0))
        return cls(
            kept_a=kept_a,
            kept_b=kept_b,
            common=common,
            jaccard=np.where(union == 0, 1.0, common / np.maximum(union, 1)),
            equal_sets=(common == kept_a) & (common == kept_b),
            equal_top=is_top.any(-1) | (union == 0),
            equal_values=(is_common & (difference == 0)).sum(-1),
            value_difference=difference.max(-1),
            tail_difference=np.abs(a.tail - b.tail),
            dropped=dropped,
            divergence=_divergence(a, b, matched, is_common, b.tail + added),
        )


def _zeros(a: _Side) -> np.ndarray:
    return np.zeros_like(a.logprobs)


def _largest(side: _Side) -> np.ndarray:
    """Return ``(S, 1)`` the largest log-probability."""
    found: np.ndarray = side.logprobs.max(-1, keepdims=True)
    return found


def _divergence(
    a: _Side, b: _Side, matched: np.ndarray, is_common: np.ndarray, rest_b: np.ndarray
) -> np.ndarray:
    """Return ``(S,)``; *rest_b* is the probability that B has for ids that are not common."""
    p = np.exp(a.logprobs)
    floor = np.maximum(
        _REST_FLOOR * (np.exp(b.logprobs).sum(-1) + b.tail), np.finfo(np.float64).tiny
    )
    rest_b = np.maximum(rest_b, floor)
    sum_p = p.sum(-1) + a.tail
    sum_q = np.exp(np.where(is_common, matched, -np.inf)).sum(-1) + rest_b
    steps = np.subtract(a.logprobs, matched, where=is_common & (p > 0), out=_zeros(a))
    # Before both sides are divided by their sums, which adds their logarithm to every step.
    found = (p * steps).sum(-1) + _open_terms(a, b, np.where(is_common, 0.0, p), rest_b, floor)
    # Of no mass at all there is no divergence.
    sum_p = np.where(sum_p > 0, sum_p, sum_q)
    clipped: np.ndarray = np.maximum(found / sum_p + np.log(sum_q / sum_p), 0.0)
    return clipped


def _open_terms(
    a: _Side, b: _Side, alone: np.ndarray, rest_b: np.ndarray, floor: np.ndarray
) -> np.ndarray:
    """Return the terms of the rest, and of A's entries that B did not keep.

    They share what B has left in proportion to A, except for entries that reach B's limit.

    Args:
        a: The side of ``p``.
        b: The side of ``q``.
        alone: ``(S, K)`` probability of A's entries that B did not keep, 0 for others.
        rest_b: ``(S,)`` what B has left.
        floor: ``(S,)`` the least that it counts as.
    """
    smallest = np.where(b.kept, b.logprobs, np.inf).min(-1, keepdims=True)
    # Where B kept nothing there is no limit: twice of all that there is.
    smallest = np.exp(np.minimum(smallest, np.log(2.0)))
    terms = np.zeros_like(rest_b)
    while True:
        share = (a.tail + alone.sum(-1))[:, None]  # (S, 1), which shares *rest_b*
        is_full = alone * rest_b[:, None] > smallest * share
        if not is_full.any():
            break
        # Who gets no more leaves more to each of the others, so that more may reach the limit.
        ratios = np.divide(alone, smallest, where=is_full, out=np.ones_like(alone))
        terms += (alone * np.log(ratios)).sum(-1)
        left = rest_b - smallest[:, 0] * is_full.sum(-1)
        rest_b = np.maximum(left, floor)
        alone = np.where(is_full, 0.0, alone)
    share = share[:, 0]
    return terms + share * np.log(np.where(share > 0, share, rest_b) / rest_b)


def _match(a: _Side, b: _Side) -> tuple[np.ndarray, np.ndarray]:
    """Return what B gives the ids of A's entries, and which of them it kept; ``(S, K of A)``."""
    matched = np.full_like(a.logprobs, -np.inf)
    is_common = np.zeros_like(a.kept)
    aligned = np.zeros(len(a.ids), np.bool_)
    if a.ids.shape == b.ids.shape:
        aligned = (a.ids == b.ids).all(-1)
        matched[aligned] = b.logprobs[aligned]
        is_common[aligned] = a.kept[aligned]
    for rows in _batches(np.flatnonzero(~aligned), max(a.ids.shape[1], b.ids.shape[1])):
        matched[rows], is_common[rows] = _search(a.ids[rows], b.ids[rows], b.logprobs[rows])
        is_common[rows] &= a.kept[rows]
    return matched, is_common


def _batches(rows: np.ndarray, k: int) -> Iterator[np.ndarray]:
    """Yield *rows* in parts, whose sorted entries stay in a core's cache."""
    size = max(1, (1 << 16) // k)
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _search(
    ids: np.ndarray, other_ids: np.ndarray, other_logprobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values that others give *ids*, row by row, and whether they have them."""
    order = other_ids.argsort(-1)
    # One ascending sequence: ids are below 2^31, and rows follow each other.
    offsets = np.arange(len(ids), dtype=np.int64)[:, None] << 32
    keys = (np.take_along_axis(other_ids, order, -1) + offsets).ravel()
    places = np.minimum(np.searchsorted(keys, ids + offsets), len(keys) - 1)
    values = np.take_along_axis(other_logprobs, order, -1).ravel()
    return values[places], keys[places] == ids + offsets
