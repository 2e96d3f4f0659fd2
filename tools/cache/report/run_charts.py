# SPDX-License-Identifier: Apache-2.0
"""How the cache changes along the run: bytes of each shard, means of each payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tools.cache.inventory import Inventory
from tools.cache.report.chart import Chart, tip_of
from tools.cache.report.survey import Survey
from tools.cache.report.svg import Axis, Plot, axis_over

_MOST_POINTS = 160
_PER_GROUP = 5


def shard_bytes(inventory: Inventory, sequence_length: int) -> Chart:
    """Return bytes per token of every sound shard over the samples."""
    points = []
    for shard in inventory.sound:
        assert shard.meta is not None
        samples = sum(end - start for start, end in shard.spans)
        tokens = samples * sequence_length / shard.meta.saver.dp_size_save
        if tokens:
            middle = (shard.file.name.start + shard.file.name.end) / 2
            points.append((middle, shard.size / tokens, shard.file.base_name))
    plot = Plot(
        name="shard-bytes",
        label="Bytes per token of each shard over the samples",
        x=_sample_axis(inventory),
        y=axis_over("bytes per token", (point[1] for point in points), least=0.1),
    )
    _scatter(plot, 1, points, "bytes per token")
    return Chart(
        plot=plot,
        title="Bytes per token by shard",
        text=f"All {len(points)} shards that can be read, not a sample. Drift or a step means that "
        "the teacher, its data or the settings changed." + _aggregated(len(points)),
    )


def over_samples(inventory: Inventory, survey: Survey, what: str) -> Chart:
    """Return the means of payloads over the samples: of ``kept``, ``tail`` or ``entropy``."""
    words = {"kept": "mean kept mass", "tail": "mean tail mass", "entropy": "mean entropy (nats)"}
    values: Callable[..., float] = {
        "kept": lambda point: point.kept,
        "tail": lambda point: point.tail,
        "entropy": lambda point: point.entropy,
    }[what]
    points = [
        (
            (p.start + p.end) / 2,
            values(p),
            f"member {p.start}-{p.end} of {p.payload.shard.base_name}",
        )
        for p in survey.points
    ]
    plot = Plot(
        name=f"samples-{what}",
        label=f"{words[what]} of payloads over the samples",
        x=_sample_axis(inventory),
        y=axis_over(words[what], (point[1] for point in points), least=0.02),
    )
    _scatter(plot, 1, points, words[what])
    return Chart(
        plot=plot,
        title=f"{words[what].removesuffix(' (nats)').capitalize()} over the run",
        text=f"Each of the {len(points)} payloads that were looked at." + _aggregated(len(points)),
    )


def _aggregated(points: int) -> str:
    return " The line is the mean, the band from least to most." if points > _MOST_POINTS else ""


def _scatter(
    plot: Plot, series: int, points: Sequence[tuple[float, float, str]], what: str
) -> None:
    """Draw points; many of them as mean and range of neighbours."""
    if len(points) <= _MOST_POINTS:
        plot.dots(
            series,
            [(x, y) for x, y, _ in points],
            [f"{name}: {y:.5g} {what}" for _, y, name in points],
        )
        return
    x = np.array([point[0] for point in points])
    y = np.array([point[1] for point in points])
    order = np.argsort(x, kind="stable")
    groups = np.array_split(order, min(_MOST_POINTS, len(points) // _PER_GROUP))
    middle = [float(x[group].mean()) for group in groups]
    low, high, mean = (
        [(at, float(of(y[group]))) for at, group in zip(middle, groups, strict=True)]
        for of in (np.min, np.max, np.mean)
    )
    plot.band(series, low, high)
    plot.line(series, mean, tip=tip_of("mean", "sample", what))


def _sample_axis(inventory: Inventory) -> Axis:
    names = [shard.name for shard in inventory.files.shards]
    return Axis(
        title="sample", low=min(name.start for name in names), high=max(name.end for name in names)
    )
