# SPDX-License-Identifier: Apache-2.0
"""What a cache would take with fewer entries: some of its rows are encoded again and measured.

Bytes per entry differ: the first entries of a token have steep values and frequent ids. So rows are
cut and encoded by the codec of their format, instead of counting entries.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import (
    FORMAT_VERSION,
    INDEX_SENTINEL,
    LOGPROB_SENTINEL,
)
from megatron.training.distillation.save_format import EIGHT_BIT
from tools.cache.conversion import Encoding, encode
from tools.cache.entry_change import unmasked
from tools.cache.report.statistics import P_GRID

_MOST_ENTRIES = 1 << 18
"""They are encoded a few dozen times, in about a second."""


@dataclass(kw_only=True, eq=False)
class Sizes:
    """Bytes of the same tokens with fewer entries.

    Attributes:
        tokens: How many tokens.
        whole: Bytes with all their entries.
        by_k: Bytes with the first K' entries.
        by_p: Bytes with the entries of the nucleus of P.
    """

    tokens: int
    whole: int
    by_k: dict[int, int]
    by_p: dict[float, int]

    def __iadd__(self, other: Sizes) -> Sizes:
        """Add those of other tokens; only what both measured stays."""
        self.tokens += other.tokens
        self.whole += other.whole
        self.by_k = {k: size + other.by_k[k] for k, size in self.by_k.items() if k in other.by_k}
        self.by_p = {p: size + other.by_p[p] for p, size in self.by_p.items() if p in other.by_p}
        return self


def measure_sizes(rows: TeacherRows, encoding: Encoding, vocab_size: int) -> Sizes:
    """Encode *rows*, of many only some, again with fewer and fewer entries."""
    rows = unmasked(_part(rows))
    positions, samples, k = rows.values.shape

    def size(cut: TeacherRows) -> int:
        return len(encode(cut, encoding, vocab_size))

    return Sizes(
        tokens=positions * samples,
        whole=size(rows),
        by_k={fewer: size(with_top_k(rows, fewer)) for fewer in _measured_k(k)},
        by_p={p: size(with_top_p(rows, p)) for p in P_GRID},
    )


def _part(rows: TeacherRows) -> TeacherRows:
    """Return so many rows, and of one so many leading positions, that they encode quickly."""
    positions, samples, k = rows.values.shape
    samples = min(samples, max(1, _MOST_ENTRIES // (positions * k)))
    positions = min(positions, max(1, _MOST_ENTRIES // (samples * k)))
    tail = rows.tail_logprob
    return TeacherRows(
        values=rows.values[:positions, :samples],
        indices=rows.indices[:positions, :samples],
        tail_logprob=None if tail is None else tail[:positions, :samples],
    )


def encoding_of(format_version: int, save_dtype: str | None) -> Encoding:
    """Return the encoding of a cache; that of format 2 for v1, which is written no more."""
    version = max(format_version, FORMAT_VERSION)
    return Encoding(version, save_dtype == EIGHT_BIT)


def _measured_k(k: int) -> list[int]:
    """Return powers of two, and 1.5 times them, below *k*: size is smooth in K."""
    powers = [1 << power for power in range(k.bit_length())]
    return sorted(fewer for fewer in {*powers, *(3 * power for power in powers)} if fewer < k)


def with_top_k(rows: TeacherRows, k: int) -> TeacherRows:
    """Return *rows* with the first *k* entries of each token; tails do not enter sizes."""
    return dataclasses.replace(rows, values=rows.values[..., :k], indices=rows.indices[..., :k])


def with_top_p(rows: TeacherRows, p: float) -> TeacherRows:
    """Return *rows* with each token's nucleus, as wide as the widest."""
    probabilities = rows.values.double().exp()
    keep = (probabilities.cumsum(-1) - probabilities < p) & (rows.values != LOGPROB_SENTINEL)
    width = max(1, int(keep.sum(-1).max())) if keep.numel() else 1
    cut = with_top_k(rows, width)
    drop = ~keep[..., :width]
    return dataclasses.replace(
        cut,
        values=cut.values.masked_fill(drop, LOGPROB_SENTINEL),
        indices=cut.indices.masked_fill(drop, INDEX_SENTINEL).to(torch.int32),
    )
