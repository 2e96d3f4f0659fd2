# SPDX-License-Identifier: Apache-2.0
"""What a dump will take: files, bytes, memory, bandwidth; and which students can read it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.distillation.fingerprint import chunk_count
from megatron.training.distillation.packed_rows import plane_bytes
from megatron.training.distillation.tar_layout import tar_size
from tools.cache.payload_sizes import PayloadSize
from tools.load_plan.member_needs import member_uses, saved_ranks
from tools.load_plan.setting import Batches, check_model_parallel, check_positive

_META_BYTES = 1200
"""Of a shard's metadata without its index: identifiers, settings, manifest."""
_INDEX_BYTES = {"2": 45, "3": 60}
"""Of a member in the index and the list of checksums."""
_SIMULATED_MEMBERS = 4096


@dataclass(frozen=True, kw_only=True)
class DumpSetting:
    """The run that records.

    Attributes:
        world_size: Ranks.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size; only the last stage records.
        cp: Context-parallel size.
        mbs: Micro batch size.
        gbs: Global batch size.
        seq_length: Tokens per sample.
        train_samples: Samples that are recorded.
        save_interval: Iterations per checkpoint, and so per shard.
        step_time: Seconds of an iteration; None if it is not known.
        max_waiting_bytes: Compressed bytes of a rank that may wait to be written.
        spooled: Whether these lie on a disk instead of in memory.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    mbs: int
    gbs: int
    seq_length: int
    train_samples: int
    save_interval: int
    step_time: float | None = None
    max_waiting_bytes: int
    spooled: bool = False

    def __post_init__(self) -> None:
        """Check the sizes; ValueError says which to change."""
        check_positive(self)
        check_model_parallel(
            self.world_size, tp=self.tp, pp=self.pp, cp=self.cp, seq_length=self.seq_length
        )
        if self.train_samples % self.batches.gbs:
            whole = self.train_samples // self.gbs * self.gbs
            raise ValueError(
                f"{self.train_samples} samples are not whole iterations of {self.gbs} "
                f"(--global-batch-size), and a dump records whole ones: use {whole} or "
                f"{whole + self.gbs}."
            )

    @property
    def batches(self) -> Batches:
        """How samples are dealt; its own check says what does not fit."""
        dp = self.world_size // (self.tp * self.pp * self.cp)
        return Batches(dp=dp, mbs=self.mbs, gbs=self.gbs)

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return self.train_samples // self.gbs

    @property
    def tokens(self) -> int:
        """Tokens that are recorded."""
        return self.train_samples * self.seq_length

    @property
    def member_tokens(self) -> int:
        """Tokens of a DP rank in an iteration."""
        return self.batches.rows * self.seq_length

    @property
    def windows(self) -> int:
        """Shards of each DP rank."""
        return math.ceil(self.iterations / self.save_interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatPlan:
    """What the dump takes in one format, in bytes and seconds.

    Attributes:
        bytes_per_token: Of a payload.
        shard: Of a whole shard; the last one of a rank may be smaller.
        disk: Of all shards.
        flush: What one rank hands over with a checkpoint.
        flush_all: What all of them do.
        memory: Host memory of a rank that writes, at most, while its store keeps up.
        memory_behind: The same while its store is behind.
        spool: What lies on the disk of the spool at most; 0 without one.
        bandwidth: Bytes per second that the store must take on average; None without a step time.
        bandwidth_per_writer: The same of one rank.
        encode_share: Share of the time for which the thread that encodes is busy, at the speed of
            this machine; None without a step time.
    """

    bytes_per_token: float
    shard: int
    disk: int
    flush: int
    flush_all: int
    memory: int
    memory_behind: int
    spool: int
    bandwidth: float | None
    bandwidth_per_writer: float | None
    encode_share: float | None


def plan_format(
    setting: DumpSetting, name: str, size: PayloadSize, *, raw_iteration: int
) -> FormatPlan:
    """Return what the dump takes in the format *name*, ``2``, ``3`` or ``3, 8-bit``.

    Args:
        setting: The run.
        name: The format.
        size: What a token takes in it.
        raw_iteration: Bytes of an iteration of a writing rank before it is compressed.
    """
    member = round(size.bytes_per_token * setting.member_tokens)
    window = min(setting.save_interval, setting.iterations)
    last = setting.iterations - (setting.windows - 1) * setting.save_interval
    shard, last_shard = (shard_bytes(name, member, members) for members in (window, last))
    dp = setting.batches.dp
    flush = member * window
    # One window is written while the next is collected, and an iteration is not yet compressed.
    # Behind, up to two wait besides the one that is collected, within the bound if they fit.
    held = 2 * flush
    held_behind = flush + min(max(setting.max_waiting_bytes, flush), 2 * flush)
    seconds = None if setting.step_time is None else setting.step_time * setting.save_interval
    encoding = size.encode_seconds_per_token * setting.member_tokens
    return FormatPlan(
        bytes_per_token=size.bytes_per_token,
        shard=shard,
        disk=dp * ((setting.windows - 1) * shard + last_shard),
        flush=flush,
        flush_all=flush * dp,
        memory=raw_iteration + (0 if setting.spooled else held),
        memory_behind=raw_iteration + (0 if setting.spooled else held_behind),
        spool=held_behind if setting.spooled else 0,
        bandwidth=None if seconds is None else flush * dp / seconds,
        bandwidth_per_writer=None if seconds is None else flush / seconds,
        encode_share=None if setting.step_time is None else encoding / setting.step_time,
    )


def shard_bytes(name: str, member: int, members: int) -> int:
    """Return the bytes of a shard with *members* payloads of *member* bytes each."""
    meta = _META_BYTES + members * _INDEX_BYTES[name[0]]
    return tar_size([meta, *[member] * members])


def raw_bytes(setting: DumpSetting, k: int, value_bytes: int) -> int:
    """Return what an iteration of a writing rank takes before it is compressed: int32 ids."""
    proofs = chunk_count(setting.seq_length) * setting.batches.rows * 8
    return setting.member_tokens * (k * (value_bytes + 4) + 4) + proofs


def decoded_bytes_per_token(k: int, value_bytes: int, vocab_size: int) -> float:
    """Return what a student holds of a token: values, ids of 16 bits and planes of bits, tail."""
    planes = max(1, (vocab_size - 1).bit_length() - 16)
    return k * (value_bytes + 2) + planes * plane_bytes(k) + 4 + 8 / 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentPlan:
    """How a student of other batches reads the cache.

    Attributes:
        batches: The student's.
        saved_ranks: Most DP ranks of the dump whose shards one of its readers needs.
        amplification_v2: Rows decoded over rows needed: members decode whole.
        amplification_v3: The same in format 3, whose rows decode alone.
        reads_v1: Whether it could read a cache of format 1 with these batches.
    """

    batches: Batches
    saved_ranks: int
    amplification_v2: float
    amplification_v3: float
    reads_v1: bool


def plan_student(setting: DumpSetting, student: Batches) -> StudentPlan:
    """Return how a student reads the cache, whatever its TP, PP, VPP and CP are."""
    save = setting.batches
    available = setting.train_samples // student.gbs
    # Both deals begin anew after so many samples; beyond some members nothing changes much.
    period = math.lcm(save.gbs, student.gbs) // student.gbs
    most = max(1, _SIMULATED_MEMBERS * save.gbs // (save.dp * student.gbs))
    iterations = max(1, min(period, available, most))
    uses = member_uses(save, student, 0, iterations)
    return StudentPlan(
        batches=student,
        saved_ranks=max(len(saved_ranks(save, student, reader)) for reader in range(student.dp)),
        amplification_v2=len(uses) * save.rows / int(uses.rows.sum()),
        amplification_v3=1.0,
        reads_v1=(student.mbs, student.gbs) == (save.mbs, save.gbs),
    )


def likely_students(setting: DumpSetting, gbs: int | None = None) -> list[Batches]:
    """Return layouts around the dump's that may read it: DP by powers of 2, some micro batches.

    Raises:
        ValueError: No layout has that global batch size, or the dump has fewer samples.
    """
    save = setting.batches
    gbs = save.gbs if gbs is None else gbs
    if gbs < 1 or gbs > setting.train_samples:
        raise ValueError(
            f"The student's global batch size is {gbs}, expected 1 to the {setting.train_samples} "
            "samples of the dump."
        )
    sizes = {max(1, math.floor(save.dp * factor)) for factor in (0.25, 0.5, 1, 2, 4)}
    sizes |= {math.gcd(gbs, size) for size in sizes}
    micro = sorted({save.mbs, *(size for size in (1, 2, 4, 8) if size <= 2 * save.mbs)})
    return [
        Batches(dp=dp, mbs=mbs, gbs=gbs)
        for dp in sorted(sizes)
        for mbs in micro
        if gbs % (mbs * dp) == 0
    ]


def plan_students(setting: DumpSetting, students: Sequence[Batches]) -> list[StudentPlan]:
    """Return how each of *students* reads the cache."""
    return [plan_student(setting, student) for student in students]
