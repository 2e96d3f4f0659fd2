# SPDX-License-Identifier: Apache-2.0
"""Histograms that can be added up, and quantiles with a known resolution from them, pure."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Bins over a range of values; what lies outside counts in the outermost bins.

    Attributes:
        low: The lower end of the range.
        high: The upper end.
        bins: How many bins.
        is_logit: Whether bins are equally wide in ``log(x / (1 - x))`` instead of x: as fine near
            probability 0 and 1 as it takes to tell small parts of both.
    """

    low: float
    high: float
    bins: int
    is_logit: bool = False

    @cached_property
    def edges(self) -> np.ndarray:
        """``(bins + 1,)`` ends of the bins; of a logit scale the outermost are 0 and 1."""
        if not self.is_logit:
            return np.linspace(self.low, self.high, self.bins + 1)
        ends = np.linspace(_logit(self.low), _logit(self.high), self.bins + 1)
        inside = 1 / (1 + np.exp(-ends))
        inside[[0, -1]] = 0, 1
        return inside

    def bin_of(self, values: np.ndarray) -> np.ndarray:
        """Return the number of the bin of each value."""
        low, high = self.low, self.high
        if self.is_logit:
            clipped = np.clip(values, low, high)
            values = np.log(clipped) - np.log1p(-clipped)
            low, high = _logit(low), _logit(high)
        places = np.floor((values - low) * (self.bins / (high - low)))
        return np.clip(places, 0, self.bins - 1).astype(np.int64)

    def count(self, values: np.ndarray) -> np.ndarray:
        """Return ``(n, bins)`` float64 counts of each column of ``(m, n)`` *values*."""
        columns = values.shape[1]
        places = self.bin_of(values) + np.arange(columns) * self.bins
        counts = np.bincount(places.ravel(), minlength=columns * self.bins)
        return counts.reshape(columns, self.bins).astype(np.float64)

    def quantile(self, counts: np.ndarray, q: float) -> np.ndarray:
        """Return quantile *q* of each row of ``(n, bins)`` *counts*; nan where it has none.

        It lies in the bin of the smallest value that a share *q* of all is not above, at the place
        that equal spacing inside of the bin gives.
        """
        totals = counts.cumsum(axis=1)
        wanted = q * totals[:, -1]
        found = np.full(len(counts), np.nan)
        for row, (total, want) in enumerate(zip(totals, wanted, strict=True)):
            if total[-1] > 0:
                place = min(int(np.searchsorted(total, want, side="left")), self.bins - 1)
                while counts[row, place] == 0:  # q = 0 asks for nothing: the first value
                    place += 1
                inside = 1 - (total[place] - want) / counts[row, place]
                begin, end = self.edges[place : place + 2]
                found[row] = begin + (end - begin) * inside
        return found

    def widest(self) -> float:
        """Return the width of the widest bin: no quantile is further off."""
        return float(np.diff(self.edges).max())


def _logit(x: float) -> float:
    return math.log(x) - math.log1p(-x)
