# SPDX-License-Identifier: Apache-2.0
"""Which shards hold which samples, as a dump of the same flags would write them, pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.training.distillation.utils import ShardName


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """How a dump deals samples to ranks and iterations to shards.

    Attributes:
        micro_batch_size: Samples of a block.
        dp_size: Ranks that blocks are dealt to in turn.
        global_batch_size: Samples of an iteration.
        save_interval: Iterations of a shard.
    """

    micro_batch_size: int
    dp_size: int
    global_batch_size: int
    save_interval: int

    def shards(self, samples: range) -> Iterator[ShardName]:
        """Yield the shards of whole iterations; they end where those of a dump from 0 on do."""
        window = self.save_interval * self.global_batch_size
        for first in range(samples.start // window * window, samples.stop, window):
            start, end = max(first, samples.start), min(first + window, samples.stop)
            yield from (ShardName(rank, start, end) for rank in range(self.dp_size))

    def members(self, name: ShardName) -> list[tuple[int, int]]:
        """Return the samples of each iteration of a shard."""
        step = self.global_batch_size
        return [(start, start + step) for start in range(name.start, name.end, step)]

    def samples_of(self, dp_rank: int, start: int) -> list[int]:
        """Return the samples of a rank's rows in the iteration that begins at *start*."""
        mbs, dp = self.micro_batch_size, self.dp_size
        return [
            start + (row // mbs * dp + dp_rank) * mbs + row % mbs
            for row in range(self.global_batch_size // dp)
        ]


def covered_samples(
    wanted: tuple[int, int | None] | None, train_samples: int, global_batch_size: int
) -> range:
    """Return the samples of whole iterations to write.

    Args:
        wanted: First sample and end; None for the last one or for all.
        train_samples: Samples of the run; a last iteration that is not whole is not trained on.
        global_batch_size: Samples of an iteration.

    Raises:
        ValueError: They are not of the run, or cut an iteration.
    """
    last = train_samples // global_batch_size * global_batch_size
    start, end = wanted or (0, None)
    end = last if end is None else end
    if not 0 <= start < end <= last or start % global_batch_size or end % global_batch_size:
        raise ValueError(
            f"--samples {start}:{end} are not iterations of this run, expected multiples of "
            f"--global-batch-size {global_batch_size} from 0 to {last}."
        )
    return range(start, end)


def check_target(planned: Iterable[ShardName], there: Iterable[ShardName], target: str) -> None:
    """Refuse to write beside shards that hold some of the same samples.

    Raises:
        ValueError: Some do; names the first.
    """
    ours = set(planned)
    by_rank: dict[int, list[ShardName]] = {}
    for shard in ours:
        by_rank.setdefault(shard.dp_rank, []).append(shard)
    for other in sorted(there):
        if other in ours:
            continue
        same_rank = by_rank.get(other.dp_rank, [])
        if any(shard.start < other.end and other.start < shard.end for shard in same_rank):
            raise ValueError(
                f"{target} has {other}, which holds samples that are to be imported and is none "
                "of the shards that would be written. Give another directory, or the "
                "--save-interval and --samples that it was written with."
            )
