# SPDX-License-Identifier: Apache-2.0
"""Keeps what has been verified in a file, so that a verification goes on where it was stopped.

A line of JSON each; a line is appended in one write, and one that a kill has cut is passed over.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training.distillation import storage
from tools.cache.coverage import Span
from tools.cache.payload_verification import Fault, Part, Verified

_VERSION = 1


class VerificationState:
    """What was verified of a cache.

    Args:
        path: The file; it is made. Next to the cache or elsewhere, but on a file system.
        directory: The cache.

    Raises:
        ValueError: The file is of another cache, or something else.
        OSError: It cannot be read or written.
    """

    def __init__(self, path: str, directory: str) -> None:
        if storage.is_remote(path):
            raise ValueError(f"The state cannot lie in an object store: {path}. Give a local file.")
        self.path = path
        self.known: dict[tuple[str, int, int], Verified] = {}
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        cache = absolute(directory)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lines = list(read_lines(path))
            if os.path.getsize(path) and (not lines or lines[0].get("cache") != cache):
                found = lines[0].get("cache") if lines else "something else"
                raise ValueError(
                    f"{path} is of {found}, expected what verify keeps of {cache}. Name another "
                    "file, or remove it."
                )
        except BaseException:
            os.close(self._file)
            raise
        if not lines:
            self._append({"cache": cache, "version": _VERSION})
        self.known = {(one.name, one.first, one.end): one for one in verified_in(lines)}

    def still_holds(self, part: Part, revision: str) -> Verified | None:
        """Return what was found of *part* if its shard is still at *revision*, else None."""
        found = self.known.get((part.file.base_name, part.first, part.end))
        return found if found is not None and found.revision == revision else None

    def add(self, verified: Verified) -> None:
        """Keep what was verified; what the storage did not give is tried again."""
        if verified.unreachable is None:
            self._append(
                {
                    "shard": verified.name,
                    "revision": verified.revision,
                    "payloads": [verified.first, verified.end],
                    "bytes": verified.size,
                    "faults": [[*fault.span, fault.reason] for fault in verified.faults],
                    "lengths": verified.lengths,
                }
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, content: Mapping[str, Any]) -> None:
        # A line that was cut ends before this one begins.
        os.write(self._file, f"\n{json.dumps(content)}\n".encode())


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of lines; what is none, such as a line that was cut, is left out.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    yield content


def verified_in(lines: list[dict[str, Any]]) -> Iterator[Verified]:
    """Yield what was verified, the latest last."""
    for line in lines:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            first, end = line["payloads"]
            yield Verified(
                name=line["shard"],
                revision=line["revision"],
                first=first,
                end=end,
                size=line["bytes"],
                faults=tuple(Fault(Span(a, b), reason) for a, b, reason in line["faults"]),
                lengths=tuple(
                    (length, tuple(Span(a, b) for a, b in spans))
                    for length, spans in line["lengths"]
                ),
            )


def default_path(directory: str) -> str:
    """Return where the state of an interrupted verification of a cache lies unless one says."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    digest = hashlib.sha256(absolute(directory).encode()).hexdigest()[:16]
    return os.path.join(home, "logits_cache", f"verify-{digest}.jsonl")


def absolute(directory: str) -> str:
    """Return what names a cache from anywhere."""
    return directory.rstrip("/") if storage.is_remote(directory) else os.path.realpath(directory)
