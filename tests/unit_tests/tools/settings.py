# SPDX-License-Identifier: Apache-2.0
"""A small setting whose times can be worked out by hand, with any part of it replaced."""

from dataclasses import fields
from typing import Any

from tools.load_plan.setting import Batches, Dump, Loader, Setting, Store, Student

SEQ = 100
ROW_BYTES = 1000
"""Stored, of one sample; decoded it has twice as many."""


def setting(
    *, dp: int = 1, mbs: int = 1, gbs: int = 4, save: Batches | None = None, **changes: Any
) -> Setting:
    """Return a setting with readers of *dp* replicas of one rank each; *changes* are of any part.

    Without changes a member has 4000 bytes, which take 1 s on a connection, and reading is all that
    takes time.
    """
    values = {
        "world_size": dp,
        "seq_length": SEQ,
        "step_time": 10.0,
        "save_interval": 1000,
        "train_samples": 1_000_000,
        "stored_bytes_per_token": ROW_BYTES / SEQ,
        "packed_bytes_per_token": 2 * ROW_BYTES / SEQ,
        "kind": "filesystem",
        "bandwidth": 1e9,
        "requests_per_second": 1e9,
        "latency": 0.0,
        "connection_bandwidth": 4000.0,
        "decode_threads": 1,
        "queued_iterations": 0,
        "decode_seconds_per_token": 0.0,
        "header_bytes": 0,
        "metadata_bytes": 0,
        "index_bytes_per_member": 0,
        "held_iterations": 0,
        "small_range_bytes": 0,
        "single_part_bytes": 0,
        **changes,
    }

    def part(kind: type, **given: Any) -> Any:
        own = {f.name for f in fields(kind)} & values.keys()
        return kind(**given, **{name: values.pop(name) for name in sorted(own)})

    student = part(Student, mbs=mbs, gbs=gbs)
    dump = part(Dump, batches=save or student.batches)
    store, loader = part(Store), part(Loader)
    assert not values, f"of no part: {sorted(values)}"
    return Setting(student=student, dump=dump, store=store, loader=loader)
