# SPDX-License-Identifier: Apache-2.0
"""A few file verbs that work alike on local paths and on ``msc://`` URLs.

A verb asks the multi-storage client if the path is remote and the operating system otherwise. The
client is imported on first use, so local caches need neither the package nor its configuration.
"""

import contextlib
import errno
import io
import os
from collections.abc import Callable
from typing import Any, BinaryIO, cast

_REMOTE_PREFIX = "msc://"

ERRORS = (OSError, RuntimeError)
"""What a local file system or the multi-storage client raises when a file cannot be reached."""
# The suffixes of the cache format; this module imports no sibling, and a test holds them together.
STALE_SUFFIX = ".stale"
TMP_SUFFIX = ".tmp"


def is_remote(path: str) -> bool:
    """Return whether *path* lies behind the multi-storage client."""
    return path.startswith(_REMOTE_PREFIX)


def join(directory: str, name: str) -> str:
    """Return the path of *name* inside *directory*."""
    if is_remote(directory):
        return f"{directory.rstrip('/')}/{name}"
    return os.path.join(directory, name)


def exists(path: str) -> bool:
    """Return whether *path* is a file (or, locally, anything at all)."""
    if is_remote(path):
        return bool(_client().is_file(path))
    return os.path.exists(path)


def makedirs(directory: str) -> None:
    """Create a local directory and its parents; an object store needs no directories."""
    if not is_remote(directory):
        os.makedirs(directory, exist_ok=True)


def list_names(directory: str) -> list[str]:
    """Return the names of what lies directly in *directory*, sorted.

    Raises:
        OSError: A local directory is missing or unreadable; the error names it. A prefix that does
            not exist in an object store is empty.
    """
    if is_remote(directory):
        found = _client().list(directory.rstrip("/") + "/", include_directories=True)
        return sorted(item.key.rstrip("/").rpartition("/")[2] for item in found)
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise _located(error, "cannot list the directory", directory) from error


def open_read(path: str) -> BinaryIO:
    """Open *path* for reading at any position.

    Local files are unbuffered: a header costs 512 bytes, and ``read`` may return less than asked.
    A remote object starts to download in the background, so opening a few ahead prefetches them.
    """
    if is_remote(path):
        return cast(BinaryIO, _client().open(path, "rb", prefetch_file=True))
    return cast(BinaryIO, open(path, "rb", buffering=0))


def publish(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Make what *write* puts into the stream appear at *path* whole, or not at all.

    A local file is written beside its place under ``.tmp``, fsynced and renamed over *path*; then
    the directory is fsynced. A remote object is collected in memory and uploaded once.

    Raises:
        OSError: The write failed; the error names *path*, which is unchanged.
    """
    if is_remote(path):
        content = io.BytesIO()
        write(content)
        content.seek(0)
        _client().upload_file(path, content)
        return
    temporary = path + TMP_SUFFIX
    try:
        with open(temporary, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _fsync_directory(os.path.dirname(path) or ".")
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
    if is_remote(path):  # object stores cannot rename
        client, source_key = _client().resolve_storage_client(path)
        _, target_key = _client().resolve_storage_client(target)
        client.copy(source_key, target_key)
        client.delete(source_key)
    else:
        os.rename(path, target)
    return target


def _client() -> Any:
    try:
        import multistorageclient
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A path starts with msc://, but the multistorageclient package is not installed. "
            "Install multi-storage-client, or give a local path."
        ) from error
    return multistorageclient


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
