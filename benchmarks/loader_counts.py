# SPDX-License-Identifier: Apache-2.0
"""Counters for ``bench_loader``: bytes decompressed, read, and handed to a device."""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
import zstandard
from torch.overrides import TorchFunctionMode

from benchmarks.rank_usage import bytes_read_by


class DecodedBytes:
    """Adds up bytes here and in forked processes."""

    def __init__(self) -> None:
        self._total = multiprocessing.get_context("fork").Value("q")
        self.frames: list[Any] | None = None
        """What is decoded in this process, while it is a list."""

    def take(self) -> int:
        """Return the bytes since the last call."""
        with self._total.get_lock():
            found, self._total.value = self._total.value, 0
        return int(found)

    def count(self, size: int) -> None:
        """Add what has been decoded."""
        with self._total.get_lock():
            self._total.value += size


class FrameDecoding(DecodedBytes):
    """Counts what the frames of format 3 are decoded to: values and ids.

    Args:
        decoder: The class that decodes frames.
    """

    def __init__(self, decoder: type[Any]) -> None:
        super().__init__()
        self._original = decoder.decode

        def decode(decoder: Any, numbers: Any, contents: Any) -> Any:
            if self.frames is not None:
                self.frames.append((decoder, numbers, contents))
            found = self._original(decoder, numbers, contents)
            self.count(found.bits.nbytes + found.ids.nbytes)
            return found

        decoder.decode = decode

    def decode_again(self, frames: list[Any]) -> None:
        """Decode *frames* and do nothing else."""
        for frame in frames:
            self._original(*frame)


class Decompression(DecodedBytes):
    """Counts what comes out of ``zstandard.ZstdDecompressor``."""

    def __init__(self) -> None:
        super().__init__()
        self._original = zstandard.ZstdDecompressor
        setattr(zstandard, "ZstdDecompressor", self._counted_decompressor)  # noqa: B010

    def decode_again(self, frames: list[Any]) -> None:
        """Decompress *frames* and do nothing else."""
        for frame in frames:
            self._original().decompress(frame)

    def _counted_decompressor(self, *args: Any, **kwargs: Any) -> "_Counted":
        return _Counted(self._original(*args, **kwargs), self)


class _Counted:
    """A decompressor, or a stream made by one, whose results are counted."""

    def __init__(self, inner: Any, counts: Decompression) -> None:
        self._inner = inner
        self._counts = counts

    def __enter__(self) -> "_Counted":
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._inner.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            if name in ("decompressobj", "stream_reader"):
                return _Counted(result, self._counts)
            if name == "decompress" and self._counts.frames is not None:
                self._counts.frames.append(bytes(args[0]))
            if isinstance(result, bytes):
                self._counts.count(len(result))
            elif name == "readinto":
                self._counts.count(result)
            return result

        return call


class LoaderProcesses:
    """The forked processes that iterate over a class of datasets.

    A process reads up to 0.5 MB before that, mostly sources, as torch formats stacks there.

    Args:
        dataset: The class, whose ``__iter__`` is replaced.
    """

    def __init__(self, dataset: type[Any]) -> None:
        self.limit: int | None = None
        """Items after which a process that is started now reads no more; None for all of them."""
        context = multiprocessing.get_context("fork")
        self._read, self._takes = context.Value("q"), context.Value("q")
        self._takes_at_fork = 0
        self._parent = os.getpid()
        original = dataset.__iter__

        def begin(items: Any) -> Iterator[Any]:
            if os.getpid() == self._parent:
                return iter(original(items))
            self._add(bytes_read_by(os.getpid()))
            return itertools.islice(original(items), self.limit)

        dataset.__iter__ = begin

    def take_read_at_start(self) -> int:
        """Return what they had read when they began to iterate, since the last call.

        Processes that were started before that call, and begin after it, do not count.
        """
        with self._read.get_lock():
            found, self._read.value = self._read.value, 0
            self._takes.value += 1
        self._takes_at_fork += 1
        return int(found)

    def _add(self, size: int) -> None:
        with self._read.get_lock():
            if self._takes.value == self._takes_at_fork:
                self._read.value += size


class DeviceCopies(TorchFunctionMode):
    """Adds up the bytes of the tensors that are handed to a device while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run *func*; see the class."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            given = (*args[1:], *kwargs.values())
            if any(isinstance(value, torch.device | str) for value in given):
                self.bytes += args[0].nbytes
        return func(*args, **kwargs)
