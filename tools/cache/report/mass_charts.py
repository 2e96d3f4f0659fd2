# SPDX-License-Identifier: Apache-2.0
"""What fewer entries would keep, and what they would take: over K, and over P."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.cache.report.chart import Chart, Table, tip_of
from tools.cache.report.statistics import MASS, P_GRID, Statistics, k_grid, mean_entries
from tools.cache.report.survey import Survey
from tools.cache.report.svg import Axis, Plot, axis_over

_P_LABELS = {0.925: "", 0.85: "", 0.98: "", 0.998: ""}
"""Grid points whose labels would not find room."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a token takes on disk.

    Attributes:
        bytes_per_token: Of the whole cache; None where that is not known.
        by_k: Estimates for the first K' entries.
        by_p: Estimates for the nucleus of P.
    """

    bytes_per_token: float | None
    by_k: dict[int, float]
    by_p: dict[float, float]


def costs(survey: Survey, bytes_per_token: float | None) -> Costs:
    """Return what fewer entries would take, by what the same rows took when encoded again."""
    sizes = survey.sizes
    if sizes is None or bytes_per_token is None or not sizes.whole:
        return Costs(bytes_per_token=bytes_per_token, by_k={}, by_p={})
    scale = bytes_per_token / sizes.whole
    return Costs(
        bytes_per_token=bytes_per_token,
        by_k={k: size * scale for k, size in sizes.by_k.items()},
        by_p={p: size * scale for p, size in sizes.by_p.items()},
    )


@dataclass(frozen=True, kw_only=True)
class MassAtK:
    """Kept mass of the first K' entries: mean and quantiles over tokens."""

    k: int
    mean: float
    p5: float
    p50: float
    p95: float
    entries: float


def masses_at_k(found: Statistics) -> list[MassAtK]:
    """Return the kept mass for K' from 1 up to all entries."""
    counts = np.concatenate([found.kept_at_counts, found.kept_counts])
    quantiles = [MASS.quantile(counts, q).tolist() for q in (0.05, 0.5, 0.95)]
    means = np.append(found.kept_at, found.kept) / found.tokens
    entries = np.append(found.entries_at, found.entries) / found.tokens
    columns = (means.tolist(), *quantiles, entries.tolist())
    return [
        MassAtK(k=k, mean=mean, p5=p5, p50=p50, p95=p95, entries=number)
        for k, mean, p5, p50, p95, number in zip([*k_grid(found.k), found.k], *columns, strict=True)
    ]


def kept_mass(found: Statistics, cost: Costs) -> Chart:
    """Return how much mass a smaller K would keep."""
    masses = masses_at_k(found)
    plot = Plot(
        name="kept-mass",
        label="Kept mass against K: mean, median and the 5th and 95th percentile of tokens",
        x=_k_axis(found.k),
        y=Axis(title="kept mass (probability)", low=0, high=1),
    )
    plot.band(1, [(m.k, m.p5) for m in masses], [(m.k, m.p95) for m in masses])
    for series, name, tip, value in (
        (2, "p5", "5th percentile", lambda m: m.p5),
        (3, "p50", "median", lambda m: m.p50),
        (4, "p95", "95th percentile", lambda m: m.p95),
        (1, "mean", "mean", lambda m: m.mean),
    ):
        plot.line(
            series, [(m.k, value(m)) for m in masses], tip=tip_of(tip, "K'", "kept"), name=name
        )
    rows = [
        (
            str(m.k),
            *(f"{value:.4f}" for value in (m.mean, m.p5, m.p50, m.p95)),
            f"{m.entries:.2f}",
            _bytes(cost.bytes_per_token if m.k == found.k else cost.by_k.get(m.k)),
        )
        for m in masses
    ]
    return Chart(
        plot=plot,
        title="Kept mass against K",
        text="Mass of the first K' entries of a token, as a conversion to a smaller K would keep "
        f"it. Quantiles are exact to {MASS.widest() * 100:.1f} % of mass.",
        legend=_QUANTILES,
        table=Table(
            head=("K'", "mean", "p5", "p50", "p95", "entries per token", "bytes per token"),
            rows=rows,
        ),
    )


def lost_mass(found: Statistics) -> Chart:
    """Return how much mass a smaller K would leave to the tail."""
    masses = masses_at_k(found)
    least = min([max(1 - m.p95, 1e-6) for m in masses] + [0.1])
    plot = Plot(
        name="tail-mass",
        label="Tail mass against K on logarithmic axes: mean, median and percentiles of tokens",
        x=_k_axis(found.k),
        y=Axis(
            title="tail mass (probability)",
            low=10 ** np.floor(np.log10(least)),
            high=1,
            is_log=True,
        ),
    )
    for series, tip, value in (
        (2, "of the 5th percentile of kept mass", lambda m: 1 - m.p5),
        (3, "of the median of kept mass", lambda m: 1 - m.p50),
        (4, "of the 95th percentile of kept mass", lambda m: 1 - m.p95),
        (1, "mean", lambda m: 1 - m.mean),
    ):
        plot.line(series, [(m.k, value(m)) for m in masses], tip=tip_of(tip, "K'", "tail"))
    return Chart(
        plot=plot,
        title="Tail against K",
        text="What the first K' entries leave to the tail: one less the curves beside it, on a "
        "logarithmic axis.",
        legend=_QUANTILES,
    )


