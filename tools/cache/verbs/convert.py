# SPDX-License-Identifier: Apache-2.0
"""``convert``: write a cache again with fewer entries, in another format or layout."""

import argparse
import sys
from collections.abc import Sequence

from megatron.training.distillation.utils import SaverSettings
from tools.cache.command_line import Verbs, add_jobs, add_verb, positive
from tools.cache.conversion import Converted, Failed
from tools.cache.conversion_target import Target
from tools.cache.converted_cache import Plan, convert_cache, plan_conversion
from tools.cache.coverage import Span, count
from tools.cache.progress import Progress

_LISTED = 5


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "convert",
        summary="write a cache again: smaller K, top-P, dtype, format, shards, layout",
        description="Write all live shards of SRC again in DST, as a teacher with these flags "
        "would have written\nthem; what no flag names stays as it is. Every payload is read back "
        "and compared before its\nshard appears. A conversion that was stopped goes on when it "
        "is started again; nothing is\noverwritten.",
        example="python -m tools.logits_cache convert dump/logits small/logits --top-k 16 "
        "--format 3",
    )
    parser.add_argument("source", metavar="SRC", help="directory of the cache")
    parser.add_argument("target", metavar="DST", help="directory of the new one; it is made")
    entries = parser.add_argument_group("entries")
    entries.add_argument(
        "--top-k", type=positive, metavar="K", help="keep at most K entries of each token"
    )
    entries.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="keep the smallest leading set of these whose mass reaches P, as --logits-save-top-p",
    )
    entries.add_argument(
        "--top-p-min-k", type=positive, metavar="K", help="keep K entries whatever P says"
    )
    entries.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="of log-probabilities")
    entries.add_argument(
        "--8bit",
        dest="eight_bit",
        action="store_true",
        help="store values as 8-bit codes, of format 3 only, as --logits-save-8bit does",
    )
    parser.add_argument(
        "--format", type=int, choices=(2, 3), help="format of the shards (a cache in 1 becomes 2)"
    )
    layout = parser.add_argument_group(
        "layout", "That of a student, so that each of its DP ranks decodes its own rows only."
    )
    for flag in ("data-parallel-size", "micro-batch-size", "global-batch-size"):
        layout.add_argument(f"--{flag}", type=positive, metavar="N")
    layout.add_argument(
        "--samples-per-shard",
        type=positive,
        metavar="N",
        help="cut shards at multiples of N samples, itself one of the global batch size",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check and tell what would be done, and end"
    )
    add_jobs(parser)
    parser.add_argument(
        "--spool-dir",
        help="where payloads wait until their shard is complete (default: memory, up to a shard, "
        "or one of each DP rank with another layout, per process)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    to = Target(
        format_version=options.format,
        eight_bit=options.eight_bit,
        k=options.top_k,
        p=options.top_p,
        min_k=options.top_p_min_k,
        dtype=options.dtype,
        dp_size=options.data_parallel_size,
        mbs=options.micro_batch_size,
        gbs=options.global_batch_size,
        samples_per_shard=options.samples_per_shard,
    )
    plan = plan_conversion(options.source, options.target, to)
    _print_plan(plan)
    if options.dry_run:
        return 0
    done: list[Converted] = []
    failed: list[Failed] = []
    with Progress("shards", plan.shards) as progress:
        for result in convert_cache(plan, jobs=options.jobs, spool_dir=options.spool_dir):
            if isinstance(result, Failed):
                failed.append(result)
                progress.say(f"{result.name}: {result.reason}")
                progress.advance()
            else:
                done.append(result)
                progress.advance(0 if result.was_there else result.read_bytes)
    _print_sum(plan.shards, done, progress.seconds)
    if failed:
        names = ", ".join(sorted(failure.name for failure in failed))
        print(f"{len(failed)} shards were not converted: {names}", file=sys.stderr)
    return 1 if failed else 0


def _print_plan(plan: Plan) -> None:
    size = sum(shard.size for shard in plan.inventory.shards)
    print(f"{_words(plan.before)}: {len(plan.inventory.shards)} shards, {size / 1e6:.1f} MB")
    print(f"become {_words(plan.after)}: {plan.shards} shards")
    _print_samples("not in the cache, so no shard will have them", plan.gaps)
    _print_samples("left out, as they do not fill a round of micro batches", plan.left_out)


def _words(settings: SaverSettings | None) -> str:
    if settings is None:
        return "shards that cannot be read"
    nucleus = "" if settings.p is None else f", P {settings.p:g} (min K {settings.min_k})"
    return (
        f"format {settings.format_version}, K {settings.k or '?'}{nucleus}, "
        f"{settings.save_dtype or '?'}, DP {settings.dp_size_save} MBS {settings.mbs_save} "
        f"GBS {settings.gbs_save}"
    )


def _print_samples(what: str, spans: Sequence[Span]) -> None:
    if not spans:
        return
    more = f" and {len(spans) - _LISTED} more ranges" if len(spans) > _LISTED else ""
    listed = ", ".join(map(str, spans[:_LISTED]))
    print(f"{count(spans)} samples are {what}: {listed}{more}")


def _print_sum(shards: int, done: list[Converted], seconds: float) -> None:
    there = sum(one.was_there for one in done)
    read, written = sum(one.read_bytes for one in done), sum(one.written_bytes for one in done)
    share = f" ({written / read:.1%})" if read else ""
    print(
        f"{len(done)} of {shards} shards in {seconds:.0f} s, {there} of them were there already; "
        f"{read / 1e6:.1f} MB became {written / 1e6:.1f} MB{share}"
    )
