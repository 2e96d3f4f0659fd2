# SPDX-License-Identifier: Apache-2.0
"""Waits, requests and memory of small settings, against what was worked out by hand."""

import functools
import itertools
import time

import pytest

from tests.unit_tests.tools.settings import ROW_BYTES, setting
from tools.load_plan.member_needs import member_uses, saved_ranks
from tools.load_plan.prediction import store_load
from tools.load_plan.setting import Batches, Setting, Student
from tools.load_plan.simulation import Trace, simulate

near = functools.partial(pytest.approx, rel=1e-3, abs=1e-3)
MEMBER = 4 * ROW_BYTES
OPENS = 2 * 2
"""Requests for the first shard, and for the one that it is compared with."""


def play(wanted: Setting, iterations: int = 6, start: int = 0) -> Trace:
    return simulate(wanted, start=start, iterations=iterations)


def test_a_single_thread_reads_when_it_is_asked():
    trace = play(setting())
    assert trace.stalls == near([1.0] * 6)
    assert trace.elapsed == near(6 * 1 + 5 * 10)
    assert (trace.members, trace.needed_rows, trace.opened) == (6, 24, 1)
    assert (trace.store_requests, trace.store_bytes) == (OPENS + 6, 6 * MEMBER)


def test_latency_comes_with_every_request_and_twice_with_an_open():
    trace = play(setting(latency=0.5))
    assert trace.stalls == near([OPENS * 0.5 + 1.5] + [1.5] * 5)


def test_the_listing_delays_the_readers():
    trace = simulate(setting(), start=0, iterations=3, ready_at=7.0)
    assert trace.stalls == near([8.0, 1.0, 1.0])


def test_working_ahead_hides_what_a_step_covers():
    # Until the first iteration is there, nobody knows how much room the others need.
    trace = play(setting(decode_threads=2))
    assert trace.stalls == near([1.0, 1.0] + [0.0] * 4)


def test_a_queue_works_ahead_even_with_a_single_thread():
    trace = play(setting(queued_iterations=1))
    assert trace.stalls == near([1.0] + [0.0] * 5)


def test_a_connection_slower_than_the_steps_paces_them():
    # A shard's stream is read by one thread at a time, so more threads do not help.
    trace = play(setting(decode_threads=4, step_time=0.25), iterations=20)
    assert trace.elapsed == near(20.25)  # the first step had nothing ahead of it
    assert trace.stalls[-5:] == near([0.75] * 5)


def test_readers_share_the_bandwidth_of_the_store():
    # 4 members of 1000 bytes per iteration at 2000 bytes/s: 2 s, of which a step covers 0.5.
    trace = play(setting(dp=4, bandwidth=2000, decode_threads=3, step_time=0.5), iterations=30)
    assert trace.stalls[-1] == near(1.5)
    assert trace.elapsed == near(60.5, abs=0.1)


def test_readers_share_the_rate_of_requests():
    trace = play(setting(dp=4, requests_per_second=2, step_time=0.5, decode_threads=3), 30)
    # 2 s for 4 requests; the last member of an iteration then needs 0.25 s more.
    assert trace.stalls[-1] == near(1.5)
    assert trace.peak_requests_per_second == 2


def test_decoding_takes_threads():
    # 400 tokens per member at 0.01 s: 4 s on a thread, and a step of 2 s.
    slow = {"decode_seconds_per_token": 0.01, "step_time": 2.0, "connection_bandwidth": 1e12}
    one, two = (play(setting(**slow, decode_threads=n), 20) for n in (1, 2))
    assert one.stalls == near([4.0] * 20)
    # Two threads have a member in 2 seconds.
    assert two.stalls[5:] == near([0.0] * 15)
    faster = {**slow, "step_time": 0.5}
    assert sum(play(setting(**faster, decode_threads=4), 40).stalls[20:]) == near(20 * 0.5)


def test_a_member_that_serves_several_iterations_is_read_once():
    trace = play(setting(save=Batches(dp=1, mbs=1, gbs=12)), iterations=6)
    assert (trace.members, trace.store_bytes) == (2, 6 * MEMBER)
    assert trace.stalls == near([3.0, 0, 0, 3.0, 0, 0])