_QUANTILES = (
    (1, "mean"),
    (2, "5th percentile of kept mass"),
    (3, "median"),
    (4, "95th percentile"),
)


def top_p(found: Statistics, cost: Costs, recorded_p: float | None) -> Chart:
    """Return how many entries top-P would keep, up to the P that was recorded with."""
    shown = [place for place, p in enumerate(P_GRID) if recorded_p is None or p <= recorded_p]
    shown = shown or [0]
    means = mean_entries(found.top_p_counts)
    quantiles = {
        q: [found.entries_quantile(q, place) for place in shown] for q in (0.05, 0.5, 0.95)
    }
    high = max(*quantiles[0.95], *(means[shown]), 2)
    plot = Plot(
        name="top-p",
        label="Entries per token under top-P: mean, median and percentiles of tokens",
        x=Axis(
            title="P (equal steps are not equal differences)",
            low=-0.3,
            high=len(shown) - 0.7,
            ticks=[(x, _P_LABELS.get(P_GRID[p], f"{P_GRID[p]:g}")) for x, p in enumerate(shown)],
        ),
        y=Axis(title="entries per token", low=1, high=float(high) * 1.1, is_log=high > 20)
        if high > 20
        else Axis(title="entries per token", low=0, high=float(np.ceil(high * 1.05))),
    )

    def tip(what: str) -> Callable[[float, float], str]:
        return lambda x, y: f"{what} at P = {P_GRID[shown[round(x)]]:g}: {y:.4g} entries"

    places = range(len(shown))
    for series, q, what in (
        (2, 0.05, "5th percentile"),
        (3, 0.5, "median"),
        (4, 0.95, "95th percentile"),
    ):
        plot.line(series, list(zip(places, quantiles[q], strict=True)), tip=tip(what))
    plot.line(
        1, list(zip(places, means[shown].tolist(), strict=True)), tip=tip("mean"), name="mean"
    )
    rows = [
        (
            f"{P_GRID[place]:g}",
            f"{means[place]:.2f}",
            *(str(quantiles[q][x]) for q in (0.05, 0.5, 0.95)),
            f"{found.top_p_kept[place] / found.tokens:.4f}",
            f"{found.top_p_short[place] / found.tokens:.1%}",
            _bytes(cost.by_p.get(P_GRID[place])),
        )
        for x, place in enumerate(shown)
    ]
    limit = "" if recorded_p is None else f" The cache was recorded with P = {recorded_p:g}: "
    limit += "" if recorded_p is None else "no larger P is shown."
    return Chart(
        plot=plot,
        title="Entries under top-P",
        text="Entries that a token keeps where those go before which P of the mass lies. A token "
        "that is short has less than P in all its entries, and keeps them all." + limit,
        legend=((1, "mean"), (2, "5th percentile"), (3, "median"), (4, "95th percentile")),
        table=Table(
            head=("P", "entries", "p5", "p50", "p95", "kept mass", "short", "bytes per token"),
            rows=rows,
        ),
    )


def trade(found: Statistics, cost: Costs, recorded_p: float | None) -> Chart | None:
    """Return kept mass against bytes per token, for a smaller K and for top-P."""
    if cost.bytes_per_token is None or not cost.by_k:
        return None
    masses = {m.k: m.mean for m in masses_at_k(found)}
    by_k = [(cost.by_k[k], masses[k], f"K' = {k}") for k in sorted(cost.by_k) if k in masses]
    by_k.append((cost.bytes_per_token, masses[found.k], f"K = {found.k}, as it is"))
    kept = dict(zip(P_GRID, (found.top_p_kept / found.tokens).tolist(), strict=True))
    by_p = [
        (size, kept[p], f"P = {p:g}")
        for p, size in cost.by_p.items()
        if recorded_p is None or p <= recorded_p
    ]
    points = [*by_k, *by_p]
    plot = Plot(
        name="trade",
        label="Mean kept mass against estimated bytes per token, for smaller K and for top-P",
        x=axis_over("bytes per token (estimated)", (point[0] for point in points), from_zero=True),
        y=axis_over("mean kept mass", (point[1] for point in points)),
    )
    for series, line in ((1, by_k), (2, by_p)):
        tips = [
            f"{what}: {size:.3g} bytes per token, kept mass {mass:.4f}" for size, mass, what in line
        ]
        coordinates = [(size, mass) for size, mass, _ in line]
        if len(line) > 1:
            plot.line(series, coordinates)
        plot.dots(series, coordinates, tips)
    return Chart(
        plot=plot,
        title="Kept mass for the bytes",
        text="What a smaller K or a top-P would save, and what it would cost. Bytes are those of "
        "some rows that were encoded again, scaled to what the cache takes.",
        legend=((1, "first K' entries"), (2, "top-P")),
    )


def _k_axis(k: int) -> Axis:
    """Return a logarithmic axis up to *k*, with powers of two and *k* itself as its labels."""
    powers = [1 << power for power in range(k.bit_length()) if (1 << power) < k * 0.8]
    if len(powers) > 9:
        powers = powers[::2]
    return Axis(
        title="K' (entries per token)",
        low=1,
        high=max(k, 2),
        is_log=True,
        ticks=[(float(tick), str(tick)) for tick in [*powers, k]],
    )


def _bytes(size: float | None) -> str:
    return "" if size is None else f"{size:.1f}"
