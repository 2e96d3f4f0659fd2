# SPDX-License-Identifier: Apache-2.0
"""File operations that fail in this process, one by one, as a file system may have them fail."""

import builtins
import contextlib
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

KILL = "SIGKILL"
_RECORD_BYTES = 256
_PATH_CALLS = ("listdir", "mkdir", "open", "rename", "replace", "scandir", "stat", "unlink")
_DESCRIPTOR_CALLS = ("fsync", "close")


class FileFaults:
    """Counts the file operations of this process and its forks, and has some of them fail.

    A buffered file counts what reaches the operating system. Use it as a context, or install it.

    Args:
        path: What a file's path contains if it counts.
        record: File that gets one record per counted operation.
        first_failing: The operation, by its number in *record* (a regular file then), from which on
            all fail.
        only: Fail at that operation alone.
        each_once: Instead, every operation on every file fails the first time.
        error: Name of the error number that they fail with; or SIGKILL, which ends the process.
    """

    def __init__(
        self,
        path: str,
        record: str | Path,
        *,
        first_failing: int | None = None,
        only: bool = False,
        each_once: bool = False,
        error: str = "EACCES",
    ) -> None:
        self.path = path
        self._first_failing = first_failing
        self._only = only
        self._each_once = each_once
        self._errno = None if error == KILL else getattr(errno, error)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seen: set[str] = set()
        self._open = builtins.open
        self._replaced = {name: getattr(os, name) for name in _PATH_CALLS + _DESCRIPTOR_CALLS}

    def install(self) -> None:
        """Take the place of the functions that open, read and change files."""
        for name in _PATH_CALLS:
            setattr(os, name, self._of_path(name, self._replaced[name]))
        for name in _DESCRIPTOR_CALLS:
            setattr(os, name, self._of_descriptor(name, self._replaced[name]))
        builtins.open = io.open = self._open_stream  # type: ignore[assignment]

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *args: object) -> None:
        for name, original in self._replaced.items():
            setattr(os, name, original)
        builtins.open = io.open = self._open
        os.close(self._record)

    def step(self, operation: str, path: Any) -> None:
        """Count an operation and fail if it is to."""
        if not isinstance(path, str | os.PathLike) or self.path not in os.fspath(path):
            return
        what = f"{operation} {os.path.basename(os.fspath(path))}"
        os.write(self._record, f"{what:{_RECORD_BYTES - 1}}\n".encode())
        # In append mode the position is the end of what was just written.
        number = os.lseek(self._record, 0, os.SEEK_CUR) // _RECORD_BYTES - 1
        first = self._first_failing
        fails = first is not None and (number == first if self._only else number >= first)
        if self._each_once:
            fails = what not in self._seen
            self._seen.add(what)
        if fails and self._errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fails:
            raise OSError(self._errno, os.strerror(self._errno), path)

    def _of_path(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(path: Any = ".", *args: Any, **options: Any) -> Any:
            self.step(name, path)
            return original(path, *args, **options)

        return faulty

    def _of_descriptor(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(descriptor: Any) -> Any:
            path = ""
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
            try:
                self.step(name, path)
            except OSError:
                if name == "close":  # a close that fails has closed
                    original(descriptor)
                raise
            return original(descriptor)

        return faulty

    def _open_stream(
        self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any
    ) -> Any:
        is_path = isinstance(file, str | os.PathLike)
        if not is_path or self.path not in os.fspath(file):
            return self._open(file, mode, buffering, *args, **options)
        self.step("open", file)
        raw = _CountedFile(self, os.fspath(file), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        stream = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        return stream if "b" in mode else io.TextIOWrapper(stream, *args, **options)


class _CountedFile(io.FileIO):
    """A file whose system calls are counted."""

    def __init__(self, faults: FileFaults, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._faults = faults

    def read(self, size: int | None = -1, /) -> Any:
        """Read as a file does."""
        self._faults.step("read", self.name)
        return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any, /) -> Any:
        """Read as a file does."""
        self._faults.step("read", self.name)
        return super().readinto(buffer)

    def write(self, data: Any, /) -> Any:
        """Write as a file does."""
        self._faults.step("write", self.name)
        return super().write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Seek as a file does."""
        self._faults.step("seek", self.name)
        return super().seek(offset, whence)

    def close(self) -> None:
        """Close the file, and fail only then."""
        if self.closed:
            return
        super().close()
        self._faults.step("close", self.name)


def recorded_operations(record: Path) -> list[str]:
    """Return the counted operations in order, such as ``fsync dp0__0-16.tar.tmp``."""
    text = record.read_text() if record.exists() else ""
    return [text[i : i + _RECORD_BYTES].strip() for i in range(0, len(text), _RECORD_BYTES)]