def test_another_dp_reads_more_than_it_needs():
    trace = play(setting(dp=4, save=Batches(dp=2, mbs=1, gbs=4)), iterations=5)
    assert (trace.members, trace.needed_rows) == (20, 20)
    assert trace.store_bytes == 20 * 2 * ROW_BYTES


def test_the_byte_limit_ends_the_work_ahead():
    # An iteration has 8000 bytes, and its member as many. The next one is decoded whatever there
    # is room for; the one in use is held besides.
    steady = {"decode_threads": 4, "step_time": 10.0}
    for limit, peak in [
        (1, 24_000),
        (32_000, 24_000),
        (47_999, 24_000),
        (48_000, 40_000),
        (10**9, 72_000),
    ]:
        trace = play(setting(max_ahead_bytes=limit, **steady), iterations=20)
        assert trace.peak_reader_bytes == peak, limit
    # What is held on the way to the trainer counts as well.
    trace = play(setting(max_ahead_bytes=63_999, held_iterations=2, **steady), iterations=20)
    assert trace.peak_reader_bytes == 24_000


def test_a_limit_below_one_iteration_stops_nothing():
    trace = play(setting(max_ahead_bytes=1, decode_threads=4))
    assert trace.stalls == near([1.0] * 6)


# ---- shards --------------------------------------------------------------------------------


def test_a_boundary_costs_an_open_where_nothing_works_ahead():
    trace = play(setting(save_interval=3, latency=0.5), 9)
    # The size of the second shard is known since the first one was compared with it.
    assert trace.stalls == near([3.5, 1.5, 1.5, 2.0, 1.5, 1.5, 2.5, 1.5, 1.5])
    assert trace.opened == 3


def test_a_loader_process_hides_the_open_at_a_boundary():
    trace = play(setting(save_interval=3, latency=0.5, queued_iterations=2), 9)
    assert trace.stalls == near([3.5] + [0.0] * 8)


WHOLE = {"kind": "object", "save_interval": 3, "part_bytes": 1000, "whole_shard_bytes": 12_000}


def test_whole_shards_are_fetched_ahead():
    wanted = setting(**WHOLE, parts_at_once=1, prefetch_depth=1)
    assert wanted.fetches_whole_shards
    trace = play(wanted, 9)
    # 12 parts of 0.25 s; the next shards come while the steps of the first take place.
    assert trace.stalls == near([3.0] + [0.0] * 8)
    # 3 shards and the one after them, and the comparison with the neighbour of the first.
    assert (trace.store_requests, trace.store_bytes) == (4 * (1 + 12) + 2, 4 * 12_000)


def test_parts_of_a_shard_come_at_once():
    assert play(setting(**WHOLE, parts_at_once=4)).stalls[0] == near(0.75)
    assert play(setting(**WHOLE, parts_at_once=99)).stalls[0] == near(0.25)


def test_a_small_shard_comes_by_one_request():
    trace = play(setting(**WHOLE, single_part_bytes=12_000, prefetch_depth=0), 3)
    assert trace.stalls[0] == near(3.0)
    assert (trace.store_requests, trace.store_bytes) == (2 + 2, 12_000)


def test_without_prefetching_each_shard_is_waited_for():
    trace = play(setting(**WHOLE, parts_at_once=1, prefetch_depth=0), 9)
    assert trace.stalls == near([3.0, 0, 0] * 3)


def test_in_the_middle_of_a_shard_what_follows_comes_by_ranges():
    trace = play(setting(**WHOLE, parts_at_once=1, prefetch_depth=1), 6, start=4)
    assert trace.stalls == near([1.0] + [0.0] * 5)
    # 2 opens, the member, and the one behind it; shards 1, 2 and 3
    assert trace.store_requests == OPENS + 2 + 3 * (1 + 12)
    assert trace.store_bytes == 2 * MEMBER + 3 * 12_000


