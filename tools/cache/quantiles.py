# SPDX-License-Identifier: Apache-2.0
"""Quantiles of numbers that are too many to be kept, within one per cent."""

import math

import numpy as np

_SMALLEST, _LARGEST = 1e-15, 1e4
_BINS_PER_DECADE = 232  # so that a bin is one per cent wide
_BINS = math.ceil(math.log10(_LARGEST / _SMALLEST) * _BINS_PER_DECADE)


class Quantiles:
    """Counts numbers from 0 on, in bins that are one per cent wide; picklable."""

    def __init__(self) -> None:
        # What is below the smallest, the bins, what is above the largest.
        self._counts = np.zeros(_BINS + 2, np.int64)

    def add(self, numbers: np.ndarray) -> None:
        """Count *numbers*, none of them negative or NaN."""
        with np.errstate(divide="ignore"):
            places = np.floor(np.log10(numbers / _SMALLEST) * _BINS_PER_DECADE)
        places = np.clip(places, -1, _BINS).astype(np.int64) + 1
        self._counts += np.bincount(places, minlength=_BINS + 2)

    def merge(self, other: "Quantiles") -> None:
        """Count what *other* has counted as well."""
        self._counts += other._counts

    def quantile(self, share: float) -> float:
        """Return what *share* of the numbers do not exceed; NaN where there are none.

        Numbers below 1e-15 count as 0, those above 1e4 as infinite.
        """
        total = int(self._counts.sum())
        if not total:
            return math.nan
        rank = max(1, math.ceil(share * total))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        if place == 0:
            return 0.0
        if place > _BINS:
            return math.inf
        return float(_SMALLEST * 10 ** ((place - 0.5) / _BINS_PER_DECADE))
