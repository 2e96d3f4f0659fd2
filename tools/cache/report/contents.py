# SPDX-License-Identifier: Apache-2.0
"""Puts the page together: which parts it has, and the same numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tools.cache.inventory import Inventory
from tools.cache.report import mass_charts, page, run_charts, teacher_charts
from tools.cache.report.chart import Table
from tools.cache.report.coverage_picture import map_coverage
from tools.cache.report.facts import (
    Amounts,
    amount_facts,
    amounts,
    format_facts,
    headline,
    run_facts,
    vocab_size,
)
from tools.cache.report.mass_charts import Costs
from tools.cache.report.page import Section
from tools.cache.report.sequences import Detokenize, id_text, read_sequences
from tools.cache.report.statistics import P_GRID, mean_entries
from tools.cache.report.survey import Survey
from tools.units import bytes_text

_LISTED = 50
_NO_TAILS = (
    "This cache has no tails. On this page the tail is one less the kept mass of the entries, and "
    "0 where rounding makes them more than one."
)


def report(
    inventory: Inventory, survey: Survey, *, text_of: Detokenize | None, command: str
) -> str:
    """Return the page on a cache.

    Args:
        inventory: The cache.
        survey: What a sample of its payloads shows.
        text_of: The text of ids; None shows ids.
        command: What makes the same page again.
    """
    amount = amounts(inventory, survey)
    cost = mass_charts.costs(survey, amount.bytes_per_token)
    sections = [_summary(inventory, survey, amount, command), _coverage(inventory)]
    if survey.statistics.tokens:
        sections += [_mass(inventory, survey, cost), _teacher(inventory, survey)]
    sections.append(_run(inventory, survey, amount))
    if survey.points:
        sections.append(_sequences(survey, text_of))
    return page.page(
        f"Logits cache {inventory.files.directory}",
        _looked_at(survey),
        [section for section in sections if section.body],
        json.dumps(numbers(inventory, survey, amount, cost)),
    )


def _looked_at(survey: Survey) -> str:
    """Return how much of the cache the statistics are of."""
    seen, total = len(survey.points) + len(survey.failed), survey.total
    if not seen:
        return "No payload was looked at: no shard can be read."
    what = f"{seen} of {total} payloads, evenly spread"
    if seen == total:
        what = f"all {total} payloads"
    if survey.failed:
        what += f", {len(survey.failed)} of which cannot be read"
    if survey.rows_seen < survey.rows:
        what += f", and of {survey.rows_seen} of their {survey.rows} rows"
    return (
        f"Statistics are of {what}: {survey.statistics.tokens:.0f} tokens, "
        f"{bytes_text(survey.bytes_seen)}, looked at in {survey.seconds:.0f} s. Coverage and bytes "
        "are of all shards."
    )


def _summary(inventory: Inventory, survey: Survey, amount: Amounts, command: str) -> Section:
    body = []
    if survey.failed:
        share = len(survey.failed) / (len(survey.points) + len(survey.failed))
        body.append(
            page.paragraph(
                f"{len(survey.failed)} of the payloads that were looked at ({share:.1%}) cannot be "
                "read; they are named below. `verify` finds all of them.",
                "warning",
            )
        )
    empty = survey.statistics.empty
    if empty:
        body.append(page.paragraph(f"{empty:.0f} tokens have no entries and are left out.", "note"))
    body += [
        page.tiles(headline(inventory, survey, amount)),
        page.columns(
            page.facts(rows)
            for rows in (
                run_facts(inventory),
                format_facts(inventory, survey),
                amount_facts(inventory, amount),
            )
            if rows
        ),
        page.words("Made by", command),
    ]
    return Section(name="summary", title="Summary", body="".join(body))


def _coverage(inventory: Inventory) -> Section:
    body = [page.coverage(map_coverage(inventory))]
    gaps = [
        (str(gap.start), str(gap.end - 1), str(gap.end - gap.start))
        for gap in inventory.coverage.gaps
    ]
    body += _listing("Samples that are not complete", ("first", "last", "samples"), gaps)
    damaged = [(s.file.base_name, s.problem or "") for s in inventory.damaged]
    body += _listing("Damaged shards", ("shard", "what is wrong"), damaged)
    foreign = [
        (file.base_name, "; ".join(map(str, found))) for file, found in inventory.foreign.items()
    ]
    body += _listing("Shards of another dump", ("shard", "what tells them apart"), foreign)
    overlaps = [(a.base_name, b.base_name) for a, b in inventory.overlaps]
    body += _listing("Overlapping shards", ("shard", "and"), overlaps)
    return Section(name="coverage", title="Coverage", body="".join(body))


def _listing(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of the first rows; nothing if there are none."""
    if not rows:
        return []
    name = title if len(rows) <= _LISTED else f"{title}: the first {_LISTED} of {len(rows)}"
    return [page.table(Table(head=head, rows=rows[:_LISTED]), name, "listing")]