def test_ranges_behind_the_first_member_go_only_so_far_ahead():
    pieces = {"save_interval": 40, "whole_shard_bytes": 10**6, "piece_bytes": 2 * MEMBER}
    wanted = setting(**{**WHOLE, **pieces}, pieces_ahead=2, train_samples=160, dp=1)
    trace = play(wanted, 5, start=80)
    # Members 20 to 24 of 40 are read. 20 came alone, 21 to 28 in pieces, as 24 has 2 behind it.
    assert trace.store_bytes == 9 * MEMBER
    assert trace.stalls == near([1.0] + [0.0] * 4)
    # From one piece behind 24 on, decoded and in use as ever
    assert trace.peak_reader_bytes <= 8 * MEMBER + MEMBER + 24_000
    # On to the end of the shard, the first half is never read.
    assert play(wanted, 20, start=80).store_bytes == 20 * MEMBER


def test_metadata_comes_with_the_whole_shard_or_by_reads_of_its_own():
    # 12000 bytes of members, 300 of their headers, 150 of metadata
    heads = {"header_bytes": 100, "metadata_bytes": 120, "index_bytes_per_member": 10}
    size, read = 12_450, MEMBER + 100
    shared = {**WHOLE, **heads, "prefetch_depth": 0, "part_bytes": 5000}
    one_shard = {"train_samples": 12}  # nothing to compare it with
    local = play(setting(**heads, **one_shard, save_interval=3), 3)
    assert (local.store_requests, local.store_bytes) == (2 + 3, size)
    large = play(setting(**{**shared, **one_shard, "whole_shard_bytes": size - 1}), 3)
    assert (large.store_requests, large.store_bytes) == (1 + 2 + 3, size)
    whole = play(setting(**{**shared, **one_shard, "whole_shard_bytes": size}), 3)
    assert (whole.store_requests, whole.store_bytes) == (1 + 3, size)
    for small, requests, sent in [(200, 1, 200), (149, 2, 149 + 50)]:
        inside = play(
            setting(**shared, **one_shard, small_range_bytes=small), iterations=1, start=4
        )
        # And the member behind it, which is all that is left
        assert inside.store_requests == 1 + requests + 2
        assert inside.store_bytes == sent + 2 * read


def test_a_cache_of_the_node_fetches_lines_where_a_part_is_read():
    lines = {**WHOLE, "node_cache": True, "cache_line_bytes": 5000, "train_samples": 12}
    save = Batches(dp=1, mbs=1, gbs=4)
    heads = {"metadata_bytes": 64, "small_range_bytes": 64}
    wanted = setting(**lines, **heads, dp=2, gpus_per_node=2, save=save)
    trace = play(wanted, 1, start=4)
    # The first line has the metadata, the others bytes 4064 on; each comes once for both readers.
    assert trace.store_bytes == 12_064
    # The size; for the metadata, the member and what follows, the version; 3 lines
    assert trace.store_requests == 2 * (1 + 3) + 3


def test_a_shard_too_large_to_be_fetched_is_read_by_member():
    trace = play(setting(**{**WHOLE, "whole_shard_bytes": 11_999}))
    assert trace.store_bytes == 6 * MEMBER


def test_a_node_fetches_a_shard_once_where_it_has_a_cache():
    save = Batches(dp=1, mbs=1, gbs=8)
    shared = {**WHOLE, "whole_shard_bytes": 24_000, "prefetch_depth": 0, "dp": 8, "gbs": 8}
    alone, cached = (
        play(setting(**shared, save=save, gpus_per_node=4, node_cache=cache))
        for cache in (False, True)
    )
    assert alone.store_bytes == 8 * 2 * 24_000
    assert cached.store_bytes == 2 * 2 * 24_000
    assert alone.peak_reader_bytes - cached.peak_reader_bytes == 24_000


def test_shards_that_were_passed_are_held_no_longer():
    save = Batches(dp=2, mbs=1, gbs=4)
    trace = play(setting(**WHOLE, prefetch_depth=1, save=save), iterations=30)
    # This window's and the next one's, of 6000 bytes each and two saved ranks; the rows of an
    # iteration decoded, and once more when they are put together; the iteration before it.
    assert trace.peak_reader_bytes == 4 * 6000 + 3 * 2 * MEMBER


# ---- against the closed form ---------------------------------------------------------------


