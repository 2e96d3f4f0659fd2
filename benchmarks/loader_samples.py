# SPDX-License-Identifier: Apache-2.0
"""The teacher of ``bench_loader``: logits like a model's, in which every sample can be recognised.

At the first position of each quarter of a sample one token has all the mass: its id says which
sample and which quarter it is.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.implementation_worker import scale_to_mass

QUARTERS = 4
_DIFFERENT_SAMPLES = 8
_ROLL = 1009


@dataclass(frozen=True)
class Sizes:
    """Tokens per sample, vocabulary, entries per token, and the format that ours writes."""

    seq_length: int
    vocab_size: int
    top_k: int
    save_format: int = 2

    @property
    def packed_bytes(self) -> float:
        """Bytes of the entries of a token: fp16 values and ids of 17 bits."""
        return self.top_k * (2 + 2 + 1 / 8)


def expected_ids(sample: int, cp_rank: int = 0, cp_size: int = 1) -> list[int]:
    """Return the ids at the marked positions that a context parallel rank holds of *sample*."""
    quarters = [0, 1, 2, 3] if cp_size == 1 else [cp_rank, QUARTERS - 1 - cp_rank]
    return [sample * QUARTERS + quarter for quarter in quarters]


def marked_entries(
    values: torch.Tensor, indices: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of the entries at every *step*-th position of ``(S / cp, 1, K)`` entries."""
    return values[::step, 0].clone(), indices[::step, 0].clone()


def found_ids(values: torch.Tensor, indices: torch.Tensor) -> list[int]:
    """Return the most probable ids of what :func:`marked_entries` returned."""
    ids: list[int] = indices.gather(-1, values.argmax(-1, keepdim=True))[:, 0].tolist()
    return ids


class Teacher:
    """A stand-in for a model whose output layer a saver records.

    Args:
        sizes: Its vocabulary.
        length: Tokens per sample.
    """

    def __init__(self, sizes: Sizes, length: int) -> None:
        tokens = _DIFFERENT_SAMPLES * length
        logits = correlated_logits(tokens, sizes.vocab_size, seed=17)
        self._logits = logits.unflatten(0, (_DIFFERENT_SAMPLES, -1))
        self._model: Any = None

    def attach(self, saver: Any) -> None:
        """Have *saver* record from here on."""
        model: Any = torch.nn.Module()
        model.output_layer = torch.nn.Identity()
        model.compute_language_model_loss = lambda labels, logits: logits
        saver.attach_hooks(model.train())
        self._model = model

    def show(self, sample: int, cp_rank: int, cp_size: int) -> None:
        """Pass one sample through the model, or a context parallel rank's part of it.

        Its labels are its number, so that they too tell samples apart.
        """
        pool_row, turn = sample % _DIFFERENT_SAMPLES, sample // _DIFFERENT_SAMPLES
        # Other ids and another temperature every time, so that zstd finds no repetition.
        logits = self._logits[pool_row].roll(_ROLL * turn, -1) * (1 + turn % 8 / 50)
        step = len(logits) // QUARTERS
        for position, token in enumerate(expected_ids(sample)):
            logits[position * step, token] = 200.0
        if cp_size > 1:
            chunks = logits.chunk(2 * cp_size)
            logits = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
        logits = logits[:, None]
        with torch.no_grad():
            self._model.output_layer(logits)
            labels = torch.full((1, len(logits)), sample)
            self._model.compute_language_model_loss(labels, logits)


def correlated_logits(
    tokens: int, vocab: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return logits ``(T, V)`` of a Zipf-like prior, correlated in time as a text's are.

    ``(prior + W h[t] + noise) * temperature[t]``; ``h`` and the logarithm of the temperature are
    autoregressive in ``t``.
    """
    generator = torch.Generator().manual_seed(seed)
    order = (
        (torch.arange(vocab) + 8.0).log() + 0.8 * torch.randn(vocab, generator=generator)
    ).argsort()
    prior = torch.empty(vocab)
    prior[order] = -(torch.arange(vocab) + 3.0).log()  # low ids tend to be frequent
    prior -= prior.mean()
    directions = 0.25 * torch.randn(48, vocab, generator=generator)
    gumbel = -torch.log(
        -torch.log(torch.rand(2 * vocab, generator=generator).clamp(1e-7, 1 - 1e-7))
    )

    def autoregressive(width: int, memory: float) -> torch.Tensor:
        noise = torch.randn(tokens, width, generator=generator)
        for t in range(1, tokens):
            noise[t] = memory * noise[t - 1] + (1 - memory**2) ** 0.5 * noise[t]
        return noise

    hidden, temperature = autoregressive(48, 0.6), (0.35 * autoregressive(1, 0.4)).exp()
    shifts = torch.randint(vocab, (tokens,), generator=generator).tolist()
    logits = torch.empty(tokens, vocab, dtype=dtype)
    scale = 0.0
    for first in range(0, tokens, 64):
        part = slice(first, first + 64)
        rows = hidden[part] @ directions + prior
        rows += torch.stack([gumbel[shift : shift + vocab] for shift in shifts[part]])
        rows *= temperature[part]
        scale = scale or scale_to_mass(rows)
        logits[part] = scale * rows
    return logits
