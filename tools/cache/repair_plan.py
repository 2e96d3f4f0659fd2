# SPDX-License-Identifier: Apache-2.0
"""Which files of a cache are set aside, and what is kept of them before, pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.training.distillation.publication import Extract, SetAside, Step, plan_disjoint
from megatron.training.distillation.utils import ShardName
from tools.cache.cache_files import ShardFile
from tools.cache.coverage import Span, subtract
from tools.cache.inventory import ShardSummary
from tools.cache.verification import Finding, Kind, Verification


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A file that is set aside.

    Attributes:
        name: Its base name.
        pieces: Shards that are made of it first, of payloads that nothing else holds.
        reason: Why, in words.
        damaged: The shard if it is one that cannot be opened, which is looked at once more.
        renamed: The name that it was written under, if it has another one and is whole: it gets
            that name back where no live shard has it.
    """

    name: str
    pieces: tuple[ShardName, ...] = ()
    reason: str
    damaged: ShardFile | None = None
    renamed: ShardName | None = None


def plan_repair(
    verification: Verification, renamed: Mapping[ShardFile, ShardName] | None = None
) -> list[Move]:
    """Return the moves after which every live shard opens, is of the dump, and overlaps none.

    Each can be followed by none of the others: what is made of a shard is there before that is set
    aside. Shards of format v1 stay, as only a new dump replaces them, and so does what the storage
    did not give.

    Args:
        verification: What is wrong.
        renamed: Shards that are whole under another name than their own, and that.
    """
    files = verification.inventory.files
    moves = [] if files.is_legacy else [*_of_shards(verification, renamed or {})]
    return moves + [
        Move(name=name, reason="a writer left it unfinished") for name in files.unfinished
    ]


def _of_shards(
    verification: Verification, renamed: Mapping[ShardFile, ShardName]
) -> Iterable[Move]:
    by_kind: dict[Kind, list[Finding]] = defaultdict(list)
    for finding in verification.findings:
        by_kind[finding.kind].append(finding)
    for kind in (Kind.DAMAGED, Kind.FOREIGN):
        for finding in by_kind[kind]:
            damaged = finding.file if kind is Kind.DAMAGED else None
            yield Move(
                name=finding.file.base_name,
                reason=finding.reason,
                damaged=damaged,
                renamed=renamed.get(finding.file),
            )
    reasons = {finding.file.name: finding.reason for finding in by_kind[Kind.PAYLOAD]}
    unreachable = {finding.file.name for finding in by_kind[Kind.UNREACHABLE]}
    by_rank: dict[int, list[ShardSummary]] = defaultdict(list)
    for shard in verification.inventory.sound:
        by_rank[shard.file.name.dp_rank].append(shard)
    for _, shards in sorted(by_rank.items()):
        # What the storage did not give may be the better copy.
        reached = [shard for shard in shards if not _overlaps(shard, unreachable)]
        yield from _of_rank(reached, reasons, verification)


def _overlaps(shard: ShardSummary, others: Iterable[ShardName]) -> bool:
    """Return whether another one of the same DP rank is of some of the same samples."""
    name = shard.file.name
    return any(
        name.dp_rank == other.dp_rank and name.start < other.end and other.start < name.end
        for other in others
        if other != name
    )


def _of_rank(
    shards: Sequence[ShardSummary], reasons: dict[ShardName, str], verification: Verification
) -> Iterable[Move]:
    """Yield the moves for the shards of one DP rank that can be opened."""
    names = [shard.file.name for shard in shards]
    split = {
        shard.file.name: reasons.get(shard.file.name, "it has a hole and overlaps another shard")
        for shard in shards
        if shard.file.name in reasons or (_has_hole(shard) and _overlaps(shard, names))
    }
    live = [shard.file.name for shard in shards if shard.file.name not in split]
    held = [span for s in shards if s.file.name not in split for span in s.spans]
    for shard in shards:
        name = shard.file.name
        if name not in split:
            continue
        lost = [fault.span for fault in verification.faults.get(shard.file.base_name, [])]
        good = subtract(subtract(shard.spans, lost), held)
        pieces = tuple(ShardName(name.dp_rank, start, end) for start, end in good)
        held += good
        live += pieces
        yield Move(name=shard.file.base_name, pieces=pieces, reason=split[name])
    yield from _in_moves(plan_disjoint(live))


def _has_hole(shard: ShardSummary) -> bool:
    return shard.spans != (Span(shard.file.name.start, shard.file.name.end),)


def _in_moves(steps: Iterable[Step]) -> Iterable[Move]:
    """Yield the moves that a plan of extractions and renames consists of."""
    pieces: list[ShardName] = []
    for step in steps:
        if isinstance(step, Extract):
            pieces.append(step.target)
        elif isinstance(step, SetAside):
            reason = "another live shard has the same samples"
            yield Move(name=str(step.shard), pieces=tuple(pieces), reason=reason)
            pieces = []
