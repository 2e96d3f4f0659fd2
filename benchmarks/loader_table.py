# SPDX-License-Identifier: Apache-2.0
"""The table that ``bench_loader`` prints: what it found, by row and metric."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.worker_processes import Samples


@dataclass(frozen=True)
class Table:
    """Samples by row, metric and implementation, with the floor of a metric where it has one."""

    implementations: Sequence[str]
    rows: dict[str, dict[str, Samples]] = field(default_factory=dict)
    floors: dict[tuple[str, str], float] = field(default_factory=dict)
    refusals: dict[str, dict[str, str]] = field(default_factory=dict)

    def keep(
        self,
        row: str,
        metric: str,
        samples: Samples,
        factor: float | Mapping[str, float],
        floor: float | None = None,
    ) -> None:
        """Keep *samples*, if there are any, times *factor*."""
        if not samples:
            return
        self.rows.setdefault(row, {})[metric] = {
            name: [
                number * (factor[name] if isinstance(factor, Mapping) else factor)
                for number in numbers
            ]
            for name, numbers in samples.items()
        }
        if floor is not None:
            self.floors[row, metric] = floor

    def refuse(self, row: str, errors: Samples) -> None:
        """Keep what stands in place of the numbers of implementations that refuse a row.

        Raises:
            RuntimeError: Ours does.
        """
        if "ours" in errors:
            raise RuntimeError(f"{row}: {errors['ours'][0]}")
        for name, texts in errors.items():
            self.refusals.setdefault(row, {}).setdefault(name, texts[0])

    def has_refused(self, row: str, name: str) -> bool:
        """Return whether an implementation has refused a row."""
        return name in self.refusals.get(row, {})

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        head = "".join(f"{name:>28}" for name in self.implementations)
        yield f"{'':24}{'':27}{head}{'ratio':>8}{'floor':>9}"
        for row, metrics in self.rows.items():
            for name, text in self.refusals.get(row, {}).items():
                yield f"{row:24}{name}: {text[:100]}"
            for metric, found in metrics.items():
                yield self._line(row, metric, found)

    def _line(self, row: str, metric: str, found: Samples) -> str:
        line = f"{row:24}{metric:27}"
        line += "".join(f"{_spread(found.get(name)):>28}" for name in self.implementations)
        medians = {name: statistics.median(numbers) for name, numbers in found.items()}
        ratio = ""
        if len(medians) == len(self.implementations) and medians["installed"] > 0:
            ratio = f"{medians['ours'] / medians['installed']:.3f}"
        floor = self.floors.get((row, metric))
        return line + f"{ratio:>8}" + ("" if floor is None else f"{floor:9.3g}")


def _spread(numbers: Sequence[float] | None) -> str:
    """Return the median and the quartiles."""
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return f"{numbers[0]:.4g}"
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return f"{middle:.4g} ({low:.3g} - {high:.3g})"
