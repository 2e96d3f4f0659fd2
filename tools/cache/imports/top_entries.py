# SPDX-License-Identifier: Apache-2.0
"""The targets of a sample from what a server said of its prompt: top K, tail, checks. Pure."""

import hashlib
from dataclasses import dataclass

import numpy as np

from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tools.cache.imports.server_formats import LineError, Prompt

# Servers compute in fp32 or bf16; more than this is not a rounding of 1.
_MASS_TOLERANCE = 0.01
_OWN_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a line must have.

    Attributes:
        positions: Tokens of a sample, ``S``; a prompt has one more.
        k: Entries that are kept of each.
        vocab_size: All ids are below it.
    """

    positions: int
    k: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopEntries:
    """The targets of a sample.

    Attributes:
        tokens: ``(S + 1,)`` int64 ids of the prompt; the last S are the labels.
        logprobs: ``(S, K)`` float64, falling, at most 0.
        ids: ``(S, K)`` int64.
        tail_logprob: ``(S,)`` float64, log of the mass outside; -inf for none.
        clamped: Positions whose kept mass was 1 or more, by rounding, though more ids exist.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    ids: np.ndarray
    tail_logprob: np.ndarray
    clamped: int

    def digest(self) -> bytes:
        """Return 16 bytes that tell other targets of the same tokens apart."""
        found = hashlib.blake2b(digest_size=16)
        for part in (self.logprobs, self.ids):
            found.update(np.ascontiguousarray(part))
        return found.digest()


def tokens_key(tokens: np.ndarray) -> bytes:
    """Return 16 bytes that tell sequences of tokens apart."""
    content = np.ascontiguousarray(tokens, "<i8")
    return hashlib.blake2b(content, digest_size=16).digest()


def top_entries(prompt: Prompt, expected: Expected) -> TopEntries:
    """Return the K most likely entries of each position; equal ones by rank, then by id.

    What is left of 1 is the tail. Rounding may leave less than nothing, which becomes nothing.

    Raises:
        LineError: The prompt is not a sample's, or its entries are not its top K; says where.
    """
    _check_tokens(prompt.tokens, expected)
    least = int(prompt.counts.min())
    if least < expected.k:
        position = int(prompt.counts.argmin())
        raise LineError(
            f"token {position + 1} has {least} entries, expected {expected.k} or more: ask the "
            "server for as many, or lower --logits-save-top-k"
        )
    if np.isnan(prompt.logprobs).any():
        raise LineError("it has a log-probability that is not a number")
    # (S, n), filled up with what is never chosen
    logprobs = _table(prompt.logprobs, prompt.counts, -np.inf)
    ids = _table(prompt.ids, prompt.counts, -1)
    ranks = None if prompt.ranks is None else _table(prompt.ranks, prompt.counts, 1 << 40)
    _check_own(prompt, logprobs, ids)
    keys = (ids, -logprobs) if ranks is None else (ids, ranks, -logprobs)
    order = np.lexsort(keys, axis=-1)[:, : expected.k]
    kept, kept_ids = (np.take_along_axis(part, order, -1) for part in (logprobs, ids))
    if ranks is not None:
        _check_ranks(kept, np.take_along_axis(ranks, order, -1))
    _check_ids(kept_ids, expected.vocab_size)
    _check_values(kept)
    kept = np.minimum(kept, 0.0)
    # Of a first entry near 1 the difference is what is exact.
    left = -np.expm1(kept[:, 0]) - np.exp(kept[:, 1:]).sum(-1)
    whole = expected.k >= expected.vocab_size
    left = np.zeros_like(left) if whole else left
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(left, 0.0))
    return TopEntries(
        tokens=prompt.tokens,
        logprobs=kept,
        ids=kept_ids,
        tail_logprob=tail,
        clamped=0 if whole else int((left <= 0).sum()),
    )


def _table(flat: np.ndarray, counts: np.ndarray, fill: float) -> np.ndarray:
    """Return ``(S, n)`` from the entries of S positions one after another."""
    width = int(counts.max())
    table = np.full((len(counts), width), fill, flat.dtype)
    table[np.arange(width) < counts[:, None]] = flat
    return table


