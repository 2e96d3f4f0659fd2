# SPDX-License-Identifier: Apache-2.0
"""A few file verbs that work alike on local paths and on ``msc://`` URLs.

A verb asks the operating system if the path lies on a file system, and the object store otherwise.
A URL whose profile is of type ``file`` lies on a file system: the client would write it without
fsync and report a directory it cannot read as empty.
"""

import contextlib
import errno
import io
import os
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, cast

from megatron.training.distillation import object_store

_REMOTE_PREFIX = "msc://"

ERRORS = (OSError,)
"""What a verb raises when a file cannot be reached, locally or in an object store."""
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EIO,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
    }
)
"""What network file systems answer while a server fails over, and what a full disk answers until
someone makes room."""
# The suffixes of the cache format; the format's own module has them too, and a test holds them
# together.
STALE_SUFFIX = ".stale"
TMP_SUFFIX = ".tmp"


class Revision(NamedTuple):
    """What tells that a file is still the one that it was."""

    size: int
    """In bytes."""
    modified: float
    """Seconds since the epoch."""
    tag: str
    """What the object store calls this content; on a file system the time in nanoseconds."""


def is_remote(path: str) -> bool:
    """Return whether *path* lies behind the multi-storage client."""
    return path.startswith(_REMOTE_PREFIX)


def is_transient(error: OSError, path: str) -> bool:
    """Return whether a file system may do in a moment what it has just refused.

    Never of an object store: its verbs have tried again themselves.
    """
    return _on_disk(path) is not None and error.errno in _TRANSIENT


def join(directory: str, name: str) -> str:
    """Return the path of *name* inside *directory*."""
    if is_remote(directory):
        return f"{directory.rstrip('/')}/{name}"
    return os.path.join(directory, name)


def exists(path: str) -> bool:
    """Return whether *path* is an object in a store or, on a file system, anything at all.

    Raises:
        OSError: That cannot be told.
    """
    on_disk = _on_disk(path)
    if on_disk is None:
        return object_store.exists(path)
    try:
        os.stat(on_disk)
    except FileNotFoundError:
        return False
    return True


def revision(path: str) -> Revision:
    """Return the size of a file, and what changes when it is written again.

    Raises:
        OSError: There is none, or it cannot be reached.
    """
    on_disk = _on_disk(path)
    if on_disk is None:
        return Revision(*object_store.revision(path))
    found = os.stat(on_disk)
    return Revision(found.st_size, found.st_mtime, str(found.st_mtime_ns))


def makedirs(directory: str) -> None:
    """Create a directory and its parents; an object store needs no directories."""
    on_disk = _on_disk(directory)
    if on_disk is not None:
        os.makedirs(on_disk, exist_ok=True)


def list_names(directory: str, prefix: str = "") -> list[str]:
    """Return the names of what lies directly in *directory*, sorted; only those with *prefix*.

    An object store is asked for no more than the prefix; a file system always reads the directory.

    Raises:
        OSError: A directory is missing or unreadable; the error names it. One that does not exist
            in an object store is empty.
    """
    on_disk = _on_disk(directory)
    if on_disk is None:
        return sorted(object_store.list_names(directory, prefix))
    try:
        return sorted(name for name in os.listdir(on_disk) if name.startswith(prefix))
    except OSError as error:
        raise _located(error, "cannot list the directory", directory) from error


def open_read(path: str, *, whole: bool = True) -> BinaryIO:
    """Open *path* for reading at any position.

    Local files are unbuffered: a header costs 512 bytes, and ``read`` may return less than asked.
    A remote object begins to download in the background, so opening a few ahead prefetches them;
    its errors surface when it is read. Without *whole* only the parts that are read are fetched.
    """
    on_disk = _on_disk(path)
    if on_disk is None:
        return cast(BinaryIO, object_store.RemoteReader(path, whole=whole))
    return cast(BinaryIO, open(on_disk, "rb", buffering=0))


def fetch_whole(stream: BinaryIO) -> None:
    """Begin to download all of a remote object that was opened for a part of it."""
    if isinstance(stream, object_store.RemoteReader):
        stream.fetch_whole()


def fetch_ahead(stream: BinaryIO, start: int, size: int) -> None:
    """Announce a read of *size* bytes at byte *start*, and that what follows is read after it.

    Of a remote object that is not downloaded whole, these bytes are fetched and then the following
    ones, in the background and only so far ahead.
    """
    if isinstance(stream, object_store.RemoteReader):
        stream.fetch_ahead(start, size)


def publish(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Make what *write* puts into the stream appear at *path* whole, or not at all.

    A local file is written beside its place under ``.tmp``, fsynced and renamed over *path*; then
    the directory is fsynced. A remote object is collected in memory and uploaded at once.

    Raises:
        OSError: The write failed; the error names *path*, which is unchanged.
    """
    on_disk = _on_disk(path)
    if on_disk is None:
        content = io.BytesIO()
        write(content)
        object_store.upload(path, content.getvalue())
        return
    temporary = on_disk + TMP_SUFFIX
    try:
        with open(temporary, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, on_disk)
        _fsync_directory(os.path.dirname(on_disk) or ".")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _located(error, "cannot write the file", path) from error


def set_aside(path: str) -> str:
    """Rename *path* so that it counts no longer, overwriting nothing; return the new path.

    ``x.tar`` becomes ``x.tar.stale``, or ``x.1.tar.stale``, ``x.2.tar.stale``, ... if that exists.
    """
    root, extension = os.path.splitext(path)
    target, number = path + STALE_SUFFIX, 0
    while exists(target):
        number += 1
        target = f"{root}.{number}{extension}{STALE_SUFFIX}"
    on_disk, target_on_disk = _on_disk(path), _on_disk(target)
    if on_disk is None or target_on_disk is None:
        object_store.move(path, target)
    else:
        os.rename(on_disk, target_on_disk)
    return target


def _on_disk(path: str) -> str | None:
    """Return where *path* lies on a file system, or None if it is in an object store."""
    return object_store.local_path(path) if is_remote(path) else path


def _fsync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system has it
            raise
    finally:
        os.close(descriptor)


def _located(error: OSError, what: str, path: str) -> OSError:
    """Return an error of the same kind whose text says what failed and where."""
    return OSError(error.errno, f"{what}: {error.strerror}", path)
