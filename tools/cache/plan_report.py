# SPDX-License-Identifier: Apache-2.0
"""What a dump will take, for a terminal and for a script."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.cache.dump_plan import DumpSetting, FormatPlan, StudentPlan
from tools.cache.payload_sizes import Sizes
from tools.units import bytes_text

_UNKNOWN_STEP_TIME = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpPlan:
    """Everything that is said of a dump.

    Attributes:
        setting: The run.
        sizes: What its tokens take.
        formats: What it takes in each format.
        students: How students read it.
        raw_iteration: Bytes of an iteration of a writing rank before it is compressed.
        decoded_bytes_per_token: What a student holds of a token.
        store_bandwidth: Bytes per second that the store takes; None if it is not known.
    """

    setting: DumpSetting
    sizes: Sizes
    formats: dict[str, FormatPlan]
    students: list[StudentPlan]
    raw_iteration: int
    decoded_bytes_per_token: float
    store_bandwidth: float | None


# ---- for a terminal ------------------------------------------------------------------------------


def report(plan: DumpPlan) -> Iterator[str]:
    """Yield the lines for a terminal of 100 columns."""
    setting, formats = plan.setting, plan.formats
    save = setting.batches
    yield (
        f"{setting.tokens:.4g} tokens: {setting.train_samples} samples in {setting.iterations} "
        f"iterations; {plan.sizes.mean_kept:.4g} entries per token"
    )
    yield f"{save.dp} ranks write (DP {save.dp}), {save.rows} samples each per iteration"
    shards = save.dp * setting.windows
    yield f"{shards} shards, {setting.windows} of each rank, one per checkpoint"
    yield f"sizes are of {plan.sizes.source}"
    yield ""
    names = [f"format {name}" for name in formats]
    yield f"{'':<38}" + "".join(f"{name:>18}" for name in names)
    for title, cell in _rows(plan):
        cells = [cell(each) for each in formats.values()]
        yield f"{title:<38}" + "".join(f"{text:>18}" for text in cells)
    if "2" not in formats:
        yield "Format 2 stores ids below 131072 only."
    yield (
        f"Memory counts what logits-held-bytes does, with {_bytes(plan.raw_iteration)} of an "
        "iteration before it is"
    )
    yield "compressed. An upload to an object store holds a shard once more, in the worker."
    yield ""
    yield from _students(plan)
    yield ""
    yield from _load_plan(plan)


def _rows(plan: DumpPlan) -> Iterator[tuple[str, Callable[[FormatPlan], str]]]:
    setting = plan.setting
    yield "bytes per token", lambda each: f"{each.bytes_per_token:.1f}"
    yield "on disk", lambda each: _bytes(each.disk)
    yield "a shard", lambda each: _bytes(each.shard)
    yield "flush, one rank", lambda each: _bytes(each.flush)
    yield "flush, all ranks", lambda each: _bytes(each.flush_all)
    yield "host memory, one writing rank", lambda each: _bytes(each.memory)
    yield "  while the store is behind", lambda each: _bytes(each.memory_behind)
    if setting.spooled:
        yield "on the spool's disk, one rank", lambda each: _bytes(each.spool)
    if setting.step_time is not None:
        yield "store must take, all ranks", lambda each: f"{_bytes(each.bandwidth)}/s"
        yield "store must take, one rank", lambda each: f"{_bytes(each.bandwidth_per_writer)}/s"
        yield "encoding thread busy, this CPU", lambda each: f"{each.encode_share or 0:.1%}"
    store = plan.store_bandwidth
    if store is not None:
        yield "a flush takes", lambda each: f"{each.flush_all / store:.3g} s"
        if setting.step_time is not None:
            interval = setting.step_time * setting.save_interval
            yield (
                "  of the time between checkpoints",
                lambda each: f"{each.flush_all / store / interval:.1%}",
            )


def _students(plan: DumpPlan) -> Iterator[str]:
    setting, students = plan.setting, plan.students
    save = setting.batches
    yield (
        f"Students: --train-samples {setting.train_samples}; any TP, PP and VPP; any CP with "
        f"{setting.seq_length} / (2 * CP) whole;"
    )
    yield (
        "any DP, MBS and GBS with GBS a multiple of MBS * DP. A cache of format 1 would take MBS "
        f"{save.mbs} and"
    )
    yield f"GBS {save.gbs} only. Rows decoded over rows needed, by format:"
    yield ""
    if not students:
        yield "No DP size around the dump's divides this GBS: give another."
        return
    yield (
        f"{'DP':>6}{'MBS':>6}{'GBS':>8}{'format 2':>12}{'format 3':>12}"
        f"{'ranks read':>14}{'format 1':>12}"
    )
    for student in students:
        batches = student.batches
        yield (
            f"{batches.dp:>6}{batches.mbs:>6}{batches.gbs:>8}{student.amplification_v2:>12.2f}"
            f"{student.amplification_v3:>12.2f}{student.saved_ranks:>14}"
            f"{'reads' if student.reads_v1 else 'refuses':>12}"
        )


def _load_plan(plan: DumpPlan) -> Iterator[str]:
    name, found = next(iter(plan.formats.items()))
    setting, save = plan.setting, plan.setting.batches
    yield f"What reading asks of store and hosts (format {name}, a student like the teacher):"
    yield f"  python -m tools.logits_load_plan --world-size {setting.world_size} \\"
    yield (
        f"    --tensor-model-parallel-size {setting.tp} "
        f"--pipeline-model-parallel-size {setting.pp} \\"
    )
    yield (
        f"    --context-parallel-size {setting.cp} --micro-batch-size {save.mbs} "
        f"--global-batch-size {save.gbs} \\"
    )
    yield (
        f"    --seq-length {setting.seq_length} --train-samples {setting.train_samples} "
        f"--save-data-parallel-size {save.dp} \\"
    )
    yield (
        f"    --save-interval {setting.save_interval} "
        f"--step-time {setting.step_time or _UNKNOWN_STEP_TIME:g} \\"
    )
    yield (
        f"    --stored-bytes-per-token {found.bytes_per_token:.0f} "
        f"--packed-bytes-per-token {plan.decoded_bytes_per_token:.0f}"
    )


def _bytes(size: float | None) -> str:
    assert size is not None
    return bytes_text(size)


# ---- for a script --------------------------------------------------------------------------------


def as_json(plan: DumpPlan) -> dict[str, Any]:
    """Return what JSON shows; the keys are documented in the tools' README."""
    setting = plan.setting
    return {
        "tokens": setting.tokens,
        "samples": setting.train_samples,
        "iterations": setting.iterations,
        "writing_ranks": setting.batches.dp,
        "shards": setting.batches.dp * setting.windows,
        "shards_per_rank": setting.windows,
        "source": plan.sizes.source,
        "mean_kept": plan.sizes.mean_kept,
        "raw_iteration_bytes": plan.raw_iteration,
        "decoded_bytes_per_token": plan.decoded_bytes_per_token,
        "formats": {name: dataclasses.asdict(each) for name, each in plan.formats.items()},
        "students": [dataclasses.asdict(student) for student in plan.students],
    }