def _check_tokens(tokens: np.ndarray, expected: Expected) -> None:
    length = expected.positions
    if len(tokens) == length:
        raise LineError(
            f"its prompt has {length} tokens, expected {length + 1}: --seq-length and the label of "
            "the last position, without which that has no target"
        )
    if len(tokens) != length + 1:
        raise LineError(
            f"its prompt has {len(tokens)} tokens, expected {length + 1}: --seq-length and one more"
        )


def _check_own(prompt: Prompt, logprobs: np.ndarray, ids: np.ndarray) -> None:
    """Hold entries and tokens together: the server always says something of the token itself."""
    is_own = ids == prompt.tokens[1:, None]
    there = is_own.any(-1)
    if prompt.own is None:
        if not there.all():
            token = int(there.argmin()) + 1
            raise LineError(
                f"token {token} has the id {prompt.tokens[token]}, which is not among its entries: "
                "they are not of this prompt, or of other positions"
            )
        return
    found = np.where(is_own, logprobs, -np.inf).max(-1)
    slack = _OWN_TOLERANCE * np.maximum(1.0, np.abs(prompt.own))
    fits = np.where(
        there, np.abs(found - prompt.own) <= slack, prompt.own <= logprobs.min(-1) + slack
    )
    if not fits.all():
        token = int(fits.argmin()) + 1
        raise LineError(
            f"token {token} has the log-probability {prompt.own[token - 1]:.6g} in "
            "input_token_logprobs, which input_top_logprobs contradict: they are not of this "
            "prompt, or of other positions"
        )


def _check_ranks(logprobs: np.ndarray, ranks: np.ndarray) -> None:
    """Compare the ranks of falling entries with their places.

    The server numbers its K by place, and the prompt's own token by how many are as likely or,
    in older versions, more likely: among equal entries a rank may occur twice.
    """
    k = ranks.shape[1]
    is_lower = np.zeros(ranks.shape, bool)
    is_lower[:, 1:] = logprobs[:, 1:] < logprobs[:, :-1]
    more_likely = np.maximum.accumulate(np.where(is_lower, np.arange(k), 0), -1)
    wrong = ((ranks <= more_likely) | (ranks > k)).any(-1)
    if wrong.any():
        token = int(wrong.argmax()) + 1
        raise LineError(
            f"token {token} has entries of the ranks {ranks[token - 1, :8].tolist()} by falling "
            f"log-probability, expected 1 to {k}: they are not its top {k}"
        )


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    wrong = ((ids < 0) | (ids >= vocab_size)).any(-1)
    if wrong.any():
        token = int(wrong.argmax()) + 1
        row = ids[token - 1]
        raise LineError(
            f"token {token} has an entry of id {row[(row < 0) | (row >= vocab_size)][0]}, the "
            f"vocabulary has {vocab_size}: the server's tokenizer is another one"
        )
    twice = (np.diff(np.sort(ids, -1), axis=-1) == 0).any(-1)
    if twice.any():
        raise LineError(f"token {int(twice.argmax()) + 1} has two entries of one id")


def _check_values(logprobs: np.ndarray) -> None:
    lowest = logprobs.min(-1)
    wrong = ~(lowest > LOGPROB_SENTINEL)
    if wrong.any():
        token = int(wrong.argmax()) + 1
        raise LineError(
            f"token {token} has the log-probability {lowest[token - 1]:g} among its top "
            f"{logprobs.shape[1]}, which stands for none (vLLM writes -9999 for -inf): the model "
            "has fewer possible tokens there, lower --logits-save-top-k"
        )
    mass = np.exp(np.minimum(logprobs, 700.0)).sum(-1)
    if (mass > 1 + _MASS_TOLERANCE).any():
        token = int(mass.argmax()) + 1
        raise LineError(
            f"the probabilities of token {token} sum to {mass.max():.6g}, expected at most 1: they "
            "are not log-probabilities (natural logarithms of a softmax at temperature 1)"
        )
