# SPDX-License-Identifier: Apache-2.0
"""Writes what a dump hands to the checkpoint worker to TensorBoard, W&B and the log.

The rank that writes the curves often holds no entries (TP and CP gather them elsewhere), so the
ranks of the stage add up their numbers, once per checkpoint.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.distillation import arguments, parallel
from megatron.training.distillation.write_watch import WrittenWindow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """What one rank hands over with a checkpoint; zeros where it has nothing to write.

    Attributes:
        start: First global sample of the window.
        end: First global sample after it.
        samples: Samples that this rank hands over.
        size: Their compressed bytes.
        waiting: Bytes that were handed over before and are not yet written.
        held: The most bytes of memory that this rank has held for the dump since the flush before.
        waited: Seconds that this rank has waited until these could be handed over.
        kept_mass: The teacher's probability inside the kept entries, summed over *tokens*.
        tokens: Tokens whose entries this rank has selected.
        written: Earlier windows that have been written since the flush before.
    """

    start: int
    end: int
    samples: int
    size: int
    waiting: int
    held: int
    waited: float
    kept_mass: float
    tokens: int
    written: Sequence[WrittenWindow]


def report_flush(flush: Flush, layout: parallel.ParallelLayout, seq_length: int | None) -> None:
    """Write the numbers of the whole stage; nothing if none of its ranks has samples.

    Collective over TP x CP x DP of the stage, twice: every rank must call.
    """
    sums = [
        flush.samples,
        flush.size,
        flush.size + flush.waiting,
        flush.kept_mass,
        flush.tokens,
        sum(window.size for window in flush.written),
    ]
    totals = parallel.sum_over_stage([float(number) for number in sums], layout)
    samples, size, waiting, kept_mass, tokens, written = totals
    maxima = [flush.waited, sum(window.seconds for window in flush.written), flush.held]
    waited, seconds, held = parallel.max_over_stage([float(number) for number in maxima], layout)
    if samples == 0:
        return
    iteration = arguments.current_position().iteration + 1
    scalars = {
        "logits-flush-bytes": size,
        "logits-waiting-bytes": waiting,
        "logits-held-bytes": held,
        "logits-flush-wait": waited,
    }
    if tokens:
        scalars["logits-kept-mass"] = kept_mass / tokens
    before = "no earlier window has been written since"
    if written:
        scalars["logits-flush-time"] = seconds
        before = f"before that {written / 1e6:.3f} MB were written in {seconds:.3f} s"
    for name, value in scalars.items():
        arguments.log_scalar(name, value, iteration)
    if layout.speaks_for_stage:
        logger.info(
            " logits of samples %d to %d handed over at iteration %8d | samples: %d | %.3f MB | "
            "bytes per token: %.2f | kept mass: %.6G | waiting: %.3f MB | held: %.3f MB | "
            "waited: %.3f s | %s",
            flush.start,
            flush.end - 1,
            iteration,
            samples,
            size / 1e6,
            size / (samples * seq_length) if seq_length else float("nan"),
            scalars.get("logits-kept-mass", float("nan")),
            waiting / 1e6,
            held / 1e6,
            waited,
            before,
        )
