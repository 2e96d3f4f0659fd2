# SPDX-License-Identifier: Apache-2.0
"""Counters for ``bench_loader``: decompressed bytes, and bytes handed to a device."""

import multiprocessing
from typing import Any

import torch
import zstandard
from torch.overrides import TorchFunctionMode


class Decompression:
    """Counts what comes out of ``zstandard.ZstdDecompressor`` here and in forked processes."""

    def __init__(self) -> None:
        self._total = multiprocessing.get_context("fork").Value("q")
        self._original = zstandard.ZstdDecompressor
        self.frames: list[bytes] | None = None
        """The arguments of ``decompress`` in this process, while it is a list."""
        setattr(zstandard, "ZstdDecompressor", self._counted_decompressor)  # noqa: B010

    def take(self) -> int:
        """Return the bytes since the last call."""
        with self._total.get_lock():
            found, self._total.value = self._total.value, 0
        return int(found)

    def decompress_again(self, frames: list[bytes]) -> None:
        """Decompress *frames* and do nothing else."""
        for frame in frames:
            self._original().decompress(frame)

    def _counted_decompressor(self, *args: Any, **kwargs: Any) -> "_Counted":
        return _Counted(self._original(*args, **kwargs), self)

    def count(self, size: int) -> None:
        """Add what a decompressor has handed out."""
        with self._total.get_lock():
            self._total.value += size


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
