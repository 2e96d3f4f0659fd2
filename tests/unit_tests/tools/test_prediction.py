# SPDX-License-Identifier: Apache-2.0
"""Listing, waits by cause and memory of small settings, against what was worked out by hand."""

import functools

import pytest

from tests.unit_tests.tools.settings import ROW_BYTES, setting
from tools.load_plan.prediction import predict, predict_listing
from tools.load_plan.setting import Batches

near = functools.partial(pytest.approx, rel=1e-3, abs=1e-3)
WHOLE = {"kind": "object", "part_bytes": 1000, "whole_shard_bytes": 12_000, "save_interval": 3}


def test_an_object_store_is_listed_page_by_page():
    wanted = setting(
        world_size=64, pp=2, dp=32, gbs=32, save_interval=10, train_samples=320 * 100,
        kind="object", latency=0.1, names_per_second=1000.0, broadcast_bandwidth=1e6,
    )  # fmt: skip
    listing = predict_listing(wanted)
    assert (listing.names, listing.requests) == (32 * 100, 4)
    name = len("dp31__31680-32000.tar")
    assert listing.broadcast_bytes == 3200 * name
    # 4 pages, 3200 names, and 5 hops to 32 ranks
    assert listing.seconds == near(0.4 + 3.2 + 5 * 3200 * name / 1e6)


def test_a_file_system_is_listed_at_once_and_a_single_rank_needs_no_broadcast():
    listing = predict_listing(setting(latency=0.1, names_per_second=1000.0, save_interval=1000))
    assert (listing.names, listing.requests, listing.broadcast_ranks) == (250, 1, 1)
    assert listing.seconds == near(0.1 + 0.25)


def test_waits_are_told_apart():
    # Each iteration waits 1.5 s for its member, and 1 s more for the open at every tenth.
    wanted = setting(latency=0.5, save_interval=10, names_per_second=1e9)
    stalls = predict(wanted, 40).stalls
    assert stalls.start == near(0.5 + 2 + 1.5)  # listing, two opens, a member
    assert stalls.boundary == near(2.5)
    assert stalls.steady == near(1.5)
    assert stalls.steady_share == near(1.5 / 11.5)
    assert stalls.resume == near(stalls.start)


def test_a_run_within_one_shard_passes_no_boundary():
    assert predict(setting(), 20).stalls.boundary is None


def test_a_start_downloads_a_shard_and_a_resume_one_member():
    wanted = setting(**WHOLE, parts_at_once=1, prefetch_depth=1, names_per_second=1e9)
    found = predict(wanted, 30)
    assert found.reads.fetches_whole_shards
    assert (found.stalls.start, found.stalls.resume) == (near(3.0), near(1.0))
    assert found.stalls.boundary == near(0.0)
    # The size and 12 parts per 3 iterations of 10 s
    assert found.reads.requests_per_second == near(13 / 30)
    assert found.reads.bytes_per_second == near(400.0)


def test_memory_of_a_reader_and_of_a_node():
    # One thread: a decoded member, what is made of it, the iteration before it that is still in
    # use, and the shards that are fetched.
    wanted = setting(dp=4, gbs=16, world_size=8, tp=2, gpus_per_node=4, train_samples=16_000)
    decoded = 2 * 4 * ROW_BYTES
    memory = predict(wanted, 10).memory
    assert memory.reader == 3 * decoded
    assert memory.readers_per_node == 2
    assert memory.node == 2 * memory.reader + 4 * memory.listing
    assert memory.microbatch == 2 * ROW_BYTES
    whole = setting(
        dp=4, gbs=16, world_size=8, tp=2, gpus_per_node=4, train_samples=16_000, **WHOLE
    )
    # Three shards at most, with the default depth of 2: not the one that has been passed.
    held = predict(whole, 10).memory.reader
    assert held == 3 * 12_000 + 3 * decoded


def test_a_cache_shorter_than_the_run_ends_it():
    found = predict(setting(train_samples=40, save=Batches(dp=1, mbs=1, gbs=4)), 300)
    assert found.iterations == 10
    assert found.stalls.resume == near(found.stalls.start)
