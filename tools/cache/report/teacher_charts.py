# SPDX-License-Identifier: Apache-2.0
"""What the teacher's distributions are like."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tools.cache.report.chart import Chart, Table, tip_of
from tools.cache.report.statistics import (
    ENTROPY,
    P_GRID,
    PROBABILITY,
    Statistics,
    in_bins,
)
from tools.cache.report.svg import Axis, Plot, axis_over

_POSITION_BINS = 128
_ENTRY_BINS = 64


def entropy(found: Statistics, vocab_size: int | None) -> Chart:
    """Return the distribution of the teacher's entropy."""
    merged = 8
    series = [
        (name, counts[0].reshape(-1, merged).sum(axis=1) / found.tokens)
        for name, counts in (
            ("with the tail as one entry", found.entropy_counts),
            ("kept entries alone", found.entropy_kept_counts),
        )
    ]
    edges = ENTROPY.edges[::merged]
    last = max(int(np.flatnonzero(share)[-1]) for _, share in series) + 1
    plot = Plot(
        name="entropy",
        label="Distribution of entropy: with the tail as one entry, and of the kept entries alone",
        x=Axis(title="entropy (nats)", low=0, high=max(float(edges[last]), 0.5)),
        y=_share_axis(series),
    )
    table = _draw(
        plot,
        edges[: last + 1],
        [(name, share[:last]) for name, share in series],
        lambda left, right: f"{left:.2f} to {right:.2f} nats",
    )
    mean = found.entropy / found.tokens
    plot.mark_x(mean, f"mean {mean:.3f}")
    return Chart(
        plot=plot,
        title="Entropy of the teacher",
        text=_entropy_text(found, vocab_size),
        legend=[(number, name) for number, (name, _) in enumerate(series, 1)],
        table=table,
    )


def _entropy_text(found: Statistics, vocab_size: int | None) -> str:
    mean = found.entropy / found.tokens
    text = f"With the tail as one entry it is a lower bound: {mean:.3f} nats on average"
    if vocab_size is not None:
        most = mean + found.tail / found.tokens * math.log(vocab_size)
        text += f"; it is below {most:.3f}, as if the tail were spread over {vocab_size} ids evenly"
    alone = found.entropy_kept / found.tokens
    return f"{text}. The kept entries alone, as if they were all, have {alone:.3f}."


def by_position(found: Statistics, what: str) -> Chart:
    """Return the mean ``entropy`` or ``kept`` mass along the sequence."""
    is_entropy = what == "entropy"
    sums = found.position_entropy if is_entropy else found.position_kept
    centres, means = in_bins(sums, found.position_tokens, _POSITION_BINS)
    title = "mean entropy (nats)" if is_entropy else "mean kept mass"
    plot = Plot(
        name=f"position-{what}",
        label=f"{title} by position in the sequence",
        x=Axis(title="position in the sequence", low=0, high=max(len(sums) - 1, 1)),
        y=axis_over(title, means, from_zero=is_entropy),
    )
    unit = "nats" if is_entropy else "kept"
    plot.line(1, list(zip(centres, means, strict=True)), tip=tip_of("mean", "position", unit))
    return Chart(
        plot=plot,
        title="Entropy along the sequence" if is_entropy else "Kept mass along the sequence",
        text="With the tail as one entry. It falls where context helps."
        if is_entropy
        else "A step shows where positions are treated differently.",
    )


def top1(found: Statistics) -> Chart:
    """Return the distribution of the largest probability."""
    merged = 2
    share = found.top1_counts[0].reshape(-1, merged).sum(axis=1) / found.tokens
    edges = PROBABILITY.edges[::merged]
    plot = Plot(
        name="top1",
        label="Distribution of the probability of the first entry",
        x=Axis(title="probability of the first entry", low=0, high=1),
        y=_share_axis([("share", share)]),
    )
    table = _draw(plot, edges, [("share", share)], lambda left, right: f"{left:.2f} to {right:.2f}")
    plot.mark_x(found.top1 / found.tokens, f"mean {found.top1 / found.tokens:.3f}")
    return Chart(
        plot=plot,
        title="How sure the teacher is",
        text="Probability of each token's first entry.",
        table=table,
    )


def entries(found: Statistics, is_ragged: bool) -> Chart:
    """Return the distribution of entries per token: those there are, or those a top-P needs."""
    if is_ragged:
        counted = [("kept entries", found.entries_counts)]
        text = "Entries that a token has in the cache."
    else:
        counted = [(f"P = {p:g}", found.top_p_counts[P_GRID.index(p)]) for p in (0.9, 0.99)]
        text = f"All tokens have {found.k} entries. These are what top-P would keep of them; the "
        text += "last bar holds tokens that need more than there are."
    width = -(-found.k // _ENTRY_BINS)
    edges = np.arange(1, found.k + width + 1, width) - 0.5
    series = [
        (name, np.add.reduceat(counts[1:], np.arange(0, found.k, width)) / found.tokens)
        for name, counts in counted
    ]
    plot = Plot(
        name="entries",
        label="Distribution of entries per token",
        x=Axis(title="entries per token", low=float(edges[0]), high=float(edges[-1])),
        y=_share_axis(series),
    )

    def describe(left: float, right: float) -> str:
        first, last = left + 0.5, min(right - 0.5, found.k)
        return f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"

    table = _draw(plot, edges, series, describe)
    return Chart(
        plot=plot,
        title="Entries per token",
        text=text,
        legend=[(number, name) for number, (name, _) in enumerate(series, 1)],
        table=table,
    )


def _share_axis(series: Sequence[tuple[str, np.ndarray]]) -> Axis:
    highest = max(float(share.max()) for _, share in series)
    return axis_over("share of tokens per bar", [0.0, highest], from_zero=True)


def _draw(
    plot: Plot,
    edges: np.ndarray,
    series: Sequence[tuple[str, np.ndarray]],
    describe: Callable[[float, float], str],
) -> Table:
    """Draw the first series as bars and others as outlines over them; return their numbers."""
    names = [describe(*pair) for pair in itertools.pairwise(edges.tolist())]
    for number, (name, share) in enumerate(series, 1):
        draw = plot.bars if number == 1 else plot.steps
        tips = [
            f"{where}: {part:.2%} of tokens ({name})"
            for where, part in zip(names, share.tolist(), strict=True)
        ]
        draw(number, edges.tolist(), share.tolist(), tips)
    columns = [[f"{part:.4%}" for part in share.tolist()] for _, share in series]
    return Table(
        head=(plot.x.title, *(name for name, _ in series)),
        rows=list(zip(names, *columns, strict=True)),
    )
