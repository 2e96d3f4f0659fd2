# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two caches has found, for a terminal and for a script."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.distillation.manifest import Difference
from tools.cache.cache_comparison import Identity, Overlap, RowResult
from tools.cache.coverage import Span, count
from tools.cache.inventory import Inventory
from tools.cache.row_comparison import Comparison, Extreme, SampleList

_LISTED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Everything that a comparison has found."""

    a: Inventory
    b: Inventory
    identity: Identity
    overlap: Overlap
    rows: RowResult

    @property
    def is_contradicted(self) -> bool:
        """Whether the caches are not of the same data."""
        return bool(self.identity.fatal or self.rows.comparison.contradicted.count)

    @property
    def is_exact(self) -> bool:
        """Whether every sample is in both and the same."""
        lacking = self.rows.missing_a.count or self.rows.missing_b.count
        alone = self.overlap.only_a or self.overlap.only_b
        return not (lacking or alone or self.rows.comparison.different.count)

    @property
    def problems(self) -> list[str]:
        """Return in words what could not be compared."""
        return [*_left_out(self.a), *_left_out(self.b), *self.rows.problems]


def _left_out(inventory: Inventory) -> list[str]:
    """Return in words which shards are not compared."""
    found = [f"{shard.file.path}: {shard.problem}" for shard in inventory.damaged]
    for file, differences in inventory.foreign.items():
        found.append(
            f"{file.path} is of another dump than most of the cache: "
            + "; ".join(map(str, differences))
        )
    return found


# ---- for a terminal ------------------------------------------------------------------------------


def report(findings: Findings) -> Iterator[str]:
    """Yield the lines for a terminal of 100 columns."""
    found = findings.rows.comparison
    yield from _loudest(found)
    yield _headline("A", findings.a)
    yield _headline("B", findings.b)
    yield ""
    yield from _identity(findings.identity)
    yield from _coverage(findings.overlap, findings.rows)
    yield _line("labels", _labels(found))
    if found.samples:
        yield ""
        yield from _rows(found)
    if findings.problems:
        yield ""
        yield f"{len(findings.problems)} problems; what they concern was not compared:"
        yield from (f"  {problem}" for problem in findings.problems)


def _loudest(found: Comparison) -> Iterator[str]:
    if not found.contradicted.count:
        return
    sample, position = min(found.contradicted_at.items())
    yield (
        f"OTHER TOKENS: the labels of {found.contradicted.count} of {found.samples} samples are "
        "not the same in A and B."
    )
    yield (
        f"The first is sample {sample}, in its 64 positions from {position} on. All samples: "
        f"{_samples(found.contradicted)}."
    )
    yield "What follows compares distributions of different texts there."
    yield ""


def _headline(name: str, inventory: Inventory) -> str:
    saver = inventory.meta.saver if inventory.meta is not None else None
    assert saver is not None
    versions = {s.meta.saver.format_version for s in inventory.sound if s.meta is not None}
    settings = [f"format {' and '.join(map(str, sorted(versions)))}"]
    if saver.k is not None:
        settings.append(f"K {saver.k}" + ("" if saver.p is None else f", P {saver.p}"))
        settings.append(f"{saver.save_dtype}")
    settings.append(f"DP {saver.dp_size_save}, MBS {saver.mbs_save}, GBS {saver.gbs_save}")
    return f"{name}  {inventory.files.directory}\n   {', '.join(settings)}"


def _line(title: str, text: str) -> str:
    return f"{title:<22}{text}"


def _identity(identity: Identity) -> Iterator[str]:
    if identity.fatal:
        yield _line("identity", "NOT THE SAME DATA")
    elif identity.unknown:
        yield _line("identity", "the same, as far as both say")
    else:
        yield _line("identity", "the same")
    for title, differences in (
        ("contradicts", identity.fatal),
        ("harmless", identity.harmless),
        ("setting", identity.settings),
    ):
        yield from (_line(f"  {title}", _difference(each)) for each in differences)
    yield from (_line("  not compared", text) for text in identity.unknown)


def _difference(difference: Difference) -> str:
    a, b = (json.dumps(value) for value in (difference.ours, difference.theirs))
    remark = f" ({difference.remark})" if difference.remark else ""
    return f"{difference.name}: A {a}, B {b}{remark}"


def _coverage(shared: Overlap, rows: RowResult) -> Iterator[str]:
    yield _line("samples in both", _counted(shared.both))
    for name, spans in (("A", shared.only_a), ("B", shared.only_b)):
        if spans:
            yield _line(f"  only in {name}", _counted(spans))
    for name, missing in (("A", rows.missing_a), ("B", rows.missing_b)):
        if missing.count:
            yield _line(f"  no row in {name}", f"{missing.count}: {_samples(missing)}")


def _counted(spans: Sequence[Span]) -> str:
    return f"{count(spans)} (samples {spans_text(spans)})"


def spans_text(spans: Sequence[Span]) -> str:
    """Return the samples of *spans* in words."""
    if not spans:
        return "none"
    more = "" if len(spans) <= _LISTED else f" and {len(spans) - _LISTED} more ranges"
    return ", ".join(map(str, spans[:_LISTED])) + more


def _samples(found: SampleList) -> str:
    more = "" if found.count <= _LISTED else f" and {found.count - _LISTED} more"
    return ", ".join(map(str, found.first[:_LISTED])) + more


def _labels(found: Comparison) -> str:
    unproven = found.samples - found.proven - found.contradicted.count
    parts = []
    if found.proven:
        parts.append(f"the same tokens in {found.proven} samples")
    if found.contradicted.count:
        parts.append(f"OTHER TOKENS in {found.contradicted.count} samples")
    if unproven:
        parts.append(f"no fingerprints to compare in {unproven} samples")
    return ", ".join(parts)


def _rows(found: Comparison) -> Iterator[str]:
    tokens = found.tokens
    yield _line("compared", f"{found.samples} samples, {tokens} tokens")
    yield _line("rows all the same", f"{found.same} of {found.samples} samples")
    if found.different.count:
        yield _line("  different", _samples(found.different))
    if found.lengths.count:
        yield _line("  other lengths", f"{found.lengths.count}: {_samples(found.lengths)}")
    yield _line(
        "kept entries", f"{found.entries_a / tokens:.2f} in A, {found.entries_b / tokens:.2f} in B"
    )
    yield _line("  same ids", f"{_percent(found.equal_sets, tokens)} of the tokens")
    yield _line("  same most probable", f"{_percent(found.equal_top, tokens)} of the tokens")
    yield _line("  mean Jaccard index", f"{found.jaccard / tokens:.4f}")
    yield _line(
        "  in both",
        f"{_percent(found.common, found.entries_a)} of A's entries, "
        f"{_percent(found.common, found.entries_b)} of B's",
    )
    yield _line("  A's mass not in B", f"mean {found.dropped / tokens:.3g}")
    yield from _largest(found.largest_dropped)
    yield _line(
        "log-probabilities", f"{_percent(found.equal_values, found.common)} of those in both equal"
    )
    yield from _largest(found.value_difference, "difference ")
    stored = "" if found.stored_tails else "; 1 - kept mass where none is stored"
    yield _line("tail mass", f"mean difference {found.tail_difference / tokens:.3g}{stored}")
    yield from _largest(found.largest_tail_difference, "difference ")
    quantile = found.divergences.quantile
    yield _line(
        "KL(A || B), nats",
        f"mean {found.divergence / tokens:.3g}, p50 {quantile(0.5):.3g}, p99 {quantile(0.99):.3g}",
    )
    yield from _largest(found.largest_divergence)
    if found.dropped:
        yield _line("", "at least; of ids that B did not keep only bounds are known")


def _largest(extreme: Extreme, what: str = "") -> Iterator[str]:
    if extreme.sample is not None and extreme.value > 0:
        place = f"at sample {extreme.sample}, position {extreme.position}"
        yield _line("  largest", f"{what}{extreme.value:.3g} {place}")


def _percent(part: int, whole: int) -> str:
    if not whole:
        return "none"
    # What is not all of it must not look like it.
    share = part / whole
    return f"{share:.2%}" if share == 1 or share < 0.9999 else f"{math.floor(share * 1e6) / 1e4}%"


# ---- for a script --------------------------------------------------------------------------------


def as_json(findings: Findings, status: int) -> dict[str, Any]:
    """Return what JSON shows; the keys are documented in the tools' README."""
    identity, overlap, rows = findings.identity, findings.overlap, findings.rows
    found = rows.comparison

    def differences(each: Sequence[Difference]) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "a": one.ours, "b": one.theirs, "remark": one.remark} for one in each
        ]

    return {
        "a": findings.a.files.directory,
        "b": findings.b.files.directory,
        "status": status,
        "identity": {
            "fatal": differences(identity.fatal),
            "harmless": differences(identity.harmless),
            "settings": differences(identity.settings),
            "not_compared": identity.unknown,
        },
        "samples": {
            "both": overlap.both,
            "only_a": overlap.only_a,
            "only_b": overlap.only_b,
            "no_row_in_a": _list_json(rows.missing_a),
            "no_row_in_b": _list_json(rows.missing_b),
        },
        "labels": {
            "same": found.proven,
            "other": _list_json(found.contradicted),
            "first_positions": {str(k): v for k, v in sorted(found.contradicted_at.items())},
        },
        "rows": _rows_json(found) if found.samples else None,
        "problems": findings.problems,
    }


