# SPDX-License-Identifier: Apache-2.0
"""Sets aside what a plan names; whatever happens, what could be loaded before can be loaded."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from typing import Any

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.publication import Extract
from megatron.training.distillation.shard_extraction import extract
from megatron.training.distillation.utils import ShardName, read_shard_meta, walk_tar
from tools.cache.cache_files import CacheFiles, ShardFile
from tools.cache.inventory import ShardSummary, summarize
from tools.cache.repair_plan import Move
from tools.cache.verification import Kind
from tools.cache.verification_state import read_lines, verified_in

_NEWEST_SHARDS = 8
_COPIED_BYTES = 1 << 20


def apply_moves(directory: str, moves: Iterable[Move], tell: Callable[[str], None]) -> int:
    """Take *moves* one after another; return how many could not be taken.

    Args:
        directory: The cache.
        moves: What :func:`plan_repair` returns.
        tell: Called with what was done, or why it was not.
    """
    failed = 0
    waiting: list[tuple[str, ShardName]] = []
    for move in moves:
        try:
            if (stale := apply_move(directory, move, tell)) and move.renamed is not None:
                waiting.append((stale, move.renamed))
        except (ValueError, *storage.ERRORS) as error:
            failed += 1
            tell(f"{move.name} stays: {error}")
    for stale, own_name in waiting:  # two shards may have had each other's names
        try:
            _give_back(directory, stale, own_name, tell)
        except storage.ERRORS as error:
            failed += 1
            tell(f"{own_name} is in {stale}: {error}")
    return failed


def apply_move(directory: str, move: Move, tell: Callable[[str], None]) -> str | None:
    """Take a move; return what the file is called now, None if it stays.

    Raises:
        ValueError: The pieces cannot be made, as a payload lies partly in one or is damaged.
        OSError: The storage refuses.
    """
    if move.damaged is not None:
        now = summarize(move.damaged)
        if now.problem is None or now.unreachable:
            tell(f"{move.name} stays: {now.problem or 'it is sound by now'}")
            return None
    if move.renamed is not None:
        _give_back(directory, move.name, move.renamed, tell)
    for piece in move.pieces:
        source = ShardName.parse(move.name)
        assert source is not None, move.name
        if storage.exists(storage.join(directory, str(piece))):
            raise FileExistsError(f"{piece} is there already; run repair again for what is left")
        extract(directory, Extract(source, piece))
    stale = storage.set_aside(storage.join(directory, move.name)).rpartition("/")[2]
    tell(f"{move.name} is now {stale}")
    return stale


def _give_back(directory: str, name: str, own_name: ShardName, tell: Callable[[str], None]) -> None:
    """Publish a file under its own name too, unless that is taken."""
    path, own_path = storage.join(directory, name), storage.join(directory, str(own_name))
    if storage.exists(own_path):
        return
    with contextlib.closing(storage.open_read(path)) as stream:
        storage.publish(own_path, lambda out: shutil.copyfileobj(stream, out, _COPIED_BYTES))
    tell(f"{name} is also {own_name} again")


def renamed_shards(damaged: Iterable[ShardSummary]) -> dict[ShardFile, ShardName]:
    """Return those of the shards that are whole under another name than their own, and that."""
    found = {}
    for shard in damaged:
        if shard.unreachable or shard.file.legacy is not None:
            continue
        with contextlib.suppress(CacheFormatError, *storage.ERRORS):
            own_name = _own_name(shard)
            if own_name is not None and own_name != shard.file.name:
                found[shard.file] = own_name
    return found


def _own_name(shard: ShardSummary) -> ShardName | None:
    """Return the name that a shard was written under, if it opens under that."""
    path = shard.file.path
    with contextlib.closing(storage.open_read(path, whole=False)) as stream:
        content = read_shard_meta(stream, [next(walk_tar(stream))], path).content
        own_name = None if content is None else ShardName.parse(content.name)
        if own_name is not None:
            OpenShard(path, own_name, stream, None)
        return own_name


def seconds_since_write(files: CacheFiles) -> tuple[float, float]:
    """Return how long ago an unfinished file and one of the newest shards were written.

    Infinite where there is none.
    """
    newest = sorted(files.shards, key=lambda shard: -shard.name.end)[:_NEWEST_SHARDS]
    return (
        _age(storage.join(files.directory, name) for name in files.unfinished),
        _age(shard.path for shard in newest),
    )


def _age(paths: Iterable[str]) -> float:
    age = float("inf")
    for path in paths:
        try:
            age = min(age, time.time() - storage.revision(path).modified)
        except FileNotFoundError:  # it was just finished
            age = 0.0
    return age


def shards_with_damaged_payloads(path: str) -> set[str]:
    """Return the shards that a state of ``verify`` or what it printed as JSON names.

    Raises:
        ValueError: The file is neither.
        OSError: It cannot be read.
    """
    with open(path, encoding="utf-8") as stream:
        try:
            content: Any = json.load(stream)
        except ValueError:
            content = None
    if isinstance(content, dict) and isinstance(content.get("findings"), list):
        return {
            finding["shard"] for finding in content["findings"] if finding["kind"] == Kind.PAYLOAD
        }
    lines = list(read_lines(path))
    if not any("cache" in line for line in lines):
        raise ValueError(
            f"{path} is neither a state of verify (--state) nor what verify --json has printed."
        )
    latest = {(one.name, one.first, one.end): one for one in verified_in(lines)}
    return {one.name for one in latest.values() if one.faults}
