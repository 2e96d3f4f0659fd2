# SPDX-License-Identifier: Apache-2.0
"""Watches that the shards a student opens come from one dump, and says once what is unusual."""

import logging
from collections.abc import Iterable

from megatron.training.distillation.errors import MixedCacheError
from megatron.training.distillation.manifest import Difference, ExpectedRun
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.shard_meta import ShardMeta, compare_neighbours

logger = logging.getLogger(__name__)


class ShardCompany:
    """The shards of one cache that have been opened so far; the first one sets the tone.

    Args:
        run: The run that reads them; None lets any shard in and says nothing.
    """

    def __init__(self, run: ExpectedRun | None) -> None:
        self._run = run
        self._first: tuple[str, ShardMeta] | None = None
        self._reported: set[str] = set()

    @property
    def wants_neighbour(self) -> bool:
        """Whether the first shard that comes next should be compared with one more at once.

        Alone it could be the foreign one.
        """
        return self._first is None and self._run is not None and self._run.enforced

    def dissolve(self) -> None:
        """Forget the shards, which may have been replaced; what was said stays said."""
        self._first = None

    def admit(self, shard: OpenShard) -> None:
        """Compare a shard whose own identity has been checked with the first one.

        Raises:
            MixedCacheError: Another dump wrote it; names each field with both values.
        """
        if self._run is None:
            return
        self._report(shard.path, map(str, shard.differences), "this run")
        if self._first is None:
            self._first = shard.path, shard.meta
            return
        path, meta = self._first
        found = compare_neighbours(shard.meta, meta)
        if found.fatal and self._run.enforced:
            raise MixedCacheError(
                f"Teacher shard {shard.path} belongs to another dump than {path}: "
                f"{'; '.join(map(_beside, found.fatal))}. Rename the shards of the other dump to "
                ".stale, or dump these samples again (--logits-load-ignore-hash skips this check)."
            )
        self._report(shard.path, map(_beside, [*found.fatal, *found.harmless]), path)

    def _report(self, path: str, texts: Iterable[str], other: str) -> None:
        assert self._run is not None
        new = [text for text in dict.fromkeys(texts) if text not in self._reported]
        self._reported.update(new)
        if new and self._run.reports:
            logger.warning("Teacher shard %s differs from %s: %s.", path, other, "; ".join(new))


def _beside(difference: Difference) -> str:
    return str(difference).replace("here it is", "there it is")
