# SPDX-License-Identifier: Apache-2.0
"""Read progress and losses from the lines Megatron's trainer prints.

The lines come from ``training_log`` and ``evaluate_and_print_results`` of
``megatron.training.training``. Ranks share one stream, so a line may have foreign text around it:
everything is searched for, nothing is matched as a whole.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")
_MILLISECONDS = re.compile(rf"elapsed time per iteration \(ms\): ({_NUMBER})")
_LOSS = re.compile(rf"\| ([\w ]*loss): ({_NUMBER})")
_VALIDATION = re.compile(r"\bvalidation(?:-\S+)? loss at iteration (\d+)( on validation set)?")
_VALIDATION_LOSS = re.compile(rf"([\w ]*loss) value: ({_NUMBER})")
# A Python exception's last line, with or without the prefix that torchrun gives a rank's output.
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)$"
)
_LAUNCHER_EXCEPTION = "ChildFailedError"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One line of training progress; ``losses`` go by the names printed, such as ``lm loss``."""

    number: int
    total: int
    milliseconds: float
    losses: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One evaluation; ``at_end`` marks the extra one that follows the last iteration."""

    iteration: int
    losses: dict[str, float]
    at_end: bool


def parse_line(line: str) -> Iteration | Validation | None:
    """Return what a log line reports, or None for every other line."""
    validation = _VALIDATION.search(line)
    if validation is not None:
        losses = {
            name.strip(): float(value)
            for name, value in _VALIDATION_LOSS.findall(line, validation.end())
        }
        if not losses:
            return None
        return Validation(
            iteration=int(validation[1]), losses=losses, at_end=validation[2] is not None
        )
    iteration = _ITERATION.search(line)
    milliseconds = _MILLISECONDS.search(line)
    if iteration is None or milliseconds is None:
        return None
    losses = {name.strip(): float(value) for name, value in _LOSS.findall(line)}
    return Iteration(
        number=int(iteration[1]),
        total=int(iteration[2]),
        milliseconds=float(milliseconds[1]),
        losses=losses,
    )


def validation_curve(lines: Iterable[str], loss: str = "lm loss") -> dict[int, float]:
    """Return the validation loss by iteration, in rising order.

    A run that was interrupted and resumed reports some iterations twice; the later report stands.
    The extra evaluation after the last iteration uses other samples and counts only where the
    regular one is missing.
    """
    regular: dict[int, float] = {}
    at_end: dict[int, float] = {}
    for line in lines:
        record = parse_line(line)
        if isinstance(record, Validation) and loss in record.losses:
            (at_end if record.at_end else regular)[record.iteration] = record.losses[loss]
    return dict(sorted((at_end | regular).items()))


def failure_index(lines: Sequence[str]) -> int | None:
    """Return where the last exception that a rank (not the launcher) reported stands, or None."""
    for index in range(len(lines) - 1, -1, -1):
        match = _EXCEPTION.match(lines[index].rstrip())
        if match is not None and _LAUNCHER_EXCEPTION not in match[1]:
            return index
    return None
