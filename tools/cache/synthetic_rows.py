# SPDX-License-Identifier: Apache-2.0
"""Rows as a language model's teacher would record them, from a few numbers and without a model.

The assumptions, chosen so that payloads take what those of ``benchmarks.bench_format`` do:

* Logits fall like the largest of many: between entry ``k`` and the next lie ``s / k`` on average,
  exponentially distributed, with ``s`` about 1.5 and log-normal from token to token. So the most
  probable token has some 0.4, and 128 of them 0.83 of the mass, which goes on to fall in the same
  way beyond them.
* bf16 logits are around 24, where they are multiples of 1/8. So many log-probabilities are equal.
* The ids of the entries follow Zipf's law over the vocabulary, from its 40th id on, independent of
  position and neighbours. A narrow corpus repeats fewer ids and takes less.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation.fingerprint import chunk_count
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p

_SCALE, _SCALE_SPREAD = 1.5, 0.35
_LARGEST_LOGIT, _LARGEST_LOGIT_SPREAD = 24.0, 0.1
_FIRST_RANK = 40
_ORDER_NOISE = 0.8
_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What is kept of a teacher's distribution.

    Attributes:
        k: Entries per token, at most.
        p: Mass of the nucleus; None keeps all K.
        min_k: Entries that a nucleus has at least.
        mean_kept: Entries of a nucleus on average, whatever *p* is; None for those that *p* gives.
        dtype: Of the stored values.
        vocab_size: All ids are below it.
    """

    k: int
    p: float | None = None
    min_k: int = 1
    mean_kept: float | None = None
    dtype: torch.dtype = torch.float16
    vocab_size: int


def synthetic_rows(
    recording: Recording, positions: int, rows: int, *, bf16_logits: bool, seed: int = 1
) -> TeacherRows:
    """Return ``(positions, rows, K)`` entries, with tails and fingerprints."""
    generator = np.random.default_rng(seed)
    logprobs, tail = _logprobs(recording, positions * rows, bf16_logits, generator)
    ids = _ids(recording, logprobs.shape, generator)

    def by_row(part: np.ndarray) -> torch.Tensor:
        """``(rows * S, ...)`` to ``(S, rows, ...)``."""
        return torch.from_numpy(part).unflatten(0, (rows, positions)).transpose(0, 1).contiguous()

    size = (chunk_count(positions), rows)
    found = TeacherRows(
        values=by_row(logprobs),
        indices=by_row(ids.astype(np.int32)),
        tail_logprob=by_row(tail).float(),
        label_fingerprints=torch.from_numpy(generator.integers(-(2**62), 2**62, size)),
    )
    return as_recorded(found, recording)


def as_recorded(rows: TeacherRows, recording: Recording) -> TeacherRows:
    """Return what a dump stores of wider rows, which have tails.

    Raises:
        ValueError: No nucleus has as many entries on average as are wanted.
    """
    assert rows.tail_logprob is not None
    values, k = rows.values.float(), recording.k
    dropped = values[..., k:].masked_fill(values[..., k:] == -1000.0, -math.inf).logsumexp(-1)
    entries = TeacherTopK(
        logprobs=values[..., :k],
        indices=rows.indices[..., :k].long(),
        tail_logprob=torch.logaddexp(rows.tail_logprob, dropped),
    )
    p = recording.p
    if recording.mean_kept is not None:
        p = _nucleus_of(entries, recording)
    if p is not None:
        entries = apply_top_p(entries, p, recording.min_k)[0]
    # As a dump does: entries that no token keeps are not stored.
    width = max(1, int((entries.indices >= 0).any(dim=(0, 1)).sum()))
    return TeacherRows(
        values=entries.logprobs[..., :width].to(recording.dtype),
        indices=entries.indices[..., :width].int(),
        tail_logprob=entries.tail_logprob,
        label_fingerprints=rows.label_fingerprints,
    )


def _nucleus_of(entries: TeacherTopK, recording: Recording) -> float:
    """Return the P whose nuclei have the wanted number of entries on average."""
    wanted = recording.mean_kept
    assert wanted is not None
    low, high = 1e-6, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mean = float(apply_top_p(entries, middle, recording.min_k)[1].double().mean())
        low, high = (middle, high) if mean < wanted else (low, middle)
    return high


def _logprobs(
    recording: Recording, tokens: int, bf16_logits: bool, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(T, K)`` falling log-probabilities, and ``(T,)`` the logarithm of the rest."""
    k, vocab = recording.k, recording.vocab_size
    scale = _SCALE * np.exp(_SCALE_SPREAD * generator.standard_normal((tokens, 1)))
    steps = scale * generator.exponential(size=(tokens, k)) / np.maximum(np.arange(k), 1)
    steps[:, 0] = 0.0
    logits = -np.cumsum(steps, axis=1)
    # sum of (k / j)^s over j from k to the vocabulary's size, as an integral
    power = 1 - scale[:, 0]
    power = np.where(np.abs(power) < 1e-6, 1e-6, power)
    beyond = k * np.expm1(power * math.log(vocab / k)) / power
    tail = logits[:, -1] + np.log(np.maximum(beyond, 1e-30))
    if bf16_logits:
        spread = np.exp(_LARGEST_LOGIT_SPREAD * generator.standard_normal((tokens, 1)))
        largest = _LARGEST_LOGIT * spread
        rounded = torch.from_numpy(logits + largest).bfloat16().double().numpy()
        logits = rounded - largest
    total = np.logaddexp(np.log(np.exp(logits).sum(1)), tail)
    return logits - total[:, None], tail - total


def _ids(
    recording: Recording, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    vocab = recording.vocab_size
    ranks = np.arange(vocab)
    cumulated = np.cumsum(1 / (ranks + _FIRST_RANK))
    places = np.searchsorted(cumulated, generator.random(shape) * cumulated[-1])
    # Low ids tend to be frequent.
    noise = _ORDER_NOISE * generator.standard_normal(vocab)
    order = np.argsort(np.log(ranks + 8) + noise)
    found: np.ndarray = order[np.minimum(places, vocab - 1)]
    return found
