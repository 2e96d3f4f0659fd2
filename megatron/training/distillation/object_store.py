# SPDX-License-Identifier: Apache-2.0
"""File verbs on ``msc://`` URLs, through the multi-storage client.

The client and the stores behind it raise errors of many kinds, some of which are no OSError. Every
verb here raises an OSError that names the URL, says what the store answered and what to do next;
where the store is away for a moment, it tries again first. The client is imported on first use, so
local caches need neither the package nor its configuration.
"""

import contextlib
import errno
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, BinaryIO

from megatron.training.distillation import store_errors
from megatron.training.distillation.read_ahead import ReadAhead
from megatron.training.distillation.storage_retry import retry

logger = logging.getLogger(__name__)

SMALL_RANGE_BYTES = 16 * 2**10
"""What is fetched at least where parts of an object are read: it may hold the next header too."""


def local_path(url: str) -> str | None:
    """Return where *url* lies on a local file system, or None if it is in an object store."""
    client, key = _resolve(url)
    path: str | None = client.get_posix_path(key)
    return path


def exists(url: str) -> bool:
    """Return whether *url* is an object."""
    client, key = _resolve(url)
    return bool(_attempt("look for the object", url, lambda: client.is_file(key)))


def revision(url: str) -> tuple[int, float, str]:
    """Return bytes, time of the last change in seconds since the epoch, and tag of an object."""
    client, key = _resolve(url)
    found = _attempt("look at the object", url, lambda: client.info(key))
    return found.content_length, found.last_modified.timestamp(), str(found.etag)


def list_names(url: str, prefix: str = "") -> list[str]:
    """Return the names directly below *url* that begin with *prefix*, in the store's order.

    Only the part of the listing with that prefix is fetched. There are none where *url* does not
    exist, as long as its bucket does.
    """
    client, key = _resolve(url)
    directory = key.rstrip("/") + "/" if key else ""
    bounds: dict[str, str] = {}
    if prefix:
        # The names that begin with "dp0__" lie between "dp0__" and "dp0_`".
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        bounds = {"start_after": directory + prefix, "end_at": directory + end}

    def fetch() -> list[str]:
        found = client.list(directory, include_directories=True, **bounds)
        return [item.key.rstrip("/").rpartition("/")[2] for item in found]

    return [name for name in _attempt("list", url, fetch) if name.startswith(prefix)]


def upload(url: str, content: bytes) -> None:
    """Make *content* the object *url* in one upload, so that no reader sees a part of it."""
    client, key = _resolve(url)
    # The client may close or move the stream it is given, so each attempt gets one of its own.
    _attempt("write", url, lambda: client.upload_file(key, io.BytesIO(content)))


def move(url: str, target: str) -> None:
    """Copy the object *url* to *target*, of the same profile, and delete it: stores cannot rename.

    Between the two both exist; a process killed there loses nothing.
    """
    client, key = _resolve(url)
    _, target_key = _resolve(target)
    _attempt(f"copy to {target}", url, lambda: client.copy(key, target_key))

    def delete() -> None:
        # Gone is what was wanted: an attempt whose answer was lost may have deleted it.
        with contextlib.suppress(FileNotFoundError):
            client.delete(key)

    _attempt("delete", url, delete)


