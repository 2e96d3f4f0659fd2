# SPDX-License-Identifier: Apache-2.0
"""Finds the line of each sample by its tokens; what has no counterpart is an error, pure."""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from tools.cache.coverage import merge
from tools.cache.imports.line_index import SHOWN, LineIndex, LineProblem, listed
from tools.cache.imports.top_entries import tokens_key


def sample_keys(
    tokens_of: Callable[[int], np.ndarray],
    samples: range,
    advance: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Return the :func:`tokens_key` of each sample, ``(n,)`` S16."""
    keys = np.empty(len(samples), "S16")
    for place, sample in enumerate(samples):
        keys[place] = tokens_key(tokens_of(sample))
        advance()
    return keys


def match_lines(
    index: LineIndex, keys: np.ndarray, samples: range, *, skips_others: bool = False
) -> np.ndarray:
    """Return the number of the line of each sample, ``(n,)``.

    Samples of equal tokens have the same line. A prompt may have several lines that say the same.

    Args:
        index: The lines.
        keys: What :func:`sample_keys` returns for *samples*.
        samples: Numbers of the samples.
        skips_others: Whether lines that are of none of the samples are passed over.

    Raises:
        LineProblem: A sample has no line or lines that differ; or a line is of no sample.
    """
    lines = index.lines
    order = np.argsort(lines["key"], kind="stable")
    known = lines["key"][order]
    place = np.searchsorted(known, keys)
    is_there = np.zeros(len(keys), bool)
    inside = place < len(known)
    is_there[inside] = known[place[inside]] == keys[inside]
    problems = [
        *_missing(samples, is_there),
        *([] if skips_others else _others(index, keys, samples)),
        *_contradictions(index, order, known),
    ]
    if problems:
        raise LineProblem("Lines and samples do not belong together.\n" + "\n".join(problems))
    return order[place]


def _missing(samples: range, is_there: np.ndarray) -> Iterable[str]:
    missing = np.flatnonzero(~is_there)
    if len(missing):
        spans = merge((samples[n], samples[n] + 1) for n in missing[: 1 << 16].tolist())
        shown = ", ".join(map(str, spans[:SHOWN])) + (", ..." if len(spans) > SHOWN else "")
        yield (
            f"{len(missing)} of {len(samples)} samples have no line with their tokens: {shown}. "
            "Ask the server for the prompts that the verb prompts writes, with the training's own "
            "flags."
        )


def _others(index: LineIndex, keys: np.ndarray, samples: range) -> Iterable[str]:
    others = np.flatnonzero(~np.isin(index.lines["key"], keys))
    if len(others):
        yield (
            f"{len(others)} of {len(index.lines)} lines have the tokens of none of samples "
            f"{samples[0]} to {samples[-1]} (--skip-other-lines passes over them):"
            + listed([index.place(n) for n in others[:SHOWN].tolist()], len(others))
        )


def _contradictions(index: LineIndex, order: np.ndarray, known: np.ndarray) -> Iterable[str]:
    digests = index.lines["digest"][order]
    differ = np.flatnonzero((known[1:] == known[:-1]) & (digests[1:] != digests[:-1]))
    if len(differ):
        pairs = (f"{index.place(order[n])} and {index.place(order[n + 1])}" for n in differ)
        yield (
            f"{len(differ)} pairs of lines have the same prompt and other log-probabilities; "
            "remove one of each:" + listed(list(itertools.islice(pairs, SHOWN)), len(differ))
        )
