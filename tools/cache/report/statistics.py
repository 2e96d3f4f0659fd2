# SPDX-License-Identifier: Apache-2.0
"""Statistics of tokens' kept entries that can be added up over payloads, in float64, pure.

A token is one position of one sample, with up to K entries of falling log-probability and the
mass of the others, its tail. Where a cache has no tails, one less the kept mass stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tools.cache.report.histogram import Scale

P_GRID = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The top-P that are looked at."""
MASS = Scale(low=1e-6, high=1 - 1e-6, bins=2048, is_logit=True)
"""Bins of masses."""
ENTROPY = Scale(low=0, high=16, bins=800)
"""Bins of entropies, in nats."""
PROBABILITY = Scale(low=0, high=1, bins=100)
"""Bins of a probability that is shown as it is."""

_CHUNK_ENTRIES = 1 << 18
"""Entries that are worked on at once, for their float64 copies to stay in cache."""


def k_grid(k: int) -> list[int]:
    """Return the K' below *k* that are looked at: 1, 1.25, 1.5 and 1.75 times powers of two."""
    steps = (quarter << power >> 2 for power in range(32) for quarter in (4, 5, 6, 7))
    return sorted({step for step in steps if step < k})


@dataclass(kw_only=True, eq=False)
class Statistics:
    """Sums and counts over tokens. G is the length of ``k_grid(k)``, P that of :data:`P_GRID`.

    Attributes:
        k: The most entries that a token may have.
        tokens: Tokens with entries; all that follows is of them.
        empty: Tokens without any.
        with_tail: Tokens whose tail is recorded.
        entries: Entries of all tokens.
        kept_at: ``(G,)`` sums of the mass of the first K' entries.
        kept_at_counts: ``(G, bins)`` of it, by :data:`MASS`.
        entries_at: ``(G,)`` sums of the entries among the first K'.
        kept: Sum of the mass of all entries.
        kept_counts: ``(1, bins)`` of it.
        tail: Sum of the tails.
        tail_counts: ``(1, bins)`` of them.
        defect: Sum of how far kept mass and recorded tail are from one together.
        entries_counts: ``(k + 1,)`` tokens by number of entries.
        top_p_counts: ``(P, k + 1)`` tokens by number of entries of their nucleus.
        top_p_kept: ``(P,)`` sums of the mass of the nucleus.
        top_p_short: ``(P,)`` tokens whose entries have less mass than P together.
        top1_counts: ``(1, bins)`` of the largest probability, by :data:`PROBABILITY`.
        top1: Sum of it.
        entropy: Sum of the entropy with the tail as one entry: a lower bound of the teacher's.
        entropy_counts: ``(1, bins)`` of it, by :data:`ENTROPY`.
        entropy_kept: Sum of the entropy of the entries alone, as if they were all.
        entropy_kept_counts: ``(1, bins)`` of it.
        position_tokens: ``(S,)`` tokens at each position.
        position_entropy: ``(S,)`` sums of the entropy with the tail.
        position_kept: ``(S,)`` sums of the kept mass.
    """

    k: int
    tokens: float
    empty: float
    with_tail: float
    entries: float
    kept_at: np.ndarray
    kept_at_counts: np.ndarray
    entries_at: np.ndarray
    kept: float
    kept_counts: np.ndarray
    tail: float
    tail_counts: np.ndarray
    defect: float
    entries_counts: np.ndarray
    top_p_counts: np.ndarray
    top_p_kept: np.ndarray
    top_p_short: np.ndarray
    top1_counts: np.ndarray
    top1: float
    entropy: float
    entropy_counts: np.ndarray
    entropy_kept: float
    entropy_kept_counts: np.ndarray
    position_tokens: np.ndarray
    position_entropy: np.ndarray
    position_kept: np.ndarray

    @classmethod
    def nothing(cls, k: int = 0, positions: int = 0) -> Statistics:
        """Return those of no token."""
        grid, grid_p = len(k_grid(k)), len(P_GRID)
        shapes: dict[str, tuple[int, ...]] = {
            "kept_at": (grid,),
            "kept_at_counts": (grid, MASS.bins),
            "entries_at": (grid,),
            "kept_counts": (1, MASS.bins),
            "tail_counts": (1, MASS.bins),
            "entries_counts": (k + 1,),
            "top_p_counts": (grid_p, k + 1),
            "top_p_kept": (grid_p,),
            "top_p_short": (grid_p,),
            "top1_counts": (1, PROBABILITY.bins),
            "entropy_counts": (1, ENTROPY.bins),
            "entropy_kept_counts": (1, ENTROPY.bins),
            "position_tokens": (positions,),
            "position_entropy": (positions,),
            "position_kept": (positions,),
        }
        content: dict[str, Any] = {field.name: 0.0 for field in fields(cls)}
        content |= {name: np.zeros(shape) for name, shape in shapes.items()}
        return cls(**{**content, "k": k})

    def __iadd__(self, other: Statistics) -> Statistics:
        """Add those of other tokens, which may have other K and positions."""
        wider = max(self.k, other.k)
        mine, theirs = self._widened(wider), other._widened(wider)
        for field in fields(self):
            a, b = mine[field.name], theirs[field.name]
            if isinstance(a, np.ndarray) and a.shape != b.shape:  # only positions differ now
                a, b = (np.pad(part, (0, max(len(a), len(b)) - len(part))) for part in (a, b))
            setattr(self, field.name, a + b)
        self.k = wider
        return self

    def _widened(self, k: int) -> dict[str, np.ndarray]:
        """Return all values as if tokens might have *k* entries."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("entries_counts", "top_p_counts"):
            pad = [(0, 0)] * (values[name].ndim - 1) + [(0, k - self.k)]
            values[name] = np.pad(values[name], pad)
        more = len(k_grid(k)) - len(self.kept_at)
        # The first K' entries are all there are.
        values["kept_at"] = np.append(self.kept_at, [self.kept] * more)
        values["entries_at"] = np.append(self.entries_at, [self.entries] * more)
        values["kept_at_counts"] = np.concatenate([self.kept_at_counts, *[self.kept_counts] * more])
        return values

    def add(self, rows: TeacherRows) -> None:
        """Add the tokens of decoded rows."""
        positions, _, k = rows.values.shape
        part = Statistics.nothing(k, positions)
        values = rows.values.float().numpy().astype(np.float64).reshape(-1, k)
        tail = None if rows.tail_logprob is None else rows.tail_logprob.numpy().reshape(-1)
        where = np.repeat(np.arange(positions), rows.values.shape[1])
        step = max(1, _CHUNK_ENTRIES // max(k, 1))
        for begin in range(0, len(values), step):
            chunk = slice(begin, begin + step)
            part._add_tokens(values[chunk], None if tail is None else tail[chunk], where[chunk])
        self += part

    def _add_tokens(
        self, values: np.ndarray, tail_logprob: np.ndarray | None, positions: np.ndarray
    ) -> None:
        """Add tokens: ``(T, k)`` log-probabilities, ``(T,)`` tails, ``(T,)`` positions."""
        there = values != LOGPROB_SENTINEL
        some = there.any(axis=1)
        self.empty += float((~some).sum())
        values, there, positions = values[some], there[some], positions[some]
        if not len(values):
            return
        p = np.where(there, np.exp(values), 0.0)
        if (np.diff(p, axis=1) > 0).any():
            order = np.argsort(-p, axis=1, kind="stable")
            p, there = (np.take_along_axis(part, order, axis=1) for part in (p, there))
        cumulated = p.cumsum(axis=1)
        kept, number = cumulated[:, -1], there.sum(axis=1)
        if tail_logprob is None:
            tail = np.clip(1 - kept, 0, 1)
        else:
            tail = np.exp(tail_logprob[some].astype(np.float64))
            self.with_tail += len(tail)
            self.defect += float(np.abs(1 - kept - tail).sum())
        self.tokens += len(p)
        self.entries += float(number.sum())
        self.entries_counts += np.bincount(number, minlength=self.k + 1)
        self._add_mass(cumulated, kept, tail, number)
        self._add_top_p(p, cumulated, number)
        self._add_entropy(p, kept, tail, positions)
        self.position_kept += np.bincount(positions, kept, minlength=len(self.position_kept))

    def _add_mass(
        self, cumulated: np.ndarray, kept: np.ndarray, tail: np.ndarray, number: np.ndarray
    ) -> None:
        grid = np.array(k_grid(self.k), dtype=np.int64)
        at = cumulated[:, grid - 1]
        self.kept_at += at.sum(axis=0)
        self.kept_at_counts += MASS.count(at)
        self.entries_at += np.minimum(number[:, None], grid).sum(axis=0)
        self.kept += float(kept.sum())
        self.kept_counts += MASS.count(kept[:, None])
        self.tail += float(tail.sum())
        self.tail_counts += MASS.count(tail[:, None])
        self.top1 += float(cumulated[:, 0].sum())
        self.top1_counts += PROBABILITY.count(cumulated[:, :1])

    def _add_top_p(self, p: np.ndarray, cumulated: np.ndarray, number: np.ndarray) -> None:
        before = cumulated - p
        tokens = np.arange(len(p))
        for place, top_p in enumerate(P_GRID):
            # The entries before which less than P of the mass lies, as a dump with top-P keeps.
            chosen = np.minimum((before < top_p).sum(axis=1), number)
            self.top_p_counts[place] += np.bincount(chosen, minlength=self.k + 1)
            self.top_p_kept[place] += cumulated[tokens, chosen - 1].sum()
            self.top_p_short[place] += (cumulated[:, -1] < top_p).sum()

    def _add_entropy(
        self, p: np.ndarray, kept: np.ndarray, tail: np.ndarray, positions: np.ndarray
    ) -> None:
        of_entries = _surprise(p).sum(axis=1)
        with_tail = of_entries + _surprise(tail)
        mass = np.maximum(kept, np.finfo(np.float64).tiny)  # entries so small that they are 0
        alone = of_entries / mass + np.log(mass)
        self.entropy += float(with_tail.sum())
        self.entropy_counts += ENTROPY.count(with_tail[:, None])
        self.entropy_kept += float(alone.sum())
        self.entropy_kept_counts += ENTROPY.count(alone[:, None])
        size = len(self.position_tokens)
        self.position_tokens += np.bincount(positions, minlength=size)
        self.position_entropy += np.bincount(positions, with_tail, minlength=size)

    def entries_quantile(self, q: float, top_p: int | None = None) -> int:
        """Return the number of entries that a share *q* of the tokens does not exceed, exactly.

        Args:
            q: The share.
            top_p: Place in :data:`P_GRID` of the top-P that is applied first; None for none.
        """
        counts = self.entries_counts if top_p is None else self.top_p_counts[top_p]
        return int(np.searchsorted(counts.cumsum(), q * counts.sum(), side="left"))


def mean_entries(counts: np.ndarray) -> np.ndarray:
    """Return the mean number of entries of each row of ``(P, k + 1)`` counts."""
    return counts @ np.arange(counts.shape[1]) / counts.sum(axis=1)


def in_bins(
    sums: np.ndarray, weights: np.ndarray, bins: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Return centres and means of up to *bins* equally wide bins of positions that have tokens."""
    width = max(1, -(-len(sums) // bins))
    edges = np.arange(0, len(sums), width)
    total, weight = np.add.reduceat(sums, edges), np.add.reduceat(weights, edges)
    there = weight > 0
    centres = (edges + np.minimum(edges + width, len(sums)) - 1) / 2
    return centres[there].tolist(), (total[there] / weight[there]).tolist()


def _surprise(p: np.ndarray) -> np.ndarray:
    """Return ``-p log p``, 0 for 0."""
    return -p * np.log(np.where(p > 0, p, 1.0))
