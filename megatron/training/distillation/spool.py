# SPDX-License-Identifier: Apache-2.0
"""Keeps the compressed iterations of a window outside of the trainer's heap, once.

A window is one anonymous file, to which iterations are appended as they are compressed. It lies in
memory (``memfd``, which the size of ``/dev/shm`` does not limit) or on a disk of the node, and has
no name, so nothing stays behind whatever ends the job. The checkpoint worker is handed where the
bytes lie instead of the bytes: it opens the trainer's descriptor by its path in ``/proc``, which a
process of the same user may do.
"""

import errno
import io
import os
import tempfile
import threading
import weakref
import zlib
from dataclasses import dataclass
from typing import BinaryIO, cast

# What file systems and kernels without O_TMPFILE answer.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SpooledBytes:
    """A piece of a spool; picklable.

    Attributes:
        path: The spool, as every process of this user and pid namespace can open it.
        inode: The file that *path* must lead to.
        offset: Where the piece begins.
        size: Its bytes.
        checksum: CRC-32 of them.
    """

    path: str
    inode: int
    offset: int
    size: int
    checksum: int

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self.size

    def open(self) -> BinaryIO:
        """Open the spool at the beginning of the piece; the stream ends with the piece.

        Raises:
            OSError: The spool cannot be opened or is another file; says what to check. Reading to
                the end raises it where the bytes are not those that were written.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(error.errno, self._unreadable(error.strerror or str(error))) from error
        # Whoever copies out of it reads less at once than pays.
        stream = os.fdopen(descriptor, "rb", buffering=_READ_BYTES)
        found = os.fstat(descriptor)
        if found.st_ino != self.inode or found.st_size < self.offset + self.size:
            stream.close()
            # Nothing that another attempt would change.
            raise OSError(errno.EBADF, self._unreadable("the file there is another one by now"))
        stream.seek(self.offset)
        return cast(BinaryIO, _Piece(stream, self))

    def _unreadable(self, reason: str) -> str:
        return (
            f"cannot open {self.path}, where the training process keeps this window: {reason}. "
            "Check that the training process is alive, and that the checkpoint worker runs as the "
            "same user, in the same pid namespace and with /proc mounted"
        )


class _Piece(io.RawIOBase):
    """Reads a piece once, and compares its checksum at its end.

    What a disk could not keep of a file shows when it is read, and not always as an error.
    """

    def __init__(self, spool: BinaryIO, piece: SpooledBytes) -> None:
        self._spool = spool
        self._piece = piece
        self._left = piece.size
        self._checksum = 0

    def read(self, size: int = -1) -> bytes:
        data = self._spool.read(self._left if size < 0 else min(size, self._left))
        self._checksum = zlib.crc32(data, self._checksum)
        self._left -= len(data)
        if self._left == 0 and self._checksum != self._piece.checksum:
            raise OSError(
                errno.EBADMSG,
                f"the bytes at {self._piece.offset} of {self._piece.path} are not those that were "
                "spooled there: check the disk of --logits-save-spool-dir, or the memory",
            )
        return data

    def close(self) -> None:
        self._spool.close()
        super().close()


class HeldMemory:
    """Counts the bytes of memory that are held, and the most that there were. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._peak = 0

    def add(self, size: int) -> None:
        """Count *size* bytes more, or fewer where it is negative."""
        with self._lock:
            self._now += size
            self._peak = max(self._peak, self._now)

    def take_peak(self) -> int:
        """Return the most bytes that were held since the last call."""
        with self._lock:
            peak, self._peak = self._peak, self._now
            return peak


class Spool:
    """An anonymous file of one window.

    Args:
        directory: Where it lies; None for memory.
        held: Counts its bytes if it lies in memory.

    Raises:
        OSError: The file cannot be made; names the directory.
    """

    def __init__(self, directory: str | None, held: HeldMemory | None = None) -> None:
        self._where = "memory" if directory is None else directory
        self._held = held if directory is None else None
        try:
            self._descriptor = _anonymous_file(directory)
            self._inode = os.fstat(self._descriptor).st_ino
        except OSError as error:
            raise self._located("cannot make a spool", error) from error
        self._owner = os.getpid()
        self._end = 0
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> SpooledBytes:
        """Write *data* behind what is there; one thread at a time.

        Raises:
            OSError: The disk is full or fails, or a limit is reached; names the directory.
        """
        offset, view = self._end, memoryview(data)
        try:
            while view:
                view = view[os.pwrite(self._descriptor, view, self._end + len(data) - len(view)) :]
        except OSError as error:
            raise self._located(f"cannot write {len(data)} bytes to a spool", error) from error
        self._end += len(data)
        if self._held is not None:
            self._held.add(len(data))
        path = f"/proc/{self._owner}/fd/{self._descriptor}"
        return SpooledBytes(path, self._inode, offset, len(data), zlib.crc32(data))

    def close(self) -> None:
        """Give the file up, with what it takes; a second time does nothing."""
        if not self._close.alive or os.getpid() != self._owner:
            return
        # A process that was forked meanwhile has the file open as well, and would keep its bytes.
        os.ftruncate(self._descriptor, 0)
        self._close()
        if self._held is not None:
            self._held.add(-self._end)

    def _located(self, what: str, error: OSError) -> OSError:
        return OSError(error.errno, f"{what} in {self._where}: {error.strerror}")


def check_directory(directory: str) -> None:
    """Make sure that spools can be made and written in *directory*.

    Raises:
        OSError: They cannot; names the directory.
    """
    spool = Spool(directory)
    try:
        spool.append(b"0")
    finally:
        spool.close()


def _anonymous_file(directory: str | None) -> int:
    """Return a descriptor of a new file without a name."""
    if directory is None:
        return os.memfd_create("logits-spool")
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    descriptor, path = tempfile.mkstemp(prefix="logits-spool-", dir=directory)
    os.unlink(path)
    return descriptor
