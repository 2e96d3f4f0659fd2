# SPDX-License-Identifier: Apache-2.0
"""Whether the decoded rows of a payload can be what a teacher recorded, pure.

Rounding is allowed for and nothing else: the bound on a token's mass is what the rounding of its
own log-probabilities can make of it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation.packed_rows import PackedRows, TeacherRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from megatron.training.distillation.save_format import EIGHT_BIT
from megatron.training.distillation.shard_meta import ShardMeta

# Half a unit in the last place, relative.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    EIGHT_BIT: torch.float16,
}
# Of the fp32 arithmetic behind a log-probability, and of the teacher's sum over its vocabulary.
_ARITHMETIC = 1e-3
# What is looked at together, so that its copies stay in a processor's cache.
_ENTRIES_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the metadata of a shard promises of every payload; None for what they do not say.

    Attributes:
        positions: Tokens of a sample.
        k: Entries of a token, at most.
        min_k: Entries that a token keeps, at least.
        dtype: Of the values.
        eight_bit: Whether values were stored as 8-bit codes.
        vocab_size: All ids are below it.
    """

    positions: int | None
    k: int | None
    min_k: int | None
    dtype: torch.dtype | None
    eight_bit: bool
    vocab_size: int | None

    @classmethod
    def of(cls, meta: ShardMeta) -> "Promise":
        """Return what *meta* says."""
        manifest, saver = meta.manifest, meta.saver
        return cls(
            positions=None if manifest is None else manifest.sequence_length,
            k=saver.k,
            min_k=saver.min_k,
            dtype=_DTYPES.get(saver.save_dtype or ""),
            eight_bit=saver.save_dtype == EIGHT_BIT,
            vocab_size=None if manifest is None else manifest.vocab_size,
        )


def find_fault(rows: PackedRows, promise: Promise) -> str | None:
    """Return what is wrong with the *rows* of a payload, in words; None if nothing is."""
    positions, samples, k = rows.values.shape
    for name, found, expected in (
        ("positions", positions, promise.positions),
        ("dtype", rows.values.dtype, promise.dtype),
    ):
        if expected is not None and found != expected:
            return f"its {name} is {found}, its metadata says {expected}"
    if promise.k is not None and k > promise.k:
        return f"it has {k} entries per token, its metadata says at most {promise.k}"
    for start, part in _parts(rows):
        fault = _fault_of_tokens(part, promise)
        if fault is not None:
            token, what = fault
            position, row = start + token // samples, token % samples
            return f"at row {row}, position {position}, {what}"
    return None


def _parts(rows: PackedRows) -> Iterator[tuple[int, TeacherRows]]:
    """Yield the rows by ranges of positions, with the first position of each."""
    positions, samples, k = rows.values.shape
    length = max(1, _ENTRIES_AT_ONCE // (samples * k))
    for start in range(0, positions, length):
        yield start, rows.unpack(positions=slice(start, start + length))


def _fault_of_tokens(rows: TeacherRows, promise: Promise) -> tuple[int, str] | None:
    """Return the first token with a fault, counted over all of *rows*, and the fault."""
    k = rows.values.shape[-1]
    values = rows.values.float().numpy().reshape(-1, k)
    ids = rows.indices.numpy().reshape(-1, k)
    kept = values != LOGPROB_SENTINEL
    finite = np.isfinite(values)
    masses = np.exp(values, where=kept & finite, out=np.zeros_like(values))
    mass = masses.sum(axis=-1, dtype=np.float64)
    checks: Iterator[tuple[np.ndarray, str]] = itertools.chain(
        (
            (~finite.all(axis=-1), "a value is not finite"),
            ((values[:, 1:] > values[:, :-1]).any(axis=-1), "values do not fall"),
            (values[:, 0] > _ARITHMETIC, "a log-probability is above 0"),
            (kept.sum(axis=-1) < min(promise.min_k or 1, k), "too few entries are kept"),
        ),
        _checks_of_ids(ids, kept, promise.vocab_size),
        _checks_of_mass(rows, mass, _doubt(values, masses, rows.values.dtype, promise)),
    )
    for is_bad, what in checks:
        if is_bad.any():
            return int(is_bad.argmax()), what
    return None


def _checks_of_ids(
    ids: np.ndarray, kept: np.ndarray, vocab_size: int | None
) -> Iterator[tuple[np.ndarray, str]]:
    if vocab_size is not None:
        outside = kept & ((ids >= vocab_size) | (ids < 0))
        yield outside.any(axis=-1), f"an id is outside the vocabulary of {vocab_size}"
    masked = -1 - np.arange(ids.shape[-1], dtype=ids.dtype)
    ordered = np.sort(np.where(kept, ids, masked), axis=-1)
    yield (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1), "an id occurs twice"


def _checks_of_mass(
    rows: TeacherRows, mass: np.ndarray, doubt: np.ndarray
) -> Iterator[tuple[np.ndarray, str]]:
    yield mass > 1 + doubt, "the kept probabilities are more than 1 together"
    if rows.tail_logprob is None:
        return
    tail = rows.tail_logprob.numpy().reshape(-1)
    yield np.isnan(tail) | (tail > _ARITHMETIC), "the tail is no log-probability"
    whole = mass + np.exp(tail, dtype=np.float64)
    yield np.abs(whole - 1) > doubt, "kept probabilities and tail are not 1 together"


def _doubt(
    values: np.ndarray, masses: np.ndarray, dtype: torch.dtype, promise: Promise
) -> np.ndarray:
    """Return how far rounding may have moved each token's kept mass."""
    size = np.minimum(np.abs(values), 24)  # beyond it there is no mass to speak of
    # Codes stand for -24 (c / 255)^2: half a step at a value v is sqrt(24 v) / 255.
    error = np.sqrt(24 * size) / 255 + 24 / 255**2 if promise.eight_bit else size * _ROUNDING[dtype]
    doubt: np.ndarray = _ARITHMETIC + (masses * error).sum(axis=-1, dtype=np.float64) * 1.1
    return doubt