def _rows_json(found: Comparison) -> dict[str, Any]:
    tokens = found.tokens

    def mean(total: float, of: int = tokens) -> float | None:
        return total / of if of else None

    return {
        "samples": found.samples,
        "tokens": tokens,
        "same": found.same,
        "different": _list_json(found.different),
        "other_lengths": _list_json(found.lengths),
        "entries_a": mean(found.entries_a),
        "entries_b": mean(found.entries_b),
        "same_ids": mean(found.equal_sets),
        "same_top": mean(found.equal_top),
        "jaccard": mean(found.jaccard),
        "common_of_a": mean(found.common, found.entries_a),
        "common_of_b": mean(found.common, found.entries_b),
        "mass_of_a_not_in_b": {
            "mean": mean(found.dropped),
            "max": _extreme_json(found.largest_dropped),
        },
        "equal_logprobs": mean(found.equal_values, found.common),
        "logprob_difference": {"max": _extreme_json(found.value_difference)},
        "tail_mass_difference": {
            "mean": mean(found.tail_difference),
            "max": _extreme_json(found.largest_tail_difference),
        },
        "tails_are_stored": found.stored_tails,
        "kl": {
            "mean": mean(found.divergence),
            "p50": found.divergences.quantile(0.5),
            "p99": found.divergences.quantile(0.99),
            "max": _extreme_json(found.largest_divergence),
        },
    }


def _list_json(found: SampleList) -> dict[str, Any]:
    return {"count": found.count, "first": found.first}


def _extreme_json(extreme: Extreme) -> dict[str, Any]:
    return {"value": extreme.value, "sample": extreme.sample, "position": extreme.position}
