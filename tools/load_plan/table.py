# SPDX-License-Identifier: Apache-2.0
"""Predictions as a table in Markdown, one column each."""

from collections.abc import Callable, Mapping

from tools.load_plan.prediction import Prediction
from tools.units import bytes_text

_ROWS: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("readers", lambda p: f"{p.reads.readers}"),
    ("shards listed once", lambda p: f"{p.listing.names}, {_requests(p.listing.requests)}"),
    (
        "listing broadcast",
        lambda p: f"{bytes_text(p.listing.broadcast_bytes)} to {p.listing.broadcast_ranks} ranks",
    ),
    ("listing until all have it", lambda p: _seconds(p.listing.seconds)),
    ("shards are read", lambda p: "whole" if p.reads.fetches_whole_shards else "by member"),
    ("saved DP ranks per reader", lambda p: f"{p.reads.saved_ranks_per_reader}"),
    ("members decoded per iteration", lambda p: f"{p.reads.members_per_iteration:.0f}"),
    ("rows decoded / needed", lambda p: f"{p.reads.amplification:.2f}"),
    ("requests/s, store", lambda p: f"{p.reads.requests_per_second:.2f}"),
    ("requests/s, one reader", lambda p: f"{p.reads.requests_per_second / p.reads.readers:.3f}"),
    ("requests in the busiest second", lambda p: f"{p.reads.peak_requests_per_second}"),
    ("bytes/s, store", lambda p: bytes_text(p.reads.bytes_per_second)),
    ("bytes/s, one reader", lambda p: bytes_text(p.reads.bytes_per_second / p.reads.readers)),
    ("share of the store's bandwidth", lambda p: f"{p.reads.bandwidth_share:.1%}"),
    ("busy decoding threads per reader", lambda p: f"{p.reads.busy_threads_per_reader:.3f}"),
    ("host memory, one reader", lambda p: bytes_text(p.memory.reader)),
    ("readers per node", lambda p: f"{p.memory.readers_per_node}"),
    ("host memory, one node", lambda p: bytes_text(p.memory.node)),
    ("handed over per microbatch", lambda p: bytes_text(p.memory.microbatch)),
    ("wait at the start", lambda p: _seconds(p.stalls.start)),
    ("wait on resume in the middle of a shard", lambda p: _seconds(p.stalls.resume)),
    ("longest wait at a shard's boundary", lambda p: _seconds(p.stalls.boundary)),
    ("wait per iteration besides", lambda p: _seconds(p.stalls.steady)),
    ("share of an iteration", lambda p: f"{p.stalls.steady_share:.1%}"),
)


def table(predictions: Mapping[str, Prediction]) -> str:
    """Return a row per quantity and a column per prediction."""
    found = list(predictions.values())
    rows = [[name, *(cell(prediction) for prediction in found)] for name, cell in _ROWS]
    rows.insert(0, [f"{max(p.iterations for p in found)} iterations simulated", *predictions])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "none passed"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
