# SPDX-License-Identifier: Apache-2.0
"""What is read, by whom, from where: the inputs of a prediction, checked where they are made."""

import math
from dataclasses import dataclass, fields
from functools import cached_property

FILESYSTEM, OBJECT_STORE = "filesystem", "object"
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """How Megatron's sampler deals samples: to *dp* ranks, *mbs* at a time, *gbs* an iteration."""

    dp: int
    mbs: int
    gbs: int

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the ones that do not fit."""
        if min(self.dp, self.mbs, self.gbs) < 1 or self.gbs % (self.mbs * self.dp):
            raise ValueError(
                f"The global batch size ({self.gbs}) must be a positive multiple of the micro "
                f"batch size times the data-parallel size ({self.mbs} * {self.dp}). Change one."
            )

    @property
    def rows(self) -> int:
        """Samples of one DP rank in one iteration."""
        return self.gbs // self.dp


@dataclass(frozen=True, kw_only=True)
class Student:
    """The run that reads.

    Attributes:
        world_size: Ranks.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size; only the last stage reads.
        cp: Context-parallel size.
        mbs: Micro batch size.
        gbs: Global batch size.
        seq_length: Tokens per sample.
        gpus_per_node: Consecutive ranks on one node.
        step_time: Seconds of an iteration that waits for nothing.
        broadcast_bandwidth: Bytes per second from one host to another in a broadcast.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    mbs: int
    gbs: int
    seq_length: int
    gpus_per_node: int = 8
    step_time: float
    broadcast_bandwidth: float = 1e9

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the ones that do not fit."""
        check_positive(self)
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            raise ValueError(
                f"The world size ({self.world_size}) must be a multiple of tensor, pipeline and "
                f"context-parallel size ({self.tp} * {self.pp} * {self.cp} = {model})."
            )
        if self.cp > 1 and self.seq_length % (2 * self.cp):
            raise ValueError(
                f"The sequence length ({self.seq_length}) must be a multiple of twice the "
                f"context-parallel size (2 * {self.cp})."
            )
        self.batches  # noqa: B018 - its own check

    @cached_property
    def batches(self) -> Batches:
        """How the samples are dealt."""
        dp = self.world_size // (self.tp * self.pp * self.cp)
        return Batches(dp=dp, mbs=self.mbs, gbs=self.gbs)

    @property
    def stage_ranks(self) -> int:
        """Ranks of the last pipeline stage."""
        return self.world_size // self.pp

    @cached_property
    def reader_nodes(self) -> tuple[int, ...]:
        """The node of each reader: TP and CP rank 0 of each replica, on the last stage.

        Megatron numbers ranks in the order TP, CP, DP, PP.
        """
        first = self.world_size - self.stage_ranks
        replica = self.tp * self.cp
        return tuple((first + d * replica) // self.gpus_per_node for d in range(self.batches.dp))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """The cache that is read.

    Attributes:
        batches: The teacher's.
        save_interval: Iterations, and so members, per shard.
        train_samples: Samples in the cache.
        stored_bytes_per_token: Of a compressed payload.
        packed_bytes_per_token: Of decoded entries in memory.
    """

    batches: Batches
    save_interval: int
    train_samples: int
    stored_bytes_per_token: float = 340
    packed_bytes_per_token: float = 550

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the one that does not fit."""
        check_positive(self)

    @property
    def shard_samples(self) -> int:
        """Samples per shard, over all DP ranks."""
        return self.save_interval * self.batches.gbs

    @property
    def shards(self) -> int:
        """Files in the directory."""
        return self.batches.dp * -(-self.train_samples // self.shard_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """A file system or object store, as one server that all readers share.

    Attributes:
        kind: ``filesystem`` or ``object``.
        bandwidth: Bytes per second that it gives to this run.
        requests_per_second: Reads that it begins per second.
        latency: Seconds until the first byte of a read.
        connection_bandwidth: Bytes per second of one read.
        names_per_second: Names that a listing returns.
        names_per_request: Names in one answer to a listing.
    """

    kind: str
    bandwidth: float
    requests_per_second: float
    latency: float
    connection_bandwidth: float
    names_per_second: float = 50_000
    names_per_request: int = 1000

    def __post_init__(self) -> None:
        """Check the values; ValueError names the one that cannot be."""
        if self.kind not in (FILESYSTEM, OBJECT_STORE):
            raise ValueError(
                f"The store is {self.kind!r}, expected {FILESYSTEM} or {OBJECT_STORE}."
            )
        check_positive(self, may_be_zero=("latency",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """How a reader reads.

    Attributes:
        decode_threads: Threads that read and decode, and iterations worked on ahead.
        prefetch_depth: Shards of an object store fetched ahead, per saved DP rank.
        max_ahead_bytes: Decoded rows that a reader may hold for iterations ahead of the next one.
        queued_iterations: Finished iterations that wait in the loader process's queue; 0 reads in
            the trainer's own process.
        decode_seconds_per_token: CPU time of one thread.
        whole_shard_bytes: Largest shard of an object store that is fetched whole.
        node_cache: Whole shards lie on a disk that the readers of a node share, not in memory.
        open_bytes: What opening a shard reads, after asking for its size.
        single_part_bytes: Largest shard that is fetched by one request; the client's threshold.
        part_bytes: What one request of a larger shard's download fetches.
        parts_at_once: Requests of one download that run at the same time.
    """

    decode_threads: int = 4
    prefetch_depth: int = 2
    max_ahead_bytes: int = 2 * GIB
    queued_iterations: int = 2
    decode_seconds_per_token: float = 2e-6
    whole_shard_bytes: int = 512 * MIB
    node_cache: bool = False
    open_bytes: int = 64 << 10
    single_part_bytes: int = 64 * MIB
    part_bytes: int = 32 * MIB
    parts_at_once: int = 8

    def __post_init__(self) -> None:
        """Check the values; ValueError names the one that cannot be."""
        optional = ("prefetch_depth", "queued_iterations", "decode_seconds_per_token")
        check_positive(
            self, may_be_zero=(*optional, "whole_shard_bytes", "single_part_bytes", "open_bytes")
        )

    @property
    def lookahead(self) -> int:
        """Iterations decoded ahead of the one that is handed out."""
        return self.decode_threads if self.decode_threads > 1 else 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that a prediction follows from."""

    student: Student
    dump: Dump
    store: Store
    loader: Loader

    def __post_init__(self) -> None:
        """Check that the cache has an iteration for the student."""
        if self.dump.train_samples < self.student.gbs:
            raise ValueError(
                f"The cache has {self.dump.train_samples} samples, fewer than one iteration of "
                f"the student ({self.student.gbs})."
            )

    @cached_property
    def member_tokens(self) -> int:
        """Tokens of one member."""
        return self.dump.batches.rows * self.student.seq_length

    @cached_property
    def member_bytes(self) -> int:
        """Stored bytes of one member."""
        return round(self.member_tokens * self.dump.stored_bytes_per_token)

    @cached_property
    def packed_member_bytes(self) -> int:
        """Bytes of one decoded member."""
        return round(self.member_tokens * self.dump.packed_bytes_per_token)

    @cached_property
    def shard_bytes(self) -> int:
        """Stored bytes of one shard."""
        return self.dump.save_interval * self.member_bytes

    @cached_property
    def shard_parts(self) -> int:
        """Requests that fetch a whole shard, besides the one for its size."""
        loader = self.loader
        if self.shard_bytes <= loader.single_part_bytes:
            return 1
        return -(-self.shard_bytes // loader.part_bytes)

    @cached_property
    def iteration_bytes(self) -> int:
        """Decoded bytes of the rows that one reader needs for an iteration."""
        tokens = self.student.batches.rows * self.student.seq_length
        return round(tokens * self.dump.packed_bytes_per_token)

    @cached_property
    def fetches_whole_shards(self) -> bool:
        """Whether shards are fetched whole, instead of a member at a time."""
        fits = self.loader.node_cache or self.shard_bytes <= self.loader.whole_shard_bytes
        return self.store.kind == OBJECT_STORE and fits


def check_positive(values: object, may_be_zero: tuple[str, ...] = ()) -> None:
    """Check the numbers of a dataclass; ValueError names the first that is too small."""
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = field.name in may_be_zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not least):
            expected = "0 or more" if least else "more than 0"
            raise ValueError(
                f"{type(values).__name__}.{field.name} is {value}, expected {expected}."
            )
