# SPDX-License-Identifier: Apache-2.0
"""Goes through all lines once: which prompt each has and where it lies; nothing else is kept."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tools.cache.imports.json_lines import Piece, lines, pieces
from tools.cache.imports.server_formats import LineError, read_prompt
from tools.cache.imports.top_entries import Expected, tokens_key, top_entries
from tools.cache.processes import in_processes

LINE = np.dtype(
    [
        ("key", "S16"),
        ("digest", "S16"),
        ("file", "<u4"),
        ("number", "<i8"),
        ("offset", "<i8"),
        ("size", "<i8"),
    ]
)
"""A line: :func:`tokens_key` of its prompt, the digest of its entries, its file, its number in it
from 1, and its bytes."""

SHOWN = 10
"""What messages name of many."""


class LineProblem(ValueError):
    """Lines are not what they should be; names each, or the first ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineIndex:
    """The lines of all files.

    Attributes:
        paths: The files.
        lines: ``(n,)`` of :data:`LINE`, in the order of the files.
        clamped: Positions whose kept mass was 1 or more by rounding.
    """

    paths: tuple[str, ...]
    lines: np.ndarray
    clamped: int = 0

    def place(self, number: int) -> str:
        """Return file and number of a line, in words."""
        line = self.lines[number]
        return f"{self.paths[line['file']]} line {line['number']}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scan:
    """What was found in a piece; numbers of lines count from its beginning."""

    piece: Piece
    count: int
    lines: np.ndarray
    clamped: int
    wrong: int
    problems: list[tuple[int, str]]
    """The first ones of the wrong lines."""


def index_lines(
    paths: Sequence[str],
    expected: Expected,
    *,
    jobs: int = 1,
    advance: Callable[[int], None] = lambda size: None,
    cut: Sequence[Piece] | None = None,
) -> LineIndex:
    """Read and check all lines; empty ones are passed over.

    Args:
        paths: The files, local or ``msc://``.
        expected: What every line must have.
        jobs: Processes; 1 works in this one.
        advance: Called with the bytes of each piece that has been read.
        cut: The pieces of the files; None for large ones.

    Raises:
        LineProblem: Some are not what they should be.
        OSError: A file cannot be read.
    """
    scans = []
    for scan in in_processes(
        functools.partial(_scan, expected=expected),
        pieces(paths) if cut is None else cut,
        jobs=jobs,
    ):
        scans.append(scan)
        advance(scan.piece.end - scan.piece.start)
    scans.sort(key=lambda scan: (scan.piece.file, scan.piece.start))
    before = [0] * len(paths)
    problems: list[str] = []
    for scan in scans:
        first = before[scan.piece.file]
        scan.lines["number"] += first
        problems += [f"{scan.piece.path} line {first + n}: {text}" for n, text in scan.problems]
        before[scan.piece.file] += scan.count
    if wrong := sum(scan.wrong for scan in scans):
        raise LineProblem(f"{wrong} lines cannot be imported:{listed(problems, wrong)}")
    return LineIndex(
        paths=tuple(paths),
        lines=np.concatenate([np.empty(0, LINE), *(scan.lines for scan in scans)]),
        clamped=sum(scan.clamped for scan in scans),
    )


def listed(texts: Sequence[str], count: int) -> str:
    """Return the first of *count* texts, each on a line of its own."""
    shown = texts[:SHOWN]
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    return "".join(f"\n  {text}" for text in (*shown, *more))


def _scan(piece: Piece, expected: Expected) -> _Scan:
    found: list[tuple[bytes, bytes, int, int, int, int]] = []
    problems: list[tuple[int, str]] = []
    wrong = clamped = number = 0
    for number, line in enumerate(lines(piece), 1):
        if not line.content.strip():
            continue
        try:
            entries = top_entries(read_prompt(line.content), expected)
        except LineError as error:
            wrong += 1
            if wrong <= SHOWN:
                problems.append((number, str(error)))
            continue
        clamped += entries.clamped
        key, digest = tokens_key(entries.tokens), entries.digest()
        found.append((key, digest, piece.file, number, line.offset, len(line.content)))
    return _Scan(
        piece=piece,
        count=number,
        lines=np.array(found, LINE),
        clamped=clamped,
        wrong=wrong,
        problems=problems,
    )
