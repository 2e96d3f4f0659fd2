# SPDX-License-Identifier: Apache-2.0
"""Ranks, sizes and groups as one value, and the few collectives over them.

This is the only module of the package that reads ``megatron.core.parallel_state``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core import parallel_state


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """One rank's place in the parallel layout of its pipeline stage.

    Attributes:
        tp_rank: Rank in the tensor parallel group.
        tp_size: Size of the tensor parallel group.
        tp_group: The tensor parallel group.
        tp_source: Global rank of tensor parallel rank 0.
        cp_rank: Rank in the context parallel group.
        cp_size: Size of the context parallel group.
        cp_group: The context parallel group.
        replica_group: The tensor x context parallel ranks that train on the same samples, in the
            order of their context parallel ranks, those of one by tensor parallel rank.
        dp_rank: Data parallel rank, without context parallelism; it decides which samples.
        dp_size: Data parallel size, without context parallelism.
        stage_group: All ranks of this pipeline stage: tensor x context x data parallel.
    """

    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    tp_source: int
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    stage_group: dist.ProcessGroup

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this rank is the one that logs what all ranks of the stage know."""
        return self.tp_rank == self.cp_rank == self.dp_rank == 0

    @property
    def replica_size(self) -> int:
        """Ranks that train on the same samples: tensor x context parallel."""
        return self.tp_size * self.cp_size

    @property
    def reads_for_replica(self) -> bool:
        """Whether this rank is the one that reads for the ranks that train on the same samples."""
        return self.tp_rank == self.cp_rank == 0

    @classmethod
    def from_parallel_state(cls) -> "ParallelLayout":
        """Read Megatron's global parallel state."""
        return cls(
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            tp_source=parallel_state.get_tensor_model_parallel_src_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_group=parallel_state.get_context_parallel_group(),
            replica_group=parallel_state.get_tensor_and_context_parallel_group(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            stage_group=parallel_state.get_tensor_and_data_parallel_group(
                with_context_parallel=True
            ),
        )


def gather_sequence(chunk: torch.Tensor, layout: ParallelLayout) -> torch.Tensor | None:
    """Reassemble a sequence from the zigzag chunks of the context parallel ranks.

    Collective over CP: every rank of the group must call. CP rank ``r`` holds chunks ``r`` and
    ``2 * cp - 1 - r`` of the sequence cut into ``2 * cp``.

    Args:
        chunk: ``(S / cp, ...)``, of the same shape and dtype on every rank of the group.
        layout: This rank's place.

    Returns:
        The whole sequence ``(S, ...)`` on CP rank 0, None elsewhere.
    """
    if layout.cp_size == 1:
        return chunk
    chunk = chunk.contiguous()
    is_destination = layout.cp_rank == 0
    parts = [torch.empty_like(chunk) for _ in range(layout.cp_size)] if is_destination else None
    destination = dist.get_global_rank(layout.cp_group, 0)
    dist.gather(chunk, parts, dst=destination, group=layout.cp_group)
    if parts is None:
        return None
    # Rank r's part is [chunk r, chunk 2cp-1-r]: the first halves rise, the second halves fall.
    halves = [part.chunk(2, dim=0) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


def sequence_positions(length: int, layout: ParallelLayout) -> torch.Tensor:
    """Return the positions ``(S / cp,)`` int64 of a sample of *length* that this CP rank holds.

    They are those of chunks ``r`` and ``2 * cp - 1 - r`` of the sequence cut into ``2 * cp``.
    """
    positions = torch.arange(length)
    if layout.cp_size == 1:
        return positions
    chunks = positions.chunk(2 * layout.cp_size)
    return torch.cat([chunks[layout.cp_rank], chunks[2 * layout.cp_size - 1 - layout.cp_rank]])


def sum_over_context(part: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
    """Return the sum of an integer tensor over the context parallel ranks, on all of them.

    Collective over CP: every rank of the group must call, with the same shape and dtype.
    """
    if layout.cp_size == 1:
        return part
    total = part.clone()
    dist.all_reduce(total, group=layout.cp_group)
    return total


def sum_over_stage(values: list[float], layout: ParallelLayout) -> list[float]:
    """Return the sums of *values* over this pipeline stage.

    Collective over TP x CP x DP of the stage: every rank must call with as many values.
    """
    total = torch.tensor(values, dtype=torch.float64, device=_collective_device(layout.stage_group))
    dist.all_reduce(total, group=layout.stage_group)
    return total.tolist()


def max_over_stage(values: list[float], layout: ParallelLayout) -> list[float]:
    """Return, for each of *values*, the largest of this pipeline stage.

    Collective over TP x CP x DP of the stage: every rank must call with as many values.
    """
    largest = torch.tensor(
        values, dtype=torch.float64, device=_collective_device(layout.stage_group)
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=layout.stage_group)
    return largest.tolist()


def from_speaker[T](value: T, layout: ParallelLayout) -> T:
    """Return the *value* of the rank that speaks for this pipeline stage; other ranks' are ignored.

    Collective over TP x CP x DP of the stage: every rank must call.
    """
    box = [value]
    # All of its ranks are 0, so it comes first in the group.
    speaker = dist.get_global_rank(layout.stage_group, 0)
    dist.broadcast_object_list(box, src=speaker, group=layout.stage_group)
    return box[0]


def from_replica_reader(
    nbytes: int, parts: Sequence[torch.Tensor] | None, layout: ParallelLayout
) -> tuple[torch.Tensor, dist.Work]:
    """Begin to send every rank of a replica its part from the rank that reads.

    Collective over TP x CP: every rank must call. Ranks that all need the same part (no context
    parallelism) get it by one broadcast; otherwise each is sent its own by one scatter.

    Args:
        nbytes: Size of a part, the same on every rank.
        parts: On the rank that reads, one uint8 tensor ``(nbytes,)`` per context parallel rank, on
            :func:`targets_device`, which nobody changes any more. None elsewhere.
        layout: This rank's place.

    Returns:
        This rank's part, which may be one of *parts*, and the work that it is filled after.
    """
    group = layout.replica_group
    reader = dist.get_global_rank(group, 0)
    if layout.cp_size == 1 and parts is not None:
        room = parts[0]
    else:
        room = torch.empty(nbytes, dtype=torch.uint8, device=targets_device(layout))
    if layout.cp_size == 1:
        work = dist.broadcast(room, src=reader, group=group, async_op=True)
    else:
        each = None
        if parts is not None:
            each = [part for part in parts for _ in range(layout.tp_size)]
        work = dist.scatter(room, each, src=reader, group=group, async_op=True)
    assert work is not None
    return room, work


def targets_device(layout: ParallelLayout) -> torch.device:
    """Return the device that this rank's targets travel to, with a replica's collectives or not."""
    return _collective_device(layout.stage_group) if dist.is_initialized() else torch.device("cpu")


def worst_over_stage(code: int, detail: str, layout: ParallelLayout) -> tuple[int, str]:
    """Return the largest *code* over this pipeline stage, and what its ranks say of it.

    Collective over TP x CP x DP of the stage: every rank must call. One integer is reduced; the
    texts are exchanged only when the largest code is above 0, which all ranks then know.

    Args:
        code: 0 for success; larger is worse.
        detail: What happened on this rank; used if its code is the worst.
        layout: This rank's place.

    Returns:
        The worst code, and one line per distinct detail with the global ranks it comes from.
    """
    worst = torch.tensor(code, dtype=torch.int32, device=_collective_device(layout.stage_group))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=layout.stage_group)
    worst_code = int(worst.item())
    if worst_code == 0:
        return 0, ""
    size = dist.get_world_size(layout.stage_group)
    reports: list[tuple[int, int, str] | None] = [None] * size
    dist.all_gather_object(reports, (dist.get_rank(), code, detail), group=layout.stage_group)
    ranks_of: dict[str, list[int]] = {}
    for report in reports:
        assert report is not None
        rank, rank_code, rank_detail = report
        if rank_code == worst_code:
            ranks_of.setdefault(rank_detail, []).append(rank)
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()]
    return worst_code, "\n".join(lines)


def _collective_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that small tensors for *group* must live on."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
