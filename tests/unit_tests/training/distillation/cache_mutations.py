# SPDX-License-Identifier: Apache-2.0
"""Ways in which a cache can be damaged, each drawn at random from a seed."""

import io
import json
import random
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Files = dict[str, bytes]
"""A cache in memory: base name and content of each file."""


class Mutator:
    """Damages copies of one cache.

    Args:
        files: The undamaged cache.
        foreign: Caches of other dumps, whose files have the same names.
    """

    def __init__(self, files: Files, foreign: list[Files]) -> None:
        self._files = files
        self._foreign = foreign
        self.kinds: list[Callable[[random.Random, Files], None]] = [
            self.flip_bits,
            self.overwrite_bytes,
            self.truncate,
            self.append,
            self.cut_out,
            self.repeat,
            self.swap_blocks,
            self.change_members,
            self.swap_members,
            self.move_members_between_files,
            self.change_metadata,
            self.change_index,
            self.rename,
            self.swap_files,
            self.copy_file,
            self.drop_file,
            self.take_foreign,
        ]

    def mutate(self, seed: str) -> tuple[str, Files]:
        """Return the damage done, in words, and the damaged cache."""
        rng = random.Random(seed)
        files = dict(self._files)
        kind = rng.choice(self.kinds)
        kind(rng, files)
        return kind.__name__, files

    # ---- bytes -------------------------------------------------------------------------------

    def flip_bits(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            content[_anywhere(rng, content)] ^= 1 << rng.randrange(8)
        files[name] = bytes(content)

    def overwrite_bytes(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        start = _anywhere(rng, content)
        length = min(rng.choice((1, 4, 100, 512, 3000)), len(content) - start)
        filler = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
        content[start : start + length] = filler
        files[name] = bytes(content)

    def truncate(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        at = rng.randrange(len(content))
        files[name] = bytes(content[: at if rng.random() < 0.5 else at // 512 * 512])

    def append(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        length = rng.choice((1, 512, 1024, 10240))
        files[name] = bytes(content) + rng.choice((bytes(length), rng.randbytes(length)))

    def cut_out(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        start = _anywhere(rng, content)
        del content[start : start + rng.choice((1, 512, 1024, 2048))]
        files[name] = bytes(content)

    def repeat(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        start = _anywhere(rng, content) // 512 * 512
        length = rng.choice((512, 1024, 2560))
        content[start:start] = content[start : start + length]
        files[name] = bytes(content)

    def swap_blocks(self, rng: random.Random, files: Files) -> None:
        name, content = _pick(rng, files)
        a, b = (rng.randrange(len(content) // 512) * 512 for _ in range(2))
        content[a : a + 512], content[b : b + 512] = content[b : b + 512], content[a : a + 512]
        files[name] = bytes(content)

    # ---- members -----------------------------------------------------------------------------

    def change_members(self, rng: random.Random, files: Files) -> None:
        """Reorder, double, drop, rename or empty members in a file that is a tar all the same."""
        name, _ = _pick(rng, files)
        members = read_members(files[name])
        index = rng.randrange(len(members))
        match rng.randrange(5):
            case 0:
                rng.shuffle(members)
            case 1:
                members.insert(rng.randrange(len(members) + 1), members[index])
            case 2:
                del members[index]
            case 3:
                other = rng.choice(("0-4.pt.zst", "4-8.pt.zst", "8-12.pt.zst", "x", "0-8.pt.zst"))
                members[index] = (other, members[index][1])
            case _:
                members[index] = (members[index][0], rng.choice((b"", b"{}", rng.randbytes(99))))
        files[name] = write_members(members)

    def swap_members(self, rng: random.Random, files: Files) -> None:
        """Exchange the contents of two members and keep their names."""
        name, _ = _pick(rng, files)
        members = read_members(files[name])
        (a, first), (b, second) = members[1:3]
        files[name] = write_members([members[0], (a, second), (b, first), *members[3:]])

    def move_members_between_files(self, rng: random.Random, files: Files) -> None:
        """Give one file the members, or one of them, of another."""
        source, target = rng.sample(sorted(files), 2)
        there, here = read_members(files[source]), read_members(files[target])
        index = rng.randrange(1, len(here))
        if rng.random() < 0.5:
            here[index] = (here[index][0], there[index][1])
        else:
            here[1:] = [(a, b) for (a, _), (_, b) in zip(here[1:], there[1:], strict=True)]
        files[target] = write_members(here)

    def change_metadata(self, rng: random.Random, files: Files) -> None:
        """Change, drop or add one value anywhere in the metadata."""
        name, _ = _pick(rng, files)
        (meta_name, text), *members = read_members(files[name])
        meta = json.loads(text)
        place = meta
        while True:
            key = rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
                break
            place = place[key]
        values = (None, 0, 1, 2, 3, 4, 8, -1, 1 << 70, 0.5, True, "", "x", [], {}, [[1.0, "x"]])
        if rng.random() < 0.2 and isinstance(place, dict):
            del place[key]
        else:
            place[key] = rng.choice(values)
        text = json.dumps(meta, separators=(",", ":")).encode()
        files[name] = write_members([(meta_name, text), *members])

    def change_index(self, rng: random.Random, files: Files) -> None:
        """Change numbers, or the number of entries, of an index whose checksum is right again."""

        def change(content: dict[str, Any]) -> None:
            index = content["index"]
            entry = rng.choice(index)
            place = rng.randrange(len(entry))
            match rng.randrange(4):
                case 0:
                    entry[place] = rng.choice((0, 1, 4, 8, 16, 511, 512, 513, 1 << 40, -1, None))
                case 1:
                    entry[place] += rng.choice((-512, -4, -1, 1, 4, 512))
                case 2:
                    other = rng.choice(index)
                    entry[place], other[place] = other[place], entry[place]
                case _:
                    index.remove(entry)
            content["index_crc32"] = checksum_of_index(index)

        name, content = _pick(rng, files)
        files[name] = change_seal(bytes(content), change)

    # ---- files -------------------------------------------------------------------------------

    def rename(self, rng: random.Random, files: Files) -> None:
        name, _ = _pick(rng, files)
        numbers = list(map(int, re.findall(r"\d+", name)))
        numbers[rng.randrange(3)] += rng.choice((-8, -4, -1, 1, 2, 4, 8, 10**9))
        files["dp{}__{}-{}.tar".format(*numbers)] = files.pop(name)

    def swap_files(self, rng: random.Random, files: Files) -> None:
        a, b = rng.sample(sorted(files), 2)
        files[a], files[b] = files[b], files[a]

    def copy_file(self, rng: random.Random, files: Files) -> None:
        source, target = rng.sample(sorted(files), 2)
        files[rng.choice((target, "dp2__0-8.tar", "dp0__4-8.tar"))] = files[source]

    def drop_file(self, rng: random.Random, files: Files) -> None:
        del files[rng.choice(sorted(files))]

    def take_foreign(self, rng: random.Random, files: Files) -> None:
        """Replace a file by that of another dump."""
        other = rng.choice(self._foreign)
        name = rng.choice(sorted(files.keys() & other.keys()))
        files[name] = other[name]


def read_files(directory: Path) -> Files:
    """Return the files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def write_files(directory: Path, files: Files) -> None:
    """Make a directory that holds these files and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def read_members(content: bytes) -> list[tuple[str, bytes]]:
    """Return the members of an undamaged tar."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def write_members(members: list[tuple[str, bytes]]) -> bytes:
    """Return a tar with these members."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def change_seal(shard: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return *shard* with another seal in its metadata, which has the right size of the file."""
    (name, text), *members = read_members(shard)
    meta = json.loads(text)
    change(meta["content"])
    while True:
        content = write_members([(name, compact_json(meta)), *members])
        if len(content) == meta["content"]["bytes"]:
            return content
        meta["content"]["bytes"] = len(content)


def without_index(shard: bytes) -> bytes:
    """Return *shard* as it was written before there was an index."""

    def change(content: dict[str, Any]) -> None:
        del content["index"], content["index_crc32"]

    return change_seal(shard, change)


def checksum_of_index(index: Any) -> int:
    """Return the checksum that belongs to an index."""
    return zlib.crc32(compact_json(index))


def compact_json(content: Any) -> bytes:
    """Return *content* as the metadata of a shard has it."""
    return json.dumps(content, separators=(",", ":")).encode()


def _pick(rng: random.Random, files: Files) -> tuple[str, bytearray]:
    name = rng.choice(sorted(files))
    return name, bytearray(files[name])


def _anywhere(rng: random.Random, content: bytearray) -> int:
    """Return a position, in half of the cases one before the padding at the end."""
    used = len(content.rstrip(b"\0"))
    return rng.randrange(used if rng.random() < 0.7 else len(content))
