# SPDX-License-Identifier: Apache-2.0
"""What is read, by whom, from where: the inputs of a prediction, checked where they are made."""

import math
from dataclasses import dataclass, fields
from functools import cached_property

FILESYSTEM, OBJECT_STORE = "filesystem", "object"
GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


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
        check_model_parallel(
            self.world_size, tp=self.tp, pp=self.pp, cp=self.cp, seq_length=self.seq_length
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
        header_bytes: Of a member, in front of it and read with it.
        metadata_bytes: Of a shard's metadata with its header, but without the index.
        index_bytes_per_member: Of the index in the metadata.
    """

    batches: Batches
    save_interval: int
    train_samples: int
    stored_bytes_per_token: float = 340
    packed_bytes_per_token: float = 533
    header_bytes: int = 512
    metadata_bytes: int = 2048
    index_bytes_per_member: int = 40

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the one that does not fit."""
        optional = ("header_bytes", "metadata_bytes", "index_bytes_per_member")
        check_positive(self, may_be_zero=optional)

    @property
    def shard_samples(self) -> int:
        """Samples per shard, over all DP ranks."""
        return self.save_interval * self.batches.gbs

    @property
    def windows(self) -> int:
        """Shards of each DP rank."""
        return -(-self.train_samples // self.shard_samples)

    @property
    def shards(self) -> int:
        """Files in the directory."""
        return self.batches.dp * self.windows


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
        max_ahead_bytes: Decoded rows that a reader may hold.
        held_iterations: Iterations that count as held outside of the reader.
        queued_iterations: Finished iterations on their way from the reader to the trainer; 0 has a
            step ask the reader itself.
        decode_seconds_per_token: CPU time of one thread.
        whole_shard_bytes: Largest shard of an object store that is fetched whole into memory.
        node_cache: What an object store sends lies on a disk that the readers of a node share.
        cache_line_bytes: What such a cache fetches at least where a part of a shard is read.
        small_range_bytes: What is read at least of a shard that is not fetched whole.
        piece_bytes: What is fetched at once behind the member with which reading begins.
        pieces_ahead: Pieces of these beyond the member that was read last.
        single_part_bytes: Largest shard that is fetched by one request; the client's threshold.
        part_bytes: What one request of a larger shard's download fetches.
        parts_at_once: Requests of one download that run at the same time.
    """

    decode_threads: int = 4
    prefetch_depth: int = 2
    max_ahead_bytes: int = 2 * GIB
    held_iterations: int = 5
    queued_iterations: int = 3
    decode_seconds_per_token: float = 2e-6
    whole_shard_bytes: int = 512 * MIB
    node_cache: bool = False
    cache_line_bytes: int = 64 * MIB
    small_range_bytes: int = 16 * KIB
    piece_bytes: int = 8 * MIB
    pieces_ahead: int = 4
    single_part_bytes: int = 64 * MIB
    part_bytes: int = 32 * MIB
    parts_at_once: int = 8

    def __post_init__(self) -> None:
        """Check the values; ValueError names the one that cannot be."""
        optional = ("prefetch_depth", "held_iterations", "queued_iterations")
        sizes = ("whole_shard_bytes", "single_part_bytes", "small_range_bytes")
        check_positive(self, may_be_zero=(*optional, *sizes, "decode_seconds_per_token"))

    @property
    def decode_lookahead(self) -> int:
        """Most iterations decoded ahead of the next one."""
        return self.decode_threads if self.decode_threads > 1 else 0

    def lookahead(self, iteration_bytes: int, member_bytes: int) -> int:
        """Return how many iterations are decoded ahead of the next one, as the reader decides it.

        Args:
            iteration_bytes: Size of an iteration's rows; 0 before there has been one.
            member_bytes: Size of the decoded members that it is made of.
        """
        if iteration_bytes == 0:
            return 0
        left = self.max_ahead_bytes - self.held_iterations * iteration_bytes
        fitting = left // (iteration_bytes + member_bytes) - 1
        return max(0, min(self.decode_lookahead, fitting))


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
    def member_read_bytes(self) -> int:
        """What one read of a member takes: its header comes with it."""
        return self.dump.header_bytes + self.member_bytes

    @cached_property
    def head_bytes(self) -> int:
        """Where the first member of a shard begins."""
        dump = self.dump
        return dump.metadata_bytes + dump.save_interval * dump.index_bytes_per_member

    @cached_property
    def shard_bytes(self) -> int:
        """Stored bytes of one shard."""
        return self.head_bytes + self.dump.save_interval * self.member_read_bytes

    def head_reads(self, *, is_begun_inside: bool) -> list[tuple[int, int]]:
        """Return start and size of the reads that the metadata of a shard takes.

        They do not come with the whole shard. A file system sends what is asked for; a small range
        of an object store goes beyond the header unless reading begins at the shard's start.
        """
        header = self.dump.header_bytes
        metadata = (header, self.head_bytes - header)
        if self.store.kind == FILESYSTEM:
            return [(0, self.head_bytes)]
        if not is_begun_inside:
            return [(0, header), metadata]
        small = min(self.loader.small_range_bytes, self.shard_bytes)
        return [(0, small)] if self.head_bytes <= small else [(0, small), metadata]

    @cached_property
    def download_parts(self) -> list[int]:
        """Sizes of the parts in which a whole shard comes."""
        if self.shard_bytes <= self.loader.single_part_bytes:
            return [self.shard_bytes]
        part = self.loader.part_bytes
        return [min(part, self.shard_bytes - at) for at in range(0, self.shard_bytes, part)]

    @cached_property
    def iteration_bytes(self) -> int:
        """Decoded bytes of the rows that one reader needs for an iteration."""
        tokens = self.student.batches.rows * self.student.seq_length
        return round(tokens * self.dump.packed_bytes_per_token)

    @property
    def taken_ahead(self) -> float:
        """Seconds before the end of a step at which the targets of the next one are asked for.

        They are when its last microbatch begins, unless the reader itself is asked.
        """
        student = self.student
        microbatches = student.batches.rows // student.mbs
        return student.step_time / microbatches if self.loader.queued_iterations else 0.0

    @cached_property
    def fetches_whole_shards(self) -> bool:
        """Whether shards are fetched whole, instead of a member at a time."""
        fits = self.loader.node_cache or self.shard_bytes <= self.loader.whole_shard_bytes
        return self.store.kind == OBJECT_STORE and fits


def check_model_parallel(world_size: int, *, tp: int, pp: int, cp: int, seq_length: int) -> None:
    """Raise ValueError unless whole replicas make the world, and CP can cut the sequence."""
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"The world size ({world_size}) must be a multiple of tensor, pipeline and "
            f"context-parallel size ({tp} * {pp} * {cp} = {tp * pp * cp}). Change one."
        )
    if cp > 1 and seq_length % (2 * cp):
        raise ValueError(
            f"The sequence length ({seq_length}) must be a multiple of twice the "
            f"context-parallel size (2 * {cp}). Change one."
        )


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