def test_a_reader_opens_the_shard_that_tells_how_samples_were_dealt():
    # Saved rank 0 has the samples of readers 0 and 1, but reader 1 asks saved rank 1 first.
    trace = play(setting(dp=4, save=Batches(dp=2, mbs=2, gbs=4)), iterations=5)
    assert saved_ranks(Batches(dp=2, mbs=2, gbs=4), Batches(dp=4, mbs=1, gbs=4), 1) == [0]
    # Readers 1 and 2 open two shards; all compare the first one with its neighbour.
    assert trace.opened == 6
    assert trace.store_requests == (6 + 4) * 2 + trace.members


SAVED = [(2, 1, 8), (4, 2, 8), (8, 1, 8), (1, 4, 4)]
LATE = (3, 1, 24)
"""Some readers need a shard in its second iteration first; an object store's is read by ranges."""


@pytest.mark.parametrize(
    ("save", "kind", "whole"),
    [
        *itertools.product([*SAVED, LATE], ["filesystem"], [False]),
        *itertools.product(SAVED, ["object"], [False, True]),
    ],
)
def test_the_store_sees_what_the_closed_form_says(save, kind, whole):
    dp, mbs, gbs = save
    batches = Batches(dp=dp, mbs=mbs, gbs=gbs)
    limit = 10**9 if whole else 0
    wanted = setting(
        dp=4, gbs=8, save=batches, save_interval=2, kind=kind, prefetch_depth=0,
        metadata_bytes=64, header_bytes=8, small_range_bytes=64, part_bytes=3000,
        whole_shard_bytes=limit,
    )  # fmt: skip
    trace = play(wanted, iterations=48)  # whole shards of every one of these
    uses = member_uses(batches, wanted.student.batches, 0, 48)
    requests, size = store_load(wanted, uses, 0, 48)
    neighbours = 4
    # An object is opened once more to be fetched whole. A file stays open, but the one beside the
    # first need not be one that the reader needs.
    extra = neighbours * (1 if kind == "filesystem" else 2)
    if kind == "filesystem":
        load = wanted.student.batches
        extra += sum(reader % dp not in saved_ranks(batches, load, reader) for reader in range(4))
    assert trace.store_requests - extra == near(48 * requests)
    assert trace.store_bytes - 64 * neighbours == near(48 * size)


# ---- refusals and size ---------------------------------------------------------------------


def test_more_iterations_than_the_cache_has_are_refused():
    with pytest.raises(ValueError, match=r"6 iterations from sample 4 on end at sample 28, .* 24"):
        play(setting(train_samples=24), 6, start=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gbs": 6, "dp": 4}, r"global batch size \(6\).*\(1 \* 4\)"),
        ({"world_size": 6, "tp": 4}, r"world size \(6\).*\(4 \* 1 \* 1 = 4\)"),
        ({"world_size": 8, "cp": 8}, r"sequence length \(100\).*\(2 \* 8\)"),
        ({"step_time": 0.0}, "Student.step_time is 0.0, expected more than 0"),
        ({"latency": -1.0}, "Store.latency is -1.0, expected 0 or more"),
        ({"bandwidth": float("nan")}, "Store.bandwidth is nan"),
        ({"kind": "tape"}, "store is 'tape', expected filesystem or object"),
        ({"decode_threads": 0}, "Loader.decode_threads is 0, expected more than 0"),
        ({"train_samples": 3}, r"3 samples, fewer than one iteration of the student \(4\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        setting(**changes)


def test_readers_stand_on_the_nodes_of_the_last_stage():
    student = Student(
        world_size=32, tp=2, pp=2, cp=1, mbs=1, gbs=8, seq_length=8, gpus_per_node=4, step_time=1
    )
    # Ranks 16, 18, ... 30 of 4 per node.
    assert student.reader_nodes == (4, 4, 5, 5, 6, 6, 7, 7)


def test_ten_thousand_ranks_take_seconds():
    wanted = setting(
        world_size=9984, tp=8, pp=4, cp=2, gbs=2496, seq_length=8192, gpus_per_node=8,
        decode_threads=4, queued_iterations=2, connection_bandwidth=1e9,
    )  # fmt: skip
    began = time.process_time()
    trace = play(wanted, iterations=300)
    assert trace.members == 156 * 300
    assert time.process_time() - began < 10
