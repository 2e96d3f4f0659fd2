# SPDX-License-Identifier: Apache-2.0
"""``diff``: compare two caches over the same samples."""

import argparse
import json

from tools.cache.cache_comparison import (
    Overlap,
    RowResult,
    compare_identity,
    compare_in_processes,
    overlap,
    spread_tasks,
    tasks,
)
from tools.cache.cache_files import list_cache
from tools.cache.command_line import Verbs, add_jobs, add_verb, positive
from tools.cache.coverage import Span
from tools.cache.diff_report import Findings, as_json, report, spans_text
from tools.cache.inventory import Inventory, take_inventory
from tools.cache.progress import Progress

_SMALL_BYTES = 64 << 20
"""Two caches of less are compared before other processes would have begun."""


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "diff",
        summary="compare two caches over the same samples",
        description="Compare two caches sample by sample, whatever formats, layouts, K and dtypes "
        "they have: whose data\nthey are of, which samples they cover, which ids they kept, and "
        "the divergence between them.\nThe exit status is 1 where they contradict each other "
        "(another identity, other label tokens), where\na shard or a member cannot be read, and "
        "with --exact where any sample differs or is in one only.",
        example="python -m tools.logits_cache diff dump/logits dump/logits3 --exact",
    )
    parser.add_argument("a", metavar="A", help="directory of a cache")
    parser.add_argument("b", metavar="B", help="directory of another one")
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="compare N samples, evenly spread"
    )
    parser.add_argument(
        "--range", type=_span, metavar="FIRST:END", help="compare samples from FIRST to END - 1"
    )
    parser.add_argument(
        "--exact", action="store_true", help="exit with 1 if any row differs or is in one only"
    )
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _span(text: str) -> Span:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of samples, such as 0:1024")
    return Span(int(first), int(end))


def _run(options: argparse.Namespace) -> int:
    a, b = (take_inventory(list_cache(directory)) for directory in (options.a, options.b))
    for inventory in (a, b):
        if inventory.meta is None:
            damaged = inventory.damaged[0]
            raise ValueError(
                f"No shard of {inventory.files.directory} can be read; {damaged.file.base_name}: "
                f"{damaged.problem}"
            )
    assert a.meta is not None
    assert b.meta is not None
    shared = overlap(a, b, options.range)
    findings = Findings(
        a=a,
        b=b,
        identity=compare_identity(a.meta, b.meta),
        overlap=shared,
        rows=_compare(a, b, shared, options),
    )
    is_bad = findings.is_contradicted or findings.problems
    status = int(bool(is_bad or (options.exact and not findings.is_exact)))
    if options.json:
        print(json.dumps(as_json(findings, status), indent=2))
    else:
        print("\n".join(report(findings)))
    return status


def _compare(a: Inventory, b: Inventory, shared: Overlap, options: argparse.Namespace) -> RowResult:
    if not shared.both:
        spans = [each.coverage.complete for each in (a, b)]
        chosen = "" if options.range is None else f" of samples {options.range}"
        raise ValueError(
            f"The caches have no sample{chosen} in common: {options.a} holds samples "
            f"{spans_text(spans[0])}, {options.b} holds samples {spans_text(spans[1])}."
        )
    if options.samples is None:
        work = tasks(a, b, shared.both)
    else:
        work = spread_tasks(a, b, shared.both, options.samples, options.jobs)
    size = sum(shard.size for each in (a, b) for shard in each.shards)
    jobs = options.jobs if size > _SMALL_BYTES else 1
    result = RowResult()
    with Progress("samples", sum(task.samples for task in work)) as progress:
        for samples, found in compare_in_processes(work, jobs):
            result.merge(found)
            progress.advance(count=samples)
    return result
