# SPDX-License-Identifier: Apache-2.0
"""The dumps and the students of ``bench_loader``, and what a student needs of a dump."""

import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GBS = 24


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A dump: the teacher's sizes; *quarter* for samples of a quarter of the length."""

    dp: int = 1
    cp: int = 1
    gbs: int = GBS
    iterations: int
    per_shard: int
    quarter: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A student: what it reads and in which layout."""

    title: str
    cache: str
    dp: int = 1
    gbs: int = GBS
    tp: int = 1
    cp: int = 1


def dumps(iterations: int) -> dict[str, Cache]:
    """Return the dumps by name."""
    fewer = iterations // 2
    return {
        "dp1": Cache(iterations=iterations, per_shard=4),
        "dp6": Cache(dp=6, iterations=fewer, per_shard=2),
        "dp2": Cache(dp=2, iterations=fewer, per_shard=2),
        "cp2": Cache(cp=2, iterations=iterations, per_shard=4),
        "one": Cache(gbs=2, iterations=128, per_shard=128, quarter=True),
    }


SAME = Case(title="same layout", cache="dp1")
DATASETS = (
    SAME,
    Case(title="DP 6 -> 4", cache="dp6", dp=4),
    Case(title="DP 2 -> 8", cache="dp2", dp=8),
    Case(title="GBS x 4", cache="dp1", gbs=4 * GBS),
    Case(title="GBS / 4", cache="dp1", gbs=GBS // 4),
)
RESUME = Case(title="resume in mid-shard", cache="one", gbs=2)
REPLICAS = (
    Case(title="TP 2", cache="dp1", tp=2),
    Case(title="CP 1 -> 2", cache="dp1", cp=2),
    Case(title="CP 2 -> 2", cache="cp2", cp=2),
)


@dataclass(frozen=True)
class Caches:
    """The caches of all implementations.

    Attributes:
        scratch: Directory of all of them.
        seq_length: Tokens per sample, where a cache has no shorter ones.
        of: The dumps by name.
    """

    scratch: Path
    seq_length: int
    of: Mapping[str, Cache]

    def folder(self, cache: str, implementation: str) -> str:
        """Return where an implementation has a cache."""
        return str(self.scratch / implementation / cache)

    def iterations(self, case: Case) -> int:
        """Return the iterations that a cache has for a student."""
        cache = self.of[case.cache]
        return cache.iterations * cache.gbs // case.gbs

    def tokens(self, case: Case) -> int:
        """Return the tokens of all that a cache has for one DP rank of a student."""
        return self.iterations(case) * case.gbs // case.dp * self.length(case.cache)

    def length(self, cache: str) -> int:
        """Return the tokens of a sample of a cache."""
        return self.seq_length // 4 if self.of[cache].quarter else self.seq_length

    def shard_bytes(self, cache: str, implementation: str) -> int:
        """Return the size of the only shard of a cache."""
        (shard,) = Path(self.folder(cache, implementation)).glob("*.tar")
        return shard.stat().st_size

    def needed_bytes(self, case: Case, implementation: str) -> int:
        """Return the compressed bytes of the members with rows for DP rank 0 of the student."""
        cache = self.of[case.cache]
        sizes = member_sizes(Path(self.folder(case.cache, implementation)))
        samples = range(0, self.iterations(case) * case.gbs, case.dp)
        needed = {(sample // cache.gbs, sample % cache.gbs % cache.dp) for sample in samples}
        return sum(sizes[dp_rank][iteration] for iteration, dp_rank in needed)


def member_sizes(folder: Path) -> dict[int, list[int]]:
    """Return by DP rank of the teacher the bytes of its iterations, of all its CP ranks."""
    sizes: dict[int, dict[int, int]] = {}
    shards: dict[tuple[str, int], list[tuple[list[int], Path]]] = {}
    for path in folder.glob("*.tar"):
        numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
        writer = re.fullmatch(r"(.*)dp(\d+)__.*", path.stem)
        assert writer is not None, path
        shards.setdefault((writer[1], int(writer[2])), []).append((numbers, path))
    for (_, dp_rank), found in shards.items():
        of_rank = sizes.setdefault(dp_rank, {})
        iteration = 0
        for _, path in sorted(found):
            with tarfile.open(path) as tar:
                for member in tar.getmembers()[1:]:
                    of_rank[iteration] = of_rank.get(iteration, 0) + member.size
                    iteration += 1
    return {dp_rank: list(of_rank.values()) for dp_rank, of_rank in sizes.items()}
