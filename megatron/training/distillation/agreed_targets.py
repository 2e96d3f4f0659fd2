# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a pipeline stage agree on whether an iteration has targets.

Each rank reads for itself; what one of them cannot read, none of them uses.
"""

import logging

from megatron.training.distillation import parallel, storage
from megatron.training.distillation.errors import (
    TeacherDataError,
    TeacherDataExhaustedError,
    TeacherDataMissingError,
)
from megatron.training.distillation.target_stream import TargetStream
from megatron.training.distillation.targets import IterationFailure, IterationTargets

logger = logging.getLogger(__name__)

# What a rank can say of an iteration; the largest counts.
_READ, _UNREADABLE, _ABSENT, _FATAL = range(4)


class AgreedTargets:
    """Serves targets by the first sample of an iteration, to all ranks of a stage or to none.

    Args:
        logprobs_dir: Directory of the cache, a local path or ``msc://`` URL.
        stream: What this rank reads.
        layout: This rank's place.
        ignore_errors: Answer None for iterations whose data cannot be read, instead of raising.
    """

    def __init__(
        self,
        logprobs_dir: str,
        stream: TargetStream,
        layout: parallel.ParallelLayout,
        *,
        ignore_errors: bool,
    ) -> None:
        self.skipped_iterations = 0
        self._logprobs_dir = logprobs_dir
        self._stream = stream
        self._layout = layout
        self._ignore_errors = ignore_errors
        self._has_listing = False

    def agree_on(self, start_sample: int) -> IterationTargets | None:
        """Fetch an iteration's targets on this rank and agree on using them.

        Collective over TP x CP x DP of the stage: every rank must call. The directory is listed at
        the first call, and again when the ranks agree that the targets are not there: a running
        teacher may have written them since, or put their shard under another name.

        Raises:
            TeacherDataError: The targets cannot be used, or the directory cannot be listed.
        """
        if not self._has_listing:
            problem = self._agree_on_listing()
            if problem:
                raise TeacherDataError(problem)
            self._has_listing = True
        item, worst, details = self._fetch(start_sample)
        if worst == _ABSENT:
            problem = self._agree_on_listing()
            if problem:
                details = f"{details}\n{problem}"
            else:
                item, worst, details = self._fetch(start_sample)
        if worst == _READ:
            assert isinstance(item, IterationTargets)
            return item
        if worst != _FATAL and self._ignore_errors:
            self.skipped_iterations += 1
            if self._layout.speaks_for_stage:
                logger.warning(
                    "No teacher targets for the batch that starts at sample %d; this step trains "
                    "on the LM loss alone (%d steps so far).\n%s",
                    start_sample,
                    self.skipped_iterations,
                    details,
                )
            return None
        if isinstance(item, IterationFailure) and _severity(item) == worst:
            raise item.error
        raise TeacherDataError(
            f"Another rank of this pipeline stage cannot read the teacher targets of the batch "
            f"that starts at sample {start_sample}:\n{details}"
        )

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
        names, problem = parallel.from_speaker((names, problem), self._layout)
        if not problem:
            self._stream.use_listing(names)
        return problem

    def _fetch(self, start_sample: int) -> tuple[IterationTargets | IterationFailure, int, str]:
        """Fetch an iteration's targets on this rank; return them, the worst case and its details.

        Collective over TP x CP x DP of the stage: every rank must call.
        """
        item = self._stream.iteration(start_sample)
        detail = ""
        if isinstance(item, IterationFailure):
            detail = f"{type(item.error).__name__}: {item.error}"
        worst, details = parallel.worst_over_stage(_severity(item), detail, self._layout)
        return item, worst, details


def _severity(item: IterationTargets | IterationFailure) -> int:
    """Return what this rank has to say of an iteration."""
    if isinstance(item, IterationTargets):
        return _READ
    if item.fatal:
        return _FATAL
    absent = isinstance(item.error, TeacherDataMissingError | TeacherDataExhaustedError)
    return _ABSENT if absent else _UNREADABLE
