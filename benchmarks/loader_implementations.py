# SPDX-License-Identifier: Apache-2.0
"""What ``bench_loader`` has to know of the inside of either implementation, and nothing else."""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.implementation_worker import PACKAGE
from benchmarks.loader_counts import LoaderProcesses

Deliver = Callable[..., torch.Tensor]


class Installed:
    """What is particular to the package inside megatron-core.

    Args:
        args: The defaults of Megatron's flags.
    """

    writes_context_ranks = True
    """A dump has shards per context parallel rank, which only the same rank of a student reads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._losses = importlib.import_module(PACKAGE + ".cached_logits_loss")
        self.processes = LoaderProcesses(self._losses.TeacherTarDataset)
        """The processes that loss objects start."""
        self._options = {
            "decode_threads": args.logits_load_decode_threads,
            "prefetch_factor": args.logits_load_prefetch_factor,
        }

    def dataset(
        self, folder: str, cp_rank: int, cp_size: int, dp_rank: int, dp_size: int, start: int
    ) -> Iterator[Any]:
        """Return the iterations of one rank; the last two parts of an item are the targets."""
        return iter(
            self._losses.TeacherTarDataset(folder, cp_rank, dp_rank, dp_size, start_iteration=start)
        )

    def loss(self, folder: str, deliver: Deliver) -> Any:
        """Return a loss object that calls *deliver* ``(logits, values, indices)`` for its math."""
        vars(self._losses)["topk_kl_div"] = deliver
        return self._losses.CachedLogitsKDLoss(folder, **self._options)

    def call(self, loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Compute the loss of the next microbatch."""
        loss(logits)

    def waits(self) -> list[float]:
        """Return the seconds that the loss object says it waited, by iteration; then forget."""
        return []


class Ours:
    """What is particular to this package; members as :class:`Installed`."""

    writes_context_ranks = False

    def __init__(self, args: argparse.Namespace) -> None:
        self._losses = importlib.import_module(PACKAGE + ".cached_logits_loss")
        self._options = {"decode_threads": args.logits_load_decode_threads}
        self._loss = importlib.import_module(PACKAGE + ".cached_kd_loss")
        stream = importlib.import_module(PACKAGE + ".target_stream")
        self.processes = LoaderProcesses(stream._IterationDataset)
        self.frame_decoder = importlib.import_module(PACKAGE + ".frame_codec").FrameDecoder
        """The class that decodes frames of format 3."""
        self._waits: list[float] = []
        feed = importlib.import_module(PACKAGE + ".target_feed").TargetFeed
        open_iteration = feed.open

        @functools.wraps(open_iteration)
        def recording(feed: Any, *args: Any) -> Any:
            opened = open_iteration(feed, *args)
            self._waits.append(feed.wait)
            return opened

        feed.open = recording

    def dataset(
        self, folder: str, cp_rank: int, cp_size: int, dp_rank: int, dp_size: int, start: int
    ) -> Iterator[Any]:
        """See :class:`Installed`."""
        return iter(
            self._losses.make_teacher_tar_dataset(
                folder, cp_rank, cp_size, dp_rank, dp_size, start_iteration=start
            )
        )

    def loss(self, folder: str, deliver: Deliver) -> Any:
        """See :class:`Installed`."""
        vars(self._loss)["sparse_kl"] = deliver
        return self._losses.CachedLogitsKDLoss(folder, **self._options)

    def call(self, loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """See :class:`Installed`."""
        loss(logits, labels=labels)

    def waits(self) -> list[float]:
        """See :class:`Installed`."""
        found, self._waits = self._waits, []
        return found
