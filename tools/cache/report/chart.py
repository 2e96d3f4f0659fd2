# SPDX-License-Identifier: Apache-2.0
"""A plot with its title, its text and its numbers, as the page shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.cache.report.svg import Plot, number


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot in the page.

    Attributes:
        plot: The picture.
        title: What it is.
        text: How to read it.
        legend: The names of the series, from 1 on.
        table: Its numbers; None where they would be of no use.
    """

    plot: Plot
    title: str
    text: str
    legend: Sequence[tuple[int, str]] = ()
    table: Table | None = None


def tip_of(what: str, x_name: str, y_name: str) -> Callable[[float, float], str]:
    """Return what tells a point of a line in words."""
    return lambda x, y: f"{what} at {x_name} {number(x)}: {y:.4g} {y_name}"
