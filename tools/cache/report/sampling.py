# SPDX-License-Identifier: Apache-2.0
"""Which payloads of a cache, and which rows of them, are looked at, pure.

They are evenly spread, however many they are, and the same ones each time.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.cache.cache_files import ShardFile
from tools.cache.inventory import ShardSummary

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """One member of a shard."""

    shard: ShardFile
    member: int


def spread(total: int) -> Iterator[int]:
    """Yield 0 to ``total - 1``, each once, such that those up to any point are evenly spread.

    Multiples of the golden section leave gaps of three sizes at most, wherever they are stopped,
    and favour no DP rank, as halving again and again would.
    """
    step = max(1, round(total * _GOLDEN))
    while math.gcd(step, total) > 1:
        step += 1
    for number in range(total):
        yield number * step % total


def spread_payloads(shards: Sequence[ShardSummary]) -> Iterator[Payload]:
    """Yield all payloads of *shards*, such that those up to any point are evenly spread."""
    ordered = sorted(shards, key=lambda one: (one.file.name.start, one.file.name.dp_rank))
    ends = list(itertools.accumulate(shard.members for shard in ordered))
    for number in spread(ends[-1] if ends else 0):
        place = bisect.bisect_right(ends, number)
        shard = ordered[place]
        yield Payload(shard=shard.file, member=number - ends[place] + shard.members)


def spread_rows(rows: int, wanted: int) -> list[int]:
    """Return *wanted* of *rows* rows, ascending and evenly spread; all of them if they are fewer.

    Each is in the middle of its part.
    """
    if wanted >= rows:
        return list(range(rows))
    return [(2 * part + 1) * rows // (2 * wanted) for part in range(wanted)]
