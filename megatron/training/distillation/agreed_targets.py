# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a pipeline stage agree on whether an iteration has targets.

Each tensor x context parallel replica has its own; what one of them cannot read, or what is not for
the batch of one rank, none of the stage uses.
"""

import enum
import logging
from collections.abc import Callable

from megatron.training.distillation import parallel, storage
from megatron.training.distillation.errors import (
    TeacherContentError,
    TeacherDataError,
    TeacherDataExhaustedError,
    TeacherDataMissingError,
)
from megatron.training.distillation.skipped_steps import DEFAULT_MAX_SHARE, SkippedSteps
from megatron.training.distillation.target_feed import OpenIteration, TargetFeed
from megatron.training.distillation.targets import IterationFailure

logger = logging.getLogger(__name__)

# What a rank can say of an iteration; the largest counts.
_READ, _UNPROVEN, _UNREADABLE, _ABSENT, _FATAL, _OTHER_CONTENT = range(6)


class Content(enum.Enum):
    """What a rank knows of the content of the targets it has."""

    PROVEN = enum.auto()
    """They are for the tokens of its batch."""
    UNPROVEN = enum.auto()
    """There is nothing to compare."""
    DIFFERS = enum.auto()
    """They are for other tokens."""


_OF_CONTENT = {
    Content.PROVEN: _READ,
    Content.UNPROVEN: _UNPROVEN,
    Content.DIFFERS: _OTHER_CONTENT,
}
Compare = Callable[[OpenIteration], tuple[Content, str]]
"""Compares an iteration's targets with the batch; the text says what was found."""


