# SPDX-License-Identifier: Apache-2.0
"""The dumps and the students of ``bench_loader``, and what a student needs of a dump."""

import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

GBS = 24
LONG = 128
"""Members per shard of a dump that is resumed from."""


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
    """A student: what it reads and in which layout.

    Attributes:
        title: What differs from the teacher's layout.
        cache: Name of the dump.
        long: Name of a dump in the same layout, with long shards of small iterations.
        long_gbs: The student's batch size on that one.
    """

    title: str
    cache: str
    dp: int = 1
    gbs: int = GBS
    tp: int = 1
    cp: int = 1
    long: str = "long"
    long_gbs: int = 4

    @property
    def ranks(self) -> int:
        """Size of the tensor x context parallel replica."""
        return self.tp * self.cp

    def resumed(self) -> "Case":
        """Return the same student on long shards."""
        return replace(self, cache=self.long, gbs=self.long_gbs)


def dumps(iterations: int) -> dict[str, Cache]:
    """Return the dumps by name, those that are read from end to end of *iterations* batches."""

    def whole(*, dp: int = 1, cp: int = 1, gbs: int = GBS) -> Cache:
        count = iterations * GBS // gbs
        return Cache(dp=dp, cp=cp, gbs=gbs, iterations=count, per_shard=count // 2)

    def long(*, dp: int = 1, cp: int = 1, gbs: int = 4) -> Cache:
        return Cache(dp=dp, cp=cp, gbs=gbs, iterations=LONG, per_shard=LONG, quarter=True)

    return {
        "dp1": whole(),
        "dp6": whole(dp=6),
        "dp2": whole(dp=2),
        "cp2": whole(cp=2),
        "gbs6": whole(gbs=GBS // 4),
        "long": long(),
        "long dp6": long(dp=6, gbs=12),
        "long dp2": long(dp=2, gbs=8),
        "long cp2": long(cp=2),
    }


SAME = Case(title="same layout", cache="dp1")
CASES = (
    SAME,
    Case(title="DP 6 -> 4", cache="dp6", dp=4, long="long dp6", long_gbs=12),
    Case(title="DP 2 -> 8", cache="dp2", dp=8, long="long dp2", long_gbs=8),
    Case(title="GBS x 4", cache="gbs6", long_gbs=16),
    Case(title="GBS / 4", cache="dp1", gbs=GBS // 4, long_gbs=1),
    Case(title="TP 2", cache="dp1", tp=2),
    Case(title="CP 1 -> 2", cache="dp1", cp=2),
    Case(title="CP 2 -> 2", cache="cp2", cp=2, long="long cp2"),
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

    def iteration_tokens(self, case: Case) -> int:
        """Return the tokens of an iteration of one DP rank of a student."""
        return case.gbs // case.dp * self.length(case.cache)

    def tokens(self, case: Case) -> int:
        """Return the tokens of all that a cache has for one DP rank of a student."""
        return self.iterations(case) * self.iteration_tokens(case)

    def length(self, cache: str) -> int:
        """Return the tokens of a sample of a cache."""
        return self.seq_length // 4 if self.of[cache].quarter else self.seq_length

    def stored_samples(self, case: Case) -> float:
        """Return the samples per iteration in the members with rows for DP rank 0."""
        cache = self.of[case.cache]
        members = self._needed_members(case, range(self.iterations(case)))
        return len(members) * cache.gbs / cache.dp / self.iterations(case)

    def needed_bytes(self, case: Case, implementation: str, iterations: range | None = None) -> int:
        """Return the compressed bytes of the members with rows for DP rank 0 of the student.

        Args:
            case: The student.
            implementation: Whose cache.
            iterations: Of the student; all of the cache by default.
        """
        sizes = member_sizes(Path(self.folder(case.cache, implementation)))
        needed = self._needed_members(case, iterations or range(self.iterations(case)))
        return sum(sizes[dp_rank][iteration] for iteration, dp_rank in needed)

    def needed_shards(self, case: Case, implementation: str, iteration: int) -> list[int]:
        """Return the sizes of the shards with rows of an iteration for DP rank 0 of the student.

        By DP rank of the teacher, of a cache in which each has only one; what its CP ranks wrote is
        one shard here.
        """
        sizes = dict.fromkeys((rank for _, rank in self._needed_members(case, [iteration])), 0)
        for (_, dp_rank), (path,) in shard_paths(
            Path(self.folder(case.cache, implementation))
        ).items():
            if dp_rank in sizes:
                sizes[dp_rank] += path.stat().st_size
        return list(sizes.values())

    def _needed_members(self, case: Case, iterations: Iterable[int]) -> set[tuple[int, int]]:
        """Return iteration and DP rank of the teacher of the members with rows for DP rank 0."""
        cache = self.of[case.cache]
        return {
            (sample // cache.gbs, sample % cache.gbs % cache.dp)
            for iteration in iterations
            for sample in range(iteration * case.gbs, (iteration + 1) * case.gbs, case.dp)
        }


def shard_paths(folder: Path) -> dict[tuple[str, int], list[Path]]:
    """Return the shards in order, by what is before the teacher's DP rank in the name, and that."""
    shards: dict[tuple[str, int], list[tuple[list[int], Path]]] = {}
    for path in folder.glob("*.tar"):
        numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
        writer = re.fullmatch(r"(.*)dp(\d+)__.*", path.stem)
        assert writer is not None, path
        shards.setdefault((writer[1], int(writer[2])), []).append((numbers, path))
    return {writer: [path for _, path in sorted(found)] for writer, found in shards.items()}


def member_sizes(folder: Path) -> dict[int, list[int]]:
    """Return by DP rank of the teacher the bytes of its iterations, of all its CP ranks."""
    sizes: dict[int, dict[int, int]] = {}
    for (_, dp_rank), paths in shard_paths(folder).items():
        of_rank = sizes.setdefault(dp_rank, {})
        iteration = 0
        for path in paths:
            with tarfile.open(path) as tar:
                for member in tar.getmembers()[1:]:
                    of_rank[iteration] = of_rank.get(iteration, 0) + member.size
                    iteration += 1
    return {dp_rank: list(of_rank.values()) for dp_rank, of_rank in sizes.items()}
