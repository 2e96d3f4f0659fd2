# SPDX-License-Identifier: Apache-2.0
"""Ids renumbered so that frequent ones are small numbers, which take fewer bits. Pure.

Frequent ids are ranked by class, the class being the logarithm of how often they occur, and by id
within it. Then most ids of the list follow a smaller one closely, and the list costs little.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation.entropy_coder import ColumnDecoder, differences, encode_column
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_layout import MAX_RANKED_IDS

_LEAST_COUNT = 8
_CLASSES_PER_DOUBLING = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IdRanks:
    """Rank ``r`` below their number is id ``frequent[r]``; any other is id ``r - len(frequent)``.

    Attributes:
        frequent: ``(R,)`` uint32, distinct.
    """

    frequent: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, kept: np.ndarray | None, vocab_size: int) -> "IdRanks":
        """Rank the ids of a payload.

        Args:
            ids: Integers from 0 on; what is not kept may be anything.
            kept: Bool of the same shape; None keeps all.
            vocab_size: One more than the largest id.
        """
        if vocab_size > MAX_RANKED_IDS:  # counting would take more than it gives
            return cls(frequent=np.empty(0, np.uint32))
        counts = np.bincount(ids.ravel() if kept is None else ids[kept], minlength=vocab_size)
        frequent = np.flatnonzero(counts >= _LEAST_COUNT)
        classes = np.floor(_CLASSES_PER_DOUBLING * np.log2(counts[frequent]))
        order = np.argsort(-classes, kind="stable")
        return cls(frequent=frequent[order].astype(np.uint32))

    def ranks(self, ids: np.ndarray, vocab_size: int) -> np.ndarray:
        """Return the uint32 rank of each of *ids*, which are below *vocab_size*."""
        count = np.uint32(len(self.frequent))
        ids = ids.astype(np.uint32)
        if not count:
            return ids
        table = np.arange(count, count + np.uint32(vocab_size), dtype=np.uint32)
        table[self.frequent] = np.arange(count, dtype=np.uint32)
        return _gather(table, ids)

    def lookup(self, id_bits: int) -> "IdLookup":
        """Return what turns ranks into ids of at most *id_bits* bits."""
        return IdLookup(self.frequent, id_bits)

    def encode(self) -> tuple[bytes, bytes]:
        """Return the table and the page of the list."""
        table, (page,) = encode_column(differences(self.frequent), [len(self.frequent)])
        return table, page

    @classmethod
    def decode(cls, coder: bytes, table: bytes, page: bytes, count: int, id_bits: int) -> "IdRanks":
        """Return what :meth:`encode` encoded: *count* ids of *id_bits* bits.

        Raises:
            CacheFormatError: It is damaged.
        """
        steps = np.empty(count, np.uint32)
        end = ColumnDecoder(coder, table, steps.itemsize).read(page, 0, steps)
        frequent = np.cumsum(steps, dtype=np.uint32)
        if end != len(page) or (count and int(frequent.max()) >> id_bits):
            raise CacheFormatError("its list of frequent ids is damaged")
        return cls(frequent=frequent)


class IdLookup:
    """Turns ranks into ids.

    Args:
        frequent: See :class:`IdRanks`.
        id_bits: Bits of the largest id.
    """

    def __init__(self, frequent: np.ndarray, id_bits: int) -> None:
        self._limit = len(frequent) + (1 << id_bits)
        self._ids: np.ndarray | None = None
        if len(frequent):
            self._ids = np.concatenate([frequent, np.arange(1 << id_bits, dtype=np.uint32)])

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """Return the uint32 ids of uint32 *ranks*.

        Raises:
            CacheFormatError: One stands for no id.
        """
        if int(ranks.max(initial=0)) >= self._limit:
            raise CacheFormatError(
                f"it has an id of rank {ranks.max()}, expected less than {self._limit}"
            )
        if self._ids is None:
            return ranks
        return _gather(self._ids, ranks)


def _gather(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the uint32 entries of *table* at uint32 *places*, which are below 2^31."""
    # torch gathers with 32-bit positions; numpy would make them 64 bits wide.
    wanted = torch.from_numpy(places.view(np.int32).ravel())
    found: np.ndarray = torch.from_numpy(table.view(np.int32)).index_select(0, wanted).numpy()
    return found.view(np.uint32).reshape(places.shape)
