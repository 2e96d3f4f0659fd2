# SPDX-License-Identifier: Apache-2.0
"""What a student's run asks of store and hosts, and how long it waits: the outputs."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tools.load_plan.member_needs import Ints, MemberUses, member_uses, saved_ranks
from tools.load_plan.setting import FILESYSTEM, Setting
from tools.load_plan.simulation import Trace, simulate

_STR_BYTES = 57
"""What a name in a list costs besides its characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """One rank of the last pipeline stage lists the cache, the others get it by broadcast."""

    names: int
    requests: int
    broadcast_bytes: int
    broadcast_ranks: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What all readers together ask of the store, once they run evenly.

    Attributes:
        readers: One per data-parallel replica.
        saved_ranks_per_reader: Most saved DP ranks whose shards one reader needs.
        fetches_whole_shards: Instead of a member at a time.
        members_per_iteration: Members read and decoded.
        amplification: Rows decoded over rows needed.
        requests_per_second: Of the store; metadata of shards included.
        peak_requests_per_second: The most in one second of the simulated run, its start included.
        bytes_per_second: From the store.
        bandwidth_share: Of the store's bandwidth.
        busy_threads_per_reader: Decoding threads that are busy on average.
    """

    readers: int
    saved_ranks_per_reader: int
    fetches_whole_shards: bool
    members_per_iteration: float
    amplification: float
    requests_per_second: float
    peak_requests_per_second: int
    bytes_per_second: float
    bandwidth_share: float
    busy_threads_per_reader: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """What the targets take in host memory, in bytes.

    Attributes:
        reader: The most that one reader holds: decoded and compressed members, finished iterations,
            shards that are fetched whole.
        listing: The names, on every rank of the last stage.
        readers_per_node: Most readers on one node.
        node: The most that one node holds.
        microbatch: Packed rows that a reader hands to its replica, per microbatch.
    """

    reader: int
    listing: int
    readers_per_node: int
    node: int
    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stalls:
    """Seconds that training waits for its targets.

    Attributes:
        start: The first iteration of a job that starts with the cache; the listing is included.
        resume: The first iteration of a job that starts in the middle of a shard.
        boundary: The longest wait around the first sample of a shard; None if none was passed.
        steady: Mean of the iterations besides.
        steady_share: Of the time of such an iteration.
    """

    start: float
    resume: float
    boundary: float | None
    steady: float
    steady_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Everything that :func:`predict` says of a setting."""

    listing: Listing
    reads: Reads
    memory: HostMemory
    stalls: Stalls
    iterations: int


