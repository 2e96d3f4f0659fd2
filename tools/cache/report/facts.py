# SPDX-License-Identifier: Apache-2.0
"""What a cache is, as names and values for a table, pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.cache.inventory import Inventory
from tools.cache.report.survey import Survey
from tools.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much there is in the shards that can be read.

    Attributes:
        samples: Samples that are complete.
        share_samples: Samples that the shards hold, those of one DP rank of d counted as a d-th.
        sequence_length: Tokens per sample; None where nothing tells.
        size: Bytes of the shards.
    """

    samples: int
    share_samples: float
    sequence_length: int | None
    size: int

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes on disk per token."""
        if not self.sequence_length or not self.share_samples:
            return None
        return self.size / (self.share_samples * self.sequence_length)


def amounts(inventory: Inventory, survey: Survey) -> Amounts:
    """Return how much there is."""
    return Amounts(
        samples=inventory.coverage.samples,
        share_samples=sum(
            sum(end - start for start, end in shard.spans) / shard.meta.saver.dp_size_save
            for shard in inventory.sound
            if shard.meta is not None
        ),
        sequence_length=_sequence_length(inventory, survey),
        size=sum(shard.size for shard in inventory.sound),
    )


def _sequence_length(inventory: Inventory, survey: Survey) -> int | None:
    if survey.sequence_length is not None:
        return survey.sequence_length
    manifest = None if inventory.meta is None else inventory.meta.manifest
    return None if manifest is None else manifest.sequence_length


def vocab_size(inventory: Inventory) -> int | None:
    """Return the number of real ids; None where no shard says it."""
    manifest = None if inventory.meta is None else inventory.meta.manifest
    return None if manifest is None else manifest.vocab_size


def headline(inventory: Inventory, survey: Survey, found: Amounts) -> list[tuple[str, str]]:
    """Return the few numbers that matter most."""
    statistics = survey.statistics
    values = [("complete samples", _grouped(found.samples)), ("on disk", bytes_text(found.size))]
    if found.sequence_length:
        values.insert(1, ("tokens", _count_text(found.samples * found.sequence_length)))
    if found.bytes_per_token is not None:
        values.append(("bytes per token", f"{found.bytes_per_token:.1f}"))
    if statistics.tokens:
        values += [
            ("entries per token", f"{statistics.entries / statistics.tokens:.1f}"),
            ("kept mass", f"{statistics.kept / statistics.tokens:.2%}"),
            ("entropy, at least (nats)", f"{statistics.entropy / statistics.tokens:.2f}"),
        ]
    return values


def _count_text(count: int) -> str:
    for limit, unit in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return _grouped(count)


def run_facts(inventory: Inventory) -> list[tuple[str, str]]:
    """Return what the dump says of itself."""
    meta = inventory.meta
    if meta is None:
        return [("run", "not known: no shard can be read")]
    identifiers, manifest = meta.identifiers or {}, meta.manifest
    rows = [
        ("data", _blend(identifiers.get("blend"))),
        ("seed", str(identifiers.get("seed", "not recorded"))),
        ("samples of the run", _grouped(identifiers.get("train_samples"))),
        ("identity hash", meta.hash or "none"),
    ]
    if manifest is None:
        return [*rows, ("manifest", "none: teacher, tokenizer and versions were not recorded")]
    teacher, tokenizer = manifest.teacher or {}, manifest.tokenizer or {}
    return [
        *rows,
        (
            "teacher",
            f"{teacher.get('checkpoint', 'not recorded')}, "
            f"step {teacher.get('step', 'not recorded')}",
        ),
        (
            "tokenizer",
            f"{tokenizer.get('type', 'not recorded')}, fingerprint "
            f"{tokenizer.get('fingerprint', 'not recorded')}",
        ),
        (
            "vocabulary",
            f"{_grouped(manifest.vocab_size)} ids, padded to "
            f"{_grouped(manifest.padded_vocab_size)}",
        ),
        ("sampler", f"{manifest.dataloader_type}" + ", packed conversations" * bool(manifest.sft)),
        ("split", manifest.split or "not recorded"),
        (
            "versions",
            f"package {manifest.package_version or 'not recorded'}, "
            f"megatron-core {manifest.megatron_core_version or 'not recorded'}",
        ),
    ]


def format_facts(inventory: Inventory, survey: Survey) -> list[tuple[str, str]]:
    """Return in which form the entries are."""
    meta = inventory.meta
    if meta is None:
        return []
    saver = meta.saver
    k = saver.k if saver.k is not None else (survey.statistics.k or "not recorded")
    p = "none" if saver.p is None else f"{saver.p:g}, at least {saver.min_k} entries"
    if saver.format_version == 1:
        p = "not recorded"
    versions = Counter(s.meta.saver.format_version for s in inventory.sound if s.meta is not None)
    return [
        (
            "format",
            ", ".join(
                f"v{version} ({count} shards)" for version, count in sorted(versions.items())
            ),
        ),
        ("K", str(k)),
        ("P", p),
        ("values", saver.save_dtype or "not recorded"),
        (
            "teacher's batches",
            f"DP {saver.dp_size_save}, micro batch {saver.mbs_save}, global batch {saver.gbs_save}",
        ),
        ("tails", _tails(survey)),
    ]


def _tails(survey: Survey) -> str:
    found = survey.statistics
    if not found.tokens:
        return "not known"
    if not found.with_tail:
        return "not recorded: one less the kept mass stands for the tail on this page"
    defect = found.defect / found.with_tail
    text = f"recorded; with the kept mass they miss one by {defect:.1e} on average"
    if found.with_tail < found.tokens:
        text += f"; {1 - found.with_tail / found.tokens:.1%} of tokens have none"
    return text


def amount_facts(inventory: Inventory, found: Amounts) -> list[tuple[str, str]]:
    """Return how much there is."""
    length = found.sequence_length
    tokens = "not known" if length is None else _grouped(found.samples * length)
    per_token = found.bytes_per_token
    coverage = inventory.coverage
    return [
        ("complete samples", _grouped(found.samples)),
        ("tokens of them", f"{tokens} ({_grouped(length)} per sample)" if length else tokens),
        ("bytes", f"{_grouped(found.size)} ({bytes_text(found.size)})"),
        ("bytes per token", "not known" if per_token is None else f"{per_token:.2f}"),
        ("shards", f"{len(inventory.shards)}, of {len(coverage.by_rank)} DP ranks"),
        ("damaged shards", str(len(inventory.damaged))),
        ("shards of another dump", str(len(inventory.foreign))),
        ("overlaps", str(len(inventory.overlaps))),
        ("gaps", str(len(coverage.gaps))),
        (
            "other files",
            f"{len(inventory.files.stale)} set aside, {len(inventory.files.unfinished)} "
            f"unfinished, {len(inventory.files.foreign)} foreign",
        ),
    ]


def _grouped(number: Any) -> str:
    return f"{number:,}".replace(",", "\u202f") if isinstance(number, int) else "not recorded"


def _blend(blend: Any) -> str:
    """Return a blend as its parts with their weights."""
    if not isinstance(blend, Mapping):
        return "not recorded"
    pairs = blend.get("blend") if blend.get("kind") == "blend" else blend.get("train")
    try:
        return ", ".join(f"{name} ({weight:g})" for weight, name in pairs or [])[
            :600
        ] or json.dumps(blend)
    except (TypeError, ValueError):
        return json.dumps(blend)[:600]