class RemoteReader(io.RawIOBase):
    """Reads an object at any position, one thread at a time; opening it begins in the background.

    The client fetches a whole object ahead, to memory, or to its cache if one is configured; an
    object too large for that is read range by range. Errors surface in the first read, after the
    object has been tried for a while. A read that fails later opens the object again and goes on
    where it was.

    Args:
        url: The object.
        whole: Whether it is fetched whole at once. Otherwise each read is a range, until
            :meth:`fetch_ahead` or :meth:`fetch_whole` asks for more; where the store refuses
            ranges, the first one fetches it whole.
    """

    def __init__(self, url: str, *, whole: bool = True) -> None:
        super().__init__()
        self._url = url
        self._is_whole = whole
        self._position = 0
        self._size = -1
        self._stream: BinaryIO | None = None
        self._in_use = threading.Lock()
        self._small_range = (0, b"")
        self._ahead: ReadAhead | None = None
        self._closing = threading.Event()
        self._opened = self._open_in_background()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to *offset*; only from the end this waits for the object."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if base is None:
            self._opened.result()
            base = self._size
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return up to *size* bytes, all that are left if it is negative."""
        if self.closed:
            raise ValueError(f"{self._url} is read after it was closed.")
        self._opened.result()
        left = max(0, self._size - self._position)
        size = left if size < 0 else min(size, left)
        data: bytes | None = b"" if size == 0 else self._read_part(size)
        if data is None:
            data = self._fetch(self._position, size)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill *buffer*; return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def fetch_ahead(self, start: int, size: int) -> None:
        """Fetch *size* bytes at *start*, then what follows, ahead of the reads and in pieces.

        This does nothing where all is fetched anyway, and after the first time.
        """
        if self._is_whole or self._ahead is not None:
            return
        self._opened.result()
        self._ahead = ReadAhead(self._fetch, start, size, self._size)

    def fetch_whole(self) -> None:
        """Fetch all of the object, as it is now, in the background, unless that has begun."""
        if self._is_whole:
            return
        self._end_reading_ahead()
        self._small_range = (0, b"")
        self._size = -1
        self._is_whole = True
        self._opened = self._open_in_background()

    def close(self) -> None:
        """Give the object up, without waiting for what is still being fetched."""
        super().close()
        self._closing.set()
        self._end_reading_ahead()
        if self._opened.done():
            self._drop()

    def _open_in_background(self) -> Future[None]:
        opened: Future[None] = Future()
        arguments = (opened,)
        name = "object-store-open"
        threading.Thread(target=self._open_ahead, args=arguments, name=name, daemon=True).start()
        return opened

    def _open_ahead(self, opened: Future[None]) -> None:
        try:
            with self._in_use:
                _attempt("open", self._url, self._open, self._pause)
        except OSError as error:
            opened.set_exception(error)
        else:
            opened.set_result(None)
        if self._closing.is_set():
            self._drop()

    def _open(self) -> None:
        self._drop()
        client, key = _resolve(self._url)
        options = {} if self._is_whole else {"memory_load_limit": 0}
        self._stream = client.open(key, "rb", prefetch_file=self._is_whole, **options)
        with self._dropped_on_failure() as stream:
            size = stream.seek(0, os.SEEK_END)  # waits for an object that is fetched whole
            if self._size not in (-1, size):
                raise OSError(
                    errno.ESTALE, f"it has {size} bytes now and had {self._size} when it was opened"
                )
            self._size = size

    def _read_part(self, size: int) -> bytes | None:
        """Return what was fetched ahead, or with a small range; None if it has to be fetched."""
        position = self._position
        if self._ahead is not None:
            try:
                data = self._ahead.read(position, size)
            except OSError:
                self._end_reading_ahead()  # the next member begins anew
                raise
            if data is not None:
                return data
        if self._is_whole or size >= SMALL_RANGE_BYTES:
            return None
        start, held = self._small_range
        if not start <= position <= position + size <= start + len(held):
            held = self._fetch(position, min(SMALL_RANGE_BYTES, self._size - position))
            start = position
            self._small_range = start, held
        return held[position - start : position - start + size]

    def _end_reading_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _fetch(self, position: int, size: int) -> bytes:
        """Return *size* bytes at *position*, which the object has."""
        action = partial(self._read_once, position, size)
        data: bytes = _attempt("read", self._url, action, self._pause)
        return data

    def _read_once(self, position: int, size: int) -> bytes:
        with self._in_use:
            if self._closing.is_set():
                raise OSError(errno.EBADF, "it was closed")
            if self._is_whole:
                return self._read_stream(position, size)
            try:
                data = self._read_stream(position, size)
            except store_errors.client_errors() as error:
                if not store_errors.refuses_ranges(error):
                    raise
                reason = store_errors.reason(error)
            else:
                if len(data) == size:
                    return data
                reason = f"it gave {len(data)} bytes of {size}"
            logger.debug("%s cannot be read by ranges and is fetched whole: %s", self._url, reason)
            self._is_whole = True
            self._drop()
            return self._read_stream(position, size)

    def _read_stream(self, position: int, size: int) -> bytes:
        if self._stream is None:
            self._open()
        with self._dropped_on_failure() as stream:
            stream.seek(position)
            return stream.read(size)

    @contextlib.contextmanager
    def _dropped_on_failure(self) -> Iterator[BinaryIO]:
        """Give the stream that is open; the next attempt opens another one if this fails."""
        assert self._stream is not None
        try:
            yield self._stream
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise OSError(errno.EBADF, "it was closed")


# ---- the client and its errors ---------------------------------------------------------------


def _resolve(url: str) -> tuple[Any, str]:
    """Return the client of the URL's profile and the key of its object."""
    try:
        import multistorageclient
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A path starts with msc://, but the multistorageclient package is not installed. "
            "Install multi-storage-client, or give a local path."
        ) from error
    try:
        client, key = multistorageclient.resolve_storage_client(url)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        # The chain is cut: an error about a configuration may quote it, keys and all.
        raise store_errors.unusable_profile(error, url) from None
    return client, key


def _attempt[T](
    what: str, url: str, action: Callable[[], T], pause: Callable[[float], object] = time.sleep
) -> T:
    """Return what *action* returns; its errors come as OSError, the passing ones after retries."""
    errors = store_errors.client_errors()
    try:
        return retry(
            action,
            what=f"{what} {url}",
            errors=errors,
            is_transient=store_errors.is_transient,
            describe=store_errors.reason,
            pause=pause,
        )
    except errors as error:
        raise store_errors.located(error, what, url) from error
