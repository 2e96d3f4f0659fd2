# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG that stands in a page; every mark tells its numbers when it is pointed at.

Colours come from the page's style sheet, so that they suit its scheme. Elements have classes only:
``s1`` to ``s4`` are the series, ``line``, ``band``, ``bar`` and ``dot`` the kinds of marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 50
_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a plot.

    Attributes:
        title: What it shows, with the unit.
        low: Its beginning.
        high: Its end.
        is_log: Whether equal factors are equal distances.
        ticks: Values and their labels; None for round numbers.
    """

    title: str
    low: float
    high: float
    is_log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None

    def place(self, value: float) -> float:
        """Return where *value* lies, 0 at the beginning and 1 at the end."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low)), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def labels(self) -> Sequence[tuple[float, str]]:
        """Return the ticks with their labels."""
        if self.ticks is not None:
            return self.ticks
        ticks = _log_ticks(self.low, self.high) if self.is_log else round_ticks(self.low, self.high)
        return [(tick, number(tick)) for tick in ticks]


def axis_over(
    title: str, values: Iterable[float], *, from_zero: bool = False, least: float = 1e-3
) -> Axis:
    """Return an axis that shows all *values* with some room, from and to round numbers.

    It spans at least the share *least* of the largest value: what hardly differs looks so.
    """
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if from_zero:
        low = min(low, 0.0)
    missing = least * (max(abs(low), abs(high)) or 1.0) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    step = _step(low, high)
    return Axis(title=title, low=math.floor(low / step) * step, high=math.ceil(high / step) * step)


def round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from *low* to *high*."""
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _step(low: float, high: float) -> float:
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 3.5 else (1,)
    ticks = [factor * 10.0**power for power in decades for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def number(value: float) -> str:
    """Return a number for a label: four digits at most, thousands with k and M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.4g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}"


@dataclass(kw_only=True)
class Plot:
    """A plot, to which marks are added in the order in which they are drawn.

    Attributes:
        name: Its id in the page.
        label: What it shows, for those who cannot see it.
        x: The horizontal axis.
        y: The vertical axis.
    """

    name: str
    label: str
    x: Axis
    y: Axis
    _marks: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point lies in the picture; what is outside of an axis at its end."""
        across = min(max(self.x.place(x), 0.0), 1.0)
        up = min(max(self.y.place(y), 0.0), 1.0)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    def line(
        self,
        series: int,
        points: Sequence[tuple[float, float]],
        *,
        tip: Callable[[float, float], str] | None = None,
        kind: str = "",
        name: str = "",
    ) -> None:
        """Draw a line, with dots that tell *tip* of each point."""
        path = "L".join(_pair(self.at(*point)) for point in points)
        self._marks.append(
            f'<path class="line s{series} {kind}" data-series="{escape(name)}" d="M{path}"/>'
        )
        if tip is not None:
            self.dots(series, points, [tip(*point) for point in points], faint=True)

    def band(
        self, series: int, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]]
    ) -> None:
        """Fill what is between two lines."""
        path = "L".join(_pair(self.at(*point)) for point in [*low, *reversed(high)])
        self._marks.append(f'<path class="band s{series}" d="M{path}Z"/>')

    def dots(
        self,
        series: int,
        points: Sequence[tuple[float, float]],
        tips: Sequence[str],
        *,
        faint: bool = False,
    ) -> None:
        """Draw a dot for each point; *faint* ones only tell what a line is made of."""
        kind = "dot faint" if faint else "dot"
        for point, tip in zip(points, tips, strict=True):
            x, y = self.at(*point)
            self._marks.append(
                f'<circle class="{kind} s{series}" cx="{x:.1f}" cy="{y:.1f}" '
                f'r="{2.4 if faint else 3}"><title>{escape(tip)}</title></circle>'
            )

    def bars(
        self, series: int, edges: Sequence[float], heights: Sequence[float], tips: Sequence[str]
    ) -> None:
        """Draw a bar between each two *edges*."""
        for left, right, height, tip in zip(edges[:-1], edges[1:], heights, tips, strict=True):
            x, y = self.at(left, height)
            x2, base = self.at(right, self.y.low)
            self._marks.append(
                f'<rect class="bar s{series}" x="{x + 0.4:.2f}" y="{y:.2f}" '
                f'width="{max(x2 - x - 0.8, 0.4):.2f}" height="{base - y:.2f}">'
                f"<title>{escape(tip)}</title></rect>"
            )

    def steps(
        self, series: int, edges: Sequence[float], heights: Sequence[float], tips: Sequence[str]
    ) -> None:
        """Draw the outline of bars, for what lies over other bars."""
        _, base = self.at(edges[0], self.y.low)
        path = f"M{self.at(edges[0], 0)[0]:.2f} {base:.2f}"
        for left, right, height, tip in zip(edges[:-1], edges[1:], heights, tips, strict=True):
            (x, y), (x2, _) = self.at(left, height), self.at(right, height)
            path += f"L{x:.2f} {y:.2f}L{x2:.2f} {y:.2f}"
            self._marks.append(
                f'<rect class="unseen" x="{x:.2f}" y="{y - 4:.2f}" width="{x2 - x:.2f}" '
                f'height="8"><title>{escape(tip)}</title></rect>'
            )
        self._marks.append(f'<path class="line s{series}" d="{path}V{base:.2f}"/>')

    def mark_x(self, x: float, text: str) -> None:
        """Draw a vertical line with a word at its top."""
        left, bottom = self.at(x, self.y.low)
        anchor = "end" if left > WIDTH * 0.7 else "start"
        shift = -5 if anchor == "end" else 5
        self._marks.append(
            f'<path class="mark" d="M{left:.1f} {bottom:.1f}V{_TOP}"/>'
            f'<text class="word" x="{left + shift:.1f}" y="{_TOP + 11}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the picture."""
        return (
            f'<svg id="{self.name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.label)}">{self._frame()}{"".join(self._marks)}</svg>'
        )

    def _frame(self) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value, text in self.x.labels():
            x, _ = self.at(value, self.y.low)
            parts.append(
                f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
                f'<text class="tick x" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" '
                f'data-value="{value:.12g}">{escape(text)}</text>'
            )
        for value, text in self.y.labels():
            _, y = self.at(self.x.low, value)
            parts.append(
                f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
                f'<text class="tick y" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end" '
                f'data-value="{value:.12g}">{escape(text)}</text>'
            )
        middle = (_TOP + bottom) / 2
        return (
            "".join(parts) + f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
            f'<text class="title" x="{(_LEFT + right) / 2}" y="{HEIGHT - 12}" '
            f'text-anchor="middle">{escape(self.x.title)}</text>'
            f'<text class="title" transform="translate(15 {middle}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.title)}</text>'
        )


def _pair(point: tuple[float, float]) -> str:
    return f"{point[0]:.2f} {point[1]:.2f}"