def predict(setting: Setting, iterations: int = 200) -> Prediction:
    """Play *iterations* from the first sample on, and a start in the middle of a shard.

    Raises:
        ValueError: There is no iteration to play.
    """
    student = setting.student
    iterations = min(iterations, setting.dump.train_samples // student.gbs)
    listing = predict_listing(setting)
    trace = simulate(setting, start=0, iterations=iterations, ready_at=listing.seconds)
    stalls = _stalls(setting, trace, _resume(setting, listing, iterations))
    uses = member_uses(setting.dump.batches, student.batches, 0, iterations)
    reads = _reads(setting, uses, trace, student.step_time + stalls.steady)
    return Prediction(
        listing=listing,
        reads=reads,
        memory=_memory(setting, trace),
        stalls=stalls,
        iterations=iterations,
    )


def predict_listing(setting: Setting) -> Listing:
    """Return what finding the names takes, until the last rank of the stage has them."""
    store, student, names = setting.store, setting.student, setting.dump.shards
    requests = 1 if store.kind == FILESYSTEM else -(-names // store.names_per_request)
    listed = requests * store.latency + names / store.names_per_second
    size = names * len(_longest_name(setting))
    hops = math.ceil(math.log2(student.stage_ranks)) if student.stage_ranks > 1 else 0
    return Listing(
        names=names,
        requests=requests,
        broadcast_bytes=size,
        broadcast_ranks=student.stage_ranks,
        seconds=listed + hops * size / student.broadcast_bandwidth,
    )


def store_load(
    setting: Setting, uses: MemberUses, start: int, iterations: int
) -> tuple[float, float]:
    """Return requests to the store, and bytes from it, that *uses* take per iteration.

    A shard counts for the part of it that the iterations cover. The readers of a node that share a
    cache fetch a shard once, and each of them asks for its size. The first shard that a reader
    opens tells it how samples were dealt, whether it needs rows of it or not.
    """
    loader, dump = setting.loader, setting.dump
    window = uses.teacher_iteration // dump.save_interval
    readers, first = np.unique(uses.reader, return_index=True)
    guides = np.stack([readers, readers % dump.batches.dp, window[first]])
    by_reader = np.concatenate([guides, np.stack([uses.reader, uses.saved_rank, window])], axis=1)
    wanted = by_reader.copy()
    if setting.fetches_whole_shards and loader.node_cache:
        wanted[0] = np.asarray(setting.student.reader_nodes)[wanted[0]]
    end = start + iterations * setting.student.gbs

    def opens(shards: Ints) -> float:
        """Return how many different ones there are, each by the part of it that is covered."""
        begins = np.unique(shards, axis=1)[2] * dump.shard_samples
        covered = np.minimum(begins + dump.shard_samples, end) - np.maximum(begins, start)
        return float(covered.sum()) / dump.shard_samples

    opened = opens(by_reader)
    if setting.fetches_whole_shards:
        fetched = opens(wanted)
        requests = opened + fetched * len(setting.download_parts)
        return requests / iterations, fetched * setting.shard_bytes / iterations
    head = setting.head_reads(is_begun_inside=False)
    requests = len(uses) + opened * (1 + len(head))
    size = len(uses) * setting.member_read_bytes + opened * sum(size for _, size in head)
    return requests / iterations, size / iterations


def _resume(setting: Setting, listing: Listing, iterations: int) -> float:
    """Return how long the first iteration waits that starts in the middle of a shard."""
    gbs = setting.student.gbs
    middle = setting.dump.shard_samples // 2 // gbs * gbs
    ahead = setting.loader.decode_lookahead + setting.loader.queued_iterations + 1
    count = min(iterations, ahead, (setting.dump.train_samples - middle) // gbs)
    if count < 1:  # the cache is shorter than a shard
        middle, count = 0, min(iterations, ahead)
    trace = simulate(setting, start=middle, iterations=count, ready_at=listing.seconds)
    return trace.stalls[0]


def _stalls(setting: Setting, trace: Trace, resume: float) -> Stalls:
    """Sort the waits of a run by what they are for."""
    gbs, shard = setting.student.gbs, setting.dump.shard_samples
    ahead = setting.loader.decode_lookahead + setting.loader.queued_iterations + 1
    count = len(trace.stalls)
    around: set[int] = set()
    for boundary in range(shard, count * gbs, shard):
        first = boundary // gbs
        around.update(range(max(0, first - ahead), min(count, first + 2)))
    settled = range(min(ahead + 1, count - 1), count)  # behind what the start is still felt in
    even = [trace.stalls[i] for i in settled if i not in around] or list(trace.stalls[-1:])
    bounds = [trace.stalls[i] for i in settled if i in around]
    steady = sum(even) / len(even)
    return Stalls(
        start=trace.stalls[0],
        resume=resume,
        boundary=max(bounds, default=None),
        steady=steady,
        steady_share=steady / (steady + setting.student.step_time),
    )


def _reads(setting: Setting, uses: MemberUses, trace: Trace, iteration_time: float) -> Reads:
    student, dump = setting.student, setting.dump
    readers, count = student.batches.dp, len(trace.stalls)
    requests, size = store_load(setting, uses, 0, count)
    busy = len(uses) * setting.member_tokens * setting.loader.decode_seconds_per_token
    return Reads(
        readers=readers,
        saved_ranks_per_reader=max(
            len(saved_ranks(dump.batches, student.batches, reader)) for reader in range(readers)
        ),
        fetches_whole_shards=setting.fetches_whole_shards,
        members_per_iteration=len(uses) / count,
        amplification=len(uses) * dump.batches.rows / int(uses.rows.sum()),
        requests_per_second=requests / iteration_time,
        peak_requests_per_second=trace.peak_requests_per_second,
        bytes_per_second=size / iteration_time,
        bandwidth_share=size / iteration_time / setting.store.bandwidth,
        busy_threads_per_reader=busy / readers / count / iteration_time,
    )


def _memory(setting: Setting, trace: Trace) -> HostMemory:
    student = setting.student
    per_node = Counter(student.reader_nodes).most_common(1)[0][1]
    listing = setting.dump.shards * (len(_longest_name(setting)) + _STR_BYTES)
    stage_ranks = min(student.gpus_per_node, student.stage_ranks)
    tokens = student.mbs * student.seq_length
    return HostMemory(
        reader=trace.peak_reader_bytes,
        listing=listing,
        readers_per_node=per_node,
        node=per_node * trace.peak_reader_bytes + stage_ranks * listing,
        microbatch=round(tokens * setting.dump.packed_bytes_per_token),
    )


def _longest_name(setting: Setting) -> str:
    dump = setting.dump
    end = dump.train_samples
    return f"dp{dump.batches.dp - 1}__{max(0, end - dump.shard_samples)}-{end}.tar"