class AgreedTargets:
    """Serves targets by the first sample of an iteration, to all ranks of a stage or to none.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        feed: Gives this rank what was read for it.
        layout: This rank's place.
        ignore_errors: Answer None for iterations whose data cannot be read, instead of raising.
        max_skipped_share: With *ignore_errors*, the share of iterations above which all ranks stop.
    """

    def __init__(
        self,
        logprobs_dir: str,
        feed: TargetFeed,
        layout: parallel.ParallelLayout,
        *,
        ignore_errors: bool,
        max_skipped_share: float = DEFAULT_MAX_SHARE,
    ) -> None:
        self._steps = SkippedSteps(max_skipped_share)
        self._logprobs_dir = logprobs_dir
        self._feed = feed
        self._layout = layout
        self._ignore_errors = ignore_errors
        self._has_listing = False
        self._told_unproven = False

    @property
    def skipped_iterations(self) -> int:
        """Iterations that were trained without targets."""
        return self._steps.skipped

    def agree_on(
        self, start_sample: int, microbatch: int, compare: Compare
    ) -> OpenIteration | None:
        """Open an iteration on this rank and agree on using its targets.

        Collective over TP x CP x DP of the stage: every rank must call. The directory is listed at
        the first call, and again when the ranks agree that the targets are not there: a running
        teacher may have written them since, or put their shard under another name.

        Args:
            start_sample: First global sample of the iteration.
            microbatch: The one that the iteration begins with here.
            compare: Compares what was read for that one with the batch; no collectives.

        Raises:
            TeacherContentError: The targets of any rank are for other tokens than its batch.
            TeacherDataError: The targets cannot be used, the directory cannot be listed, or too
                many iterations had no targets.
        """
        if not self._has_listing:
            problem = self._agree_on_listing()
            if problem:
                raise TeacherDataError(problem)
            self._has_listing = True
        item, worst, details = self._open(start_sample, microbatch, compare)
        if worst == _ABSENT:
            problem = self._agree_on_listing()
            if problem:
                details = f"{details}\n{problem}"
            else:
                item, worst, details = self._open(start_sample, microbatch, compare)
        if worst <= _UNPROVEN:
            assert isinstance(item, OpenIteration)
            if worst == _UNPROVEN:
                self._tell_unproven(start_sample, details)
            self._count(start_sample, skipped=False)
            return item
        if worst == _OTHER_CONTENT:
            raise TeacherContentError(other_content(start_sample, details))
        if worst < _FATAL and self._ignore_errors:
            self._count(start_sample, skipped=True, details=details)
            return None
        if isinstance(item, IterationFailure) and _severity(item) == worst:
            raise item.error
        raise TeacherDataError(
            f"Another rank of this pipeline stage cannot read the teacher targets of the batch "
            f"that starts at sample {start_sample}:\n{details}"
        )

    def _count(self, start_sample: int, *, skipped: bool, details: str = "") -> None:
        """Count an iteration that the ranks have agreed on; all raise alike if it is one too many.

        Raises:
            TeacherDataError: Too many iterations had no targets.
        """
        problem = self._steps.count(skipped=skipped)
        if skipped and self._layout.speaks_for_stage:
            logger.warning(
                "No teacher targets for the batch that starts at sample %d; this step trains on "
                "the LM loss alone (%d steps so far).\n%s",
                start_sample,
                self.skipped_iterations,
                details,
            )
        if problem is not None:
            raise TeacherDataError(f"Stopped at the batch from sample {start_sample} on: {problem}")

    def _agree_on_listing(self) -> str:
        """Have one rank list the directory and all ranks read what it found.

        Collective over TP x CP x DP of the stage: every rank must call.

        Returns:
            Why the directory could not be listed, on every rank; empty if it was.
        """
        names: list[str] = []
        problem = ""
        if self._layout.speaks_for_stage:
            try:
                names = storage.list_names(self._logprobs_dir)
            except storage.ERRORS as error:
                problem = f"Cannot list the teacher data: {error}"
            except Exception as error:
                # Whatever fails is an answer: the other ranks wait for it.
                problem = (
                    f"Cannot list the teacher data in {self._logprobs_dir}: "
                    f"{type(error).__name__}: {error}"
                )
                logger.exception("%s", problem)
        names, problem = parallel.from_speaker((names, problem), self._layout)
        if not problem:
            self._feed.stream.use_listing(names)
        return problem

    def _tell_unproven(self, start_sample: int, details: str) -> None:
        """Warn that contents are not checked, once; all ranks know that it was told."""
        self._told_unproven = True
        if self._layout.speaks_for_stage:
            logger.warning(
                "From the batch that starts at sample %d on, targets of %s are used without proof "
                "that they belong to the tokens of the batch: nothing but sample numbers and, "
                "without --logits-load-ignore-hash, the run's identity (seed, train samples, data "
                "names) is checked.\n%s",
                start_sample,
                self._logprobs_dir,
                details,
            )

    def _open(
        self, start_sample: int, microbatch: int, compare: Compare
    ) -> tuple[OpenIteration | IterationFailure, int, str]:
        """Open an iteration; return what this rank has of it, the worst case and its details.

        Collective over TP x CP, then over TP x CP x DP of the stage: every rank must call.
        """
        item = self._feed.open(start_sample, microbatch)
        if isinstance(item, OpenIteration):
            content, detail = compare(item)
            code = _OF_CONTENT[content]
            if code == _UNPROVEN and self._told_unproven:
                code = _READ
        else:
            code, detail = _severity(item), f"{type(item.error).__name__}: {item.error}"
        worst, details = parallel.worst_over_stage(code, detail, self._layout)
        return item, worst, details


def _severity(item: IterationFailure) -> int:
    """Return what this rank has to say of an iteration that it cannot read."""
    if item.fatal:
        return _FATAL
    absent = isinstance(item.error, TeacherDataMissingError | TeacherDataExhaustedError)
    return _ABSENT if absent else _UNREADABLE


def other_content(start: int, details: str) -> str:
    """Return what to say when labels differ: where, why that happens, what to do."""
    return (
        f"The batch that starts at sample {start} does not hold what the teacher saw for the same "
        f"samples, so the teacher's targets belong to other tokens:\n{details}\n"
        "Compare with the teacher's run: --seed; the data and its order (--data-path, weights, "
        "--split, the number of samples); --seq-length; the tokenizer and its prompt format; the "
        "batch schedule and where the run began. A shard of another run or DP rank under this "
        "one's name looks the same. Use the teacher's values, or dump the samples again; "
        "--logits-load-ignore-hash and --logits-load-ignore-errors do not pass over this."
    )
