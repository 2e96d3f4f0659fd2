# SPDX-License-Identifier: Apache-2.0
"""How many iterations trained without targets, and when that is too many.

Every rank that is told the same outcomes comes to the same answer at the same iteration.
"""

DEFAULT_MAX_SHARE = 0.05
JUDGED_ITERATIONS = 20
"""Iterations that a share is taken of at least, and that may miss their targets in a row."""


class SkippedSteps:
    """Counts the iterations of this job with and without targets.

    Args:
        max_share: The largest share of iterations without targets, in [0, 1]; 1 allows all.

    Raises:
        ValueError: *max_share* is outside [0, 1].
    """

    def __init__(self, max_share: float = DEFAULT_MAX_SHARE) -> None:
        if not 0.0 <= max_share <= 1.0:
            raise ValueError(f"max_skipped_share is {max_share}: expected a share in [0, 1].")
        self.skipped = 0
        self.looked_at = 0
        self._max_share = max_share
        self._in_a_row = 0

    def count(self, *, skipped: bool) -> str | None:
        """Count one more iteration; return why the run has to stop, or None if it need not."""
        self.looked_at += 1
        self.skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._max_share == 1.0:
            return None
        share = self.skipped / self.looked_at
        if self._in_a_row >= JUDGED_ITERATIONS:
            reason = f"the last {self._in_a_row} in a row"
        elif self.looked_at >= JUDGED_ITERATIONS and share > self._max_share:
            reason = "more than the limit"
        else:
            return None
        return (
            f"{self.skipped} of the {self.looked_at} iterations of this job had no teacher "
            f"targets ({share:.1%}), {reason}; --logits-load-max-skipped-share is "
            f"{self._max_share:g}. Dump the samples that the warnings above name again, continue "
            "from the last checkpoint, or allow a larger share (1 allows all)."
        )
