# SPDX-License-Identifier: Apache-2.0
"""What the quickstart shows at its end: the comparison as numbers, as a table and as a picture."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Validation LM losses (nats per token) of two students after equal steps, and the teacher's.

    A curve maps iteration to loss. All runs evaluate on the same samples. ``teacher`` is the loss
    of the finished teacher.
    """

    plain: Mapping[int, float]
    distilled: Mapping[int, float]
    teacher: float

    def __post_init__(self) -> None:
        """Reject curves that cannot be compared.

        Raises:
            ValueError: A curve is empty, or the students end at different iterations.
        """
        for name in ("plain", "distilled"):
            if not getattr(self, name):
                raise ValueError(f"the log of the {name} student has no validation loss")
        if max(self.plain) != max(self.distilled):
            raise ValueError(
                f"the students end at different iterations: {max(self.plain)} without and "
                f"{max(self.distilled)} with the teacher's logits"
            )

    @property
    def iterations(self) -> int:
        """Steps that each student took."""
        return max(self.plain)

    @property
    def plain_loss(self) -> float:
        """Final loss of the student without the teacher."""
        return self.plain[self.iterations]

    @property
    def distilled_loss(self) -> float:
        """Final loss of the student with the teacher's cached logits."""
        return self.distilled[self.iterations]

    @property
    def gain(self) -> float:
        """How much lower the distilled student's final loss is."""
        return self.plain_loss - self.distilled_loss

    @property
    def steps_to_match(self) -> float | None:
        """Step at which the distilled student reaches the other's final loss; None if never.

        Interpolated linearly between evaluations.
        """
        previous: tuple[int, float] | None = None
        for step, loss in self.distilled.items():
            if loss <= self.plain_loss:
                if previous is None:
                    return float(step)
                before, loss_before = previous
                return before + (step - before) * (loss_before - self.plain_loss) / (
                    loss_before - loss
                )
            previous = (step, loss)
        return None

    def to_json(self) -> dict[str, object]:
        """Return every number as plain JSON."""
        return {
            "iterations": self.iterations,
            "validation_lm_loss": {
                "student_lm_only": self.plain_loss,
                "student_distilled": self.distilled_loss,
                "teacher": self.teacher,
            },
            "gain": self.gain,
            "steps_to_match_lm_only": self.steps_to_match,
            "curves": {
                "student_lm_only": dict(self.plain),
                "student_distilled": dict(self.distilled),
            },
        }


def format_table(comparison: Comparison) -> str:
    """Return the final losses as a table for the terminal, with what follows from them."""
    rows = [
        ("student, LM loss only", comparison.plain_loss),
        ("student, cached logits", comparison.distilled_loss),
        ("teacher", comparison.teacher),
    ]
    title = f"after {comparison.iterations} steps"
    width = max(len(title), *(len(name) for name, _ in rows))
    lines = [f"{title:<{width}}  {'validation loss':>15}  {'perplexity':>10}"]
    lines.append("-" * len(lines[0]))
    lines += [f"{name:<{width}}  {loss:>15.3f}  {math.exp(loss):>10.1f}" for name, loss in rows]
    lines.append("")
    if comparison.gain > 0:
        lines.append(
            f"The distilled student is {comparison.gain:.3f} nats per token better "
            f"(perplexity {100 * math.expm1(-comparison.gain):+.0f} %)."
        )
    else:
        lines.append(f"The distilled student is {-comparison.gain:.3f} nats per token worse.")
    match = comparison.steps_to_match
    if match is not None and match < comparison.iterations:
        lines.append(f"It reaches the other student's final loss after {match:.0f} steps.")
    return "\n".join(lines)


def draw(comparison: Comparison, path: Path) -> None:
    """Write a picture with both students' validation curves and the teacher's level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for curve, label, color in (
        (comparison.plain, "student, LM loss only", "tab:blue"),
        (comparison.distilled, "student, teacher's cached logits", "tab:orange"),
    ):
        final = curve[max(curve)]
        axes.plot(*zip(*curve.items(), strict=True), marker="o", markersize=3, color=color,
                  label=f"{label}: {final:.3f}")  # fmt: skip
    axes.axhline(
        comparison.teacher,
        color="tab:gray",
        linestyle="--",
        label=f"teacher: {comparison.teacher:.3f}",
    )
    # The first evaluations fall steeply; the comparison is in the rest.
    shown = sorted(
        loss for curve in (comparison.plain, comparison.distilled) for loss in curve.values()
    )
    top = shown[int(len(shown) * 0.9)] if len(shown) > 10 else shown[-1]
    bottom = min(comparison.teacher, shown[0])
    margin = 0.05 * (top - bottom) or 0.1
    axes.set_ylim(bottom - margin, top + margin)
    axes.set_xlabel("student steps")
    axes.set_ylabel("validation LM loss (nats per token)")
    axes.set_title("Offline logits distillation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
