# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a cache, from what its shards say and what came of their payloads, pure."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron.training.distillation.utils import ShardName
from tools.cache.cache_files import ShardFile
from tools.cache.coverage import RankSpans, Span, cover, intersect, merge, subtract
from tools.cache.inventory import Inventory
from tools.cache.payload_verification import Fault, Verified


class Kind(StrEnum):
    """What is wrong with a shard."""

    DAMAGED = "damaged"
    """It cannot be opened."""
    PAYLOAD = "damaged payloads"
    """It can, and some of its payloads are damaged."""
    FOREIGN = "of another dump"
    OVERLAP = "overlapping"
    UNREACHABLE = "not reachable"
    """The storage did not give it; nothing is known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is wrong with a shard.

    Attributes:
        file: The shard.
        kind: What it is.
        reason: In words.
        spans: The samples that are lost by it; of a payload, those of its iteration.
    """

    file: ShardFile
    kind: Kind
    reason: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Iterations of which a DP rank has no sound payload.

    Attributes:
        first: The first one, counted from 0: that many were trained on before it.
        end: The one after the last.
        samples: Their samples.
        dp_ranks: The ranks that lack some of it.
    """

    first: int
    end: int
    samples: Span
    dp_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What is wrong with a cache.

    Attributes:
        inventory: What its shards say.
        verified: What came of payloads; those that nobody looked at count as sound.
        wanted: Samples that there must be; None for those from the first shard's to the last's.
    """

    inventory: Inventory
    verified: Sequence[Verified] = ()
    wanted: Span | None = None

    @cached_property
    def findings(self) -> list[Finding]:
        """Everything that is wrong with shards, in their order."""
        found = [*self._of_structure(), *self._of_payloads()]
        place = {shard: number for number, shard in enumerate(self.inventory.files.shards)}
        return sorted(found, key=lambda finding: place[finding.file])

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong and nothing is missing."""
        return not self.findings and not self.missing

    @cached_property
    def faults(self) -> dict[str, list[Fault]]:
        """The damaged payloads of each shard, by its base name."""
        faults: dict[str, list[Fault]] = defaultdict(list)
        usual = self.sequence_length
        for one in self.verified:
            faults[one.name] += one.faults
            for length, spans in one.lengths:
                if length != usual:
                    reason = f"it has {length} positions, most payloads of the cache have {usual}"
                    faults[one.name] += [Fault(span, reason) for span in spans]
        return {name: sorted(found) for name, found in faults.items() if found}

    @cached_property
    def sequence_length(self) -> int | None:
        """The length that most samples have; None if no payload was verified."""
        samples: Counter[int] = Counter()
        for one in self.verified:
            for length, spans in one.lengths:
                samples[length] += sum(end - start for start, end in spans)
        return samples.most_common(1)[0][0] if samples else None

    @cached_property
    def expected(self) -> Span | None:
        """The samples that there must be: those asked for, else from the first to the last.

        What was set aside has been recorded once, so that its samples count among these.
        """
        if self.wanted is not None:
            return self.wanted
        names = [shard.name for shard in self.inventory.files.shards]
        names += filter(None, map(_once_named, self.inventory.files.stale))
        start, end = min(name.start for name in names), max(name.end for name in names)
        train_samples = self.train_samples
        if train_samples is not None:
            end = min(end, train_samples)
        return Span(start, end) if start < end else None

    @property
    def train_samples(self) -> int | None:
        """Samples of the whole dump, if the cache says."""
        meta = self.inventory.meta
        found = (meta.identifiers or {}).get("train_samples") if meta is not None else None
        return found if type(found) is int else None

    @cached_property
    def missing(self) -> list[Missing]:
        """The iterations that have to be dumped again; those not reachable are not among them."""
        meta = self.inventory.meta
        if meta is None or self.expected is None:
            return []
        gbs, dp_size = meta.saver.gbs_save, meta.saver.dp_size_save
        by_rank = {rank: self._sound_spans(rank) for rank in range(dp_size)}
        lost = subtract([self.expected], intersect(list(by_rank.values())))
        iterations = merge((start // gbs, -(-end // gbs)) for start, end in lost)
        return [
            Missing(
                first=first,
                end=end,
                samples=(samples := Span(first * gbs, end * gbs)),
                dp_ranks=tuple(r for r, spans in by_rank.items() if subtract([samples], spans)),
            )
            for first, end in iterations
        ]

    def _sound_spans(self, dp_rank: int) -> tuple[Span, ...]:
        return self._spans_by_rank.get(dp_rank, ())

    @cached_property
    def _spans_by_rank(self) -> dict[int, tuple[Span, ...]]:
        """Samples of which each DP rank's share is there and, as far as is known, sound."""
        meta = self.inventory.meta
        assert meta is not None
        shares = []
        for shard in self.inventory.shards:
            if shard.file in self.inventory.foreign or (shard.problem and not shard.unreachable):
                continue
            name = shard.file.name
            spans = (Span(name.start, name.end),) if shard.unreachable else shard.spans
            lost = [fault.span for fault in self.faults.get(shard.file.base_name, [])]
            shares.append(
                RankSpans(
                    dp_rank=name.dp_rank,
                    dp_size=meta.saver.dp_size_save,
                    spans=subtract(spans, lost) if lost else spans,
                )
            )
        return cover(shares).by_rank

    def _of_structure(self) -> Iterable[Finding]:
        for shard in self.inventory.damaged:
            name = shard.file.name
            yield Finding(
                file=shard.file,
                kind=Kind.UNREACHABLE if shard.unreachable else Kind.DAMAGED,
                reason=str(shard.problem),
                spans=(Span(name.start, name.end),),
            )
        for file, differences in self.inventory.foreign.items():
            reason = f"{file.path} is of another dump than most: {'; '.join(map(str, differences))}"
            reason = reason.replace("here it is", "there it is")
            span = Span(file.name.start, file.name.end)
            yield Finding(file=file, kind=Kind.FOREIGN, reason=reason, spans=(span,))
        for first, second in self.inventory.overlaps:
            shared = Span(second.name.start, min(first.name.end, second.name.end))
            reason = f"{second.path} and {first.base_name} both have samples {shared}"
            yield Finding(file=second, kind=Kind.OVERLAP, reason=reason, spans=())

    def _of_payloads(self) -> Iterable[Finding]:
        files = {shard.base_name: shard for shard in self.inventory.files.shards}
        for name, faults in self.faults.items():
            spans = merge(fault.span for fault in faults)
            more = f" (and {len(faults) - 1} more payloads)" if len(faults) > 1 else ""
            reason = faults[0].reason + more
            yield Finding(file=files[name], kind=Kind.PAYLOAD, reason=reason, spans=spans)
        unreachable = {one.name: one.unreachable for one in self.verified if one.unreachable}
        for name, reason in unreachable.items():
            yield Finding(file=files[name], kind=Kind.UNREACHABLE, reason=reason, spans=())


def _once_named(stale: str) -> ShardName | None:
    """Return the name that a shard had before it was set aside; see ``storage.set_aside``."""
    return ShardName.parse(re.sub(r"(\.\d+)?\.tar\.stale$", ".tar", stale))


def in_words(spans: Iterable[Span], most: int = 4) -> str:
    """Return samples in words, the first few ranges of them."""
    listed = list(spans)
    text = ", ".join(map(str, itertools.islice(listed, most)))
    return text + (f" and {len(listed) - most} more ranges" if len(listed) > most else "")
