# SPDX-License-Identifier: Apache-2.0
"""What the rank that reads tells the others of its replica at the first microbatch of an iteration.

A message is a head of fixed size and as many bytes as the ranks have agreed on, which hold a block
of packed rows, or why there is none. A head says how many bytes are needed, so a receiver of a
message that was cut off knows for which size to ask again. Pure.
"""

import json
from dataclasses import dataclass

import torch

from megatron.training.distillation import errors
from megatron.training.distillation.packed_rows import BlockLayout
from megatron.training.distillation.payload import VALUE_DTYPES
from megatron.training.distillation.targets import IterationFailure

_FIELDS = 16
HEAD_BYTES = _FIELDS * 8
_MICROSECONDS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The head of a message.

    Attributes:
        needed: Bytes that follow it.
        wait: Seconds that the rank that reads has waited for its data, to the microsecond.
        microbatches: Of the iteration; 0 if a failure follows.
        blocks: How the block that follows holds its rows; None if a failure follows.
    """

    needed: int
    wait: float
    microbatches: int = 0
    blocks: BlockLayout | None = None

    def encode(self) -> torch.Tensor:
        """Return ``(HEAD_BYTES,)`` uint8."""
        fields = [self.needed, round(self.wait * _MICROSECONDS), self.microbatches]
        if self.blocks is not None:
            blocks = self.blocks
            fields += [blocks.positions, blocks.samples, blocks.k, blocks.high_planes]
            fields += [VALUE_DTYPES.index(blocks.dtype), int(blocks.has_tail), blocks.chunks]
        fields += [0] * (_FIELDS - len(fields))
        return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def decode(cls, head: torch.Tensor) -> "Head":
        """Undo :meth:`encode`."""
        needed, wait, microbatches, *rest = head.cpu().view(torch.int64).tolist()
        blocks = None
        if microbatches:
            positions, samples, k, high_planes, dtype, has_tail, chunks, *_ = rest
            blocks = BlockLayout(
                positions=positions,
                samples=samples,
                k=k,
                high_planes=high_planes,
                dtype=VALUE_DTYPES[dtype],
                has_tail=bool(has_tail),
                chunks=chunks,
            )
        return cls(
            needed=needed,
            wait=wait / _MICROSECONDS,
            microbatches=microbatches,
            blocks=blocks,
        )


def encode_failure(failure: IterationFailure) -> torch.Tensor:
    """Return a failure as uint8 ``(bytes,)``."""
    content = [failure.start, failure.fatal, type(failure.error).__name__, str(failure.error)]
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def decode_failure(content: torch.Tensor) -> IterationFailure:
    """Undo :func:`encode_failure`; an error of another module comes back as TeacherDataError."""
    start, fatal, name, text = json.loads(content.cpu().numpy().tobytes())
    error_type = getattr(errors, name, errors.TeacherDataError)
    return IterationFailure(start=start, error=error_type(text), fatal=fatal)