def _mass(inventory: Inventory, survey: Survey, cost: Costs) -> Section:
    found = survey.statistics
    recorded_p = _recorded_p(inventory)
    note = ""
    if not found.with_tail:
        note = page.paragraph(_NO_TAILS, "note")
    is_ragged = float(found.entries_counts[found.k]) < found.tokens
    body = page.charts(
        [
            mass_charts.kept_mass(found, cost),
            mass_charts.lost_mass(found),
            mass_charts.top_p(found, cost, recorded_p),
            mass_charts.trade(found, cost, recorded_p),
            teacher_charts.entries(found, is_ragged),
            teacher_charts.by_position(found, "kept"),
        ]
    )
    return Section(name="mass", title="Kept mass, K and P", body=note + body)


def _recorded_p(inventory: Inventory) -> float | None:
    """Return the P of the dump, which tells nothing of a larger one; None if it had none."""
    return None if inventory.meta is None else inventory.meta.saver.p


def _teacher(inventory: Inventory, survey: Survey) -> Section:
    found = survey.statistics
    body = page.charts(
        [
            teacher_charts.entropy(found, vocab_size(inventory)),
            teacher_charts.by_position(found, "entropy"),
            teacher_charts.top1(found),
        ]
    )
    return Section(name="teacher", title="The teacher's distributions", body=body)


def _run(inventory: Inventory, survey: Survey, amount: Amounts) -> Section:
    body = []
    drawn = []
    if amount.bytes_per_token is not None and amount.sequence_length is not None:
        drawn.append(run_charts.shard_bytes(inventory, amount.sequence_length))
    if survey.points:
        drawn += [
            run_charts.over_samples(inventory, survey, what) for what in ("kept", "tail", "entropy")
        ]
    if drawn:
        body.append(page.charts(drawn))
    failed = [(f.payload.shard.base_name, str(f.payload.member), f.reason) for f in survey.failed]
    body += _listing("Payloads that cannot be read", ("shard", "member", "what is wrong"), failed)
    return Section(name="run", title="Along the run", body="".join(body))


def _sequences(survey: Survey, text_of: Detokenize | None) -> Section:
    what = "tokens" if text_of is not None else "ids (no --tokenizer was given)"
    intro = (
        f"What the teacher expects to come next at each position: the first entry, as {what}, in a "
        "stronger colour the surer it is. Point at one for those behind it. The tokens that the "
        "teacher was given are not in the cache."
    )
    parts = [page.sequence(one, text_of or id_text) for one in read_sequences(survey)]
    return Section(
        name="sequences",
        title="A few sequences",
        body=page.paragraph(intro, "note") + "".join(parts),
    )


def numbers(inventory: Inventory, survey: Survey, amount: Amounts, cost: Costs) -> dict[str, Any]:
    """Return what the page shows as JSON has it; quantities are per token."""
    found = survey.statistics
    content: dict[str, Any] = {
        "samples": amount.samples,
        "sequence_length": amount.sequence_length,
        "bytes": amount.size,
        "bytes_per_token": amount.bytes_per_token,
        "shards": len(inventory.shards),
        "damaged": [shard.file.base_name for shard in inventory.damaged],
        "foreign": [file.base_name for file in inventory.foreign],
        "overlaps": [[a.base_name, b.base_name] for a, b in inventory.overlaps],
        "gaps": [list(gap) for gap in inventory.coverage.gaps],
        "payloads": survey.total,
        "payloads_seen": len(survey.points) + len(survey.failed),
        "payloads_damaged": [
            [one.payload.shard.base_name, one.payload.member] for one in survey.failed
        ],
        "rows_seen": survey.rows_seen,
        "tokens_seen": found.tokens,
        "tokens_without_entries": found.empty,
    }
    if not found.tokens:
        return content
    return {
        **content,
        "k": found.k,
        "kept_mass": found.kept / found.tokens,
        "tail_mass": found.tail / found.tokens,
        "entries": found.entries / found.tokens,
        "top1": found.top1 / found.tokens,
        "entropy_with_tail": found.entropy / found.tokens,
        "entropy_kept": found.entropy_kept / found.tokens,
        "by_k": [
            {
                "k": m.k,
                "kept_mass": m.mean,
                "kept_mass_p5": m.p5,
                "kept_mass_p50": m.p50,
                "kept_mass_p95": m.p95,
                "entries": m.entries,
                "bytes_per_token": cost.by_k.get(m.k),
            }
            for m in mass_charts.masses_at_k(found)
        ],
        "by_p": [
            {
                "p": p,
                "entries": entries,
                "kept_mass": kept / found.tokens,
                "short": short / found.tokens,
                "bytes_per_token": cost.by_p.get(p),
            }
            for p, entries, kept, short in zip(
                P_GRID,
                mean_entries(found.top_p_counts).tolist(),
                found.top_p_kept.tolist(),
                found.top_p_short.tolist(),
                strict=True,
            )
            if p <= (_recorded_p(inventory) or 1)
        ],
    }
