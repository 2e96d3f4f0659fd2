# SPDX-License-Identifier: Apache-2.0
"""What a window's spool holds, who can read it, and that nothing of it stays behind."""

import errno
import multiprocessing
import os
import pickle
import re
import resource
import signal
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.distillation import spool as spool_module
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.spool import HeldMemory, Spool, SpooledBytes, check_directory
from tests.unit_tests.training.distillation.cache_files import read_content

fork = multiprocessing.get_context("fork")
SECONDS = 60.0


@pytest.fixture(params=["memory", "disk", "disk without O_TMPFILE"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Where spools lie, in each of the ways to make one."""
    if request.param == "memory":
        return None
    if request.param != "disk":
        unnamed = os.open

        def open_named(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return unnamed(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", open_named)
    place = tmp_path / "spool"
    place.mkdir()
    return str(place)


@pytest.fixture
def spool(directory: str | None) -> Iterator[Spool]:
    spool = Spool(directory)
    yield spool
    spool.close()


def descriptors() -> set[str]:
    """Return the open files of this process that are spools."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        if "logits-spool" in target or "/spool/" in target:
            found.add(entry.name)
    return found


def test_pieces_are_read_as_they_were_written(spool: Spool, directory: str | None) -> None:
    contents = [b"first", b"", b"second" * 100_000, bytes(range(256))]
    pieces = [spool.append(content) for content in contents]
    if directory is not None:
        assert os.listdir(directory) == []
    for content, piece in zip(contents, pieces, strict=True):
        assert len(piece) == len(content)
        assert piece.checksum == zlib.crc32(content)
        assert read_content(pickle.loads(pickle.dumps(piece))) == content


@pytest.mark.slow
def test_windows_cross_to_a_spawned_process(tmp_path: Path) -> None:
    """As to the checkpoint worker: by a queue, to a process that has been started before."""
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.JoinableQueue()
    process = spawn.Process(target=write_windows_from, args=(queue,), daemon=True)
    process.start()
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    written: dict[Path, list[tuple[str, SpooledBytes]]] = {}
    spools = [Spool(None), Spool(str(spool_dir))]
    for rank, spool in enumerate(spools):
        members = []
        for start in range(0, 40, 8):
            # A replay has left its first attempt behind.
            spool.append(os.urandom(10_000))
            piece = spool.append(os.urandom(400_000 + start))
            members.append((f"{start}-{start + 8}.pt.zst", piece))
        path = tmp_path / f"dp{rank}__0-40.tar"
        arguments = (str(path), b'{"saver":{}}', members, False)
        assert len(pickle.dumps(arguments)) <= 0.01 * sum(len(piece) for _, piece in members)
        queue.put(arguments)
        written[path] = members
    queue.put(None)
    process.join(SECONDS)
    assert process.exitcode == 0
    for path, members in written.items():
        with tarfile.open(path) as tar:
            for name, piece in members:
                stream = tar.extractfile(name)
                assert stream is not None
                assert stream.read() == read_content(piece)


def write_windows_from(queue: Any) -> None:
    while (arguments := queue.get()) is not None:
        write_batched_tar(*arguments)


def test_spooled_and_plain_members_give_the_same_shard(spool: Spool, tmp_path: Path) -> None:
    contents = {"0-8.pt.zst": b"first" * 1000, "8-16.pt.zst": b"second" * 70_000}
    pieces = [(name, spool.append(content)) for name, content in contents.items()]
    shards = []
    for folder, members in (("plain", list(contents.items())), ("spooled", pieces)):
        path = tmp_path / folder / "dp0__0-16.tar"
        path.parent.mkdir()
        write_batched_tar(str(path), b"{}", members)
        shards.append(path.read_bytes())
    assert shards[0] == shards[1]


def test_writing_a_window_takes_little_memory(spool: Spool, tmp_path: Path) -> None:
    members = [(f"{n}-{n + 1}.pt.zst", spool.append(os.urandom(1 << 22))) for n in range(8)]
    tracemalloc.start()
    write_batched_tar(str(tmp_path / "dp0__0-8.tar"), b"{}", members)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20


# ---- what ends a spool --------------------------------------------------------------------------


def test_closing_gives_the_descriptor_and_the_space_up(directory: str | None) -> None:
    before = descriptors()
    spool = Spool(directory)
    (descriptor,) = descriptors() - before
    piece = spool.append(b"x" * 100_000)
    # Whoever was forked meanwhile holds the file open.
    copy = os.dup(int(descriptor))
    spool.close()
    spool.close()
    assert descriptors() - before == {str(copy)}
    assert os.fstat(copy).st_blocks == 0
    os.close(copy)
    with pytest.raises(OSError, match="training process is alive"):
        piece.open()
    if directory is not None:
        assert os.listdir(directory) == []


def test_forked_process_does_not_close_it(spool: Spool) -> None:
    piece = spool.append(b"content")
    process = fork.Process(target=spool.close)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    assert read_content(piece) == b"content"


def test_forgotten_spool_is_closed(directory: str | None) -> None:
    before = descriptors()
    piece = Spool(directory).append(b"content")
    assert descriptors() == before
    with pytest.raises(OSError, match="cannot open /proc/"):
        piece.open()


def test_reader_goes_on_when_the_spool_is_closed_without_its_owner(directory: str | None) -> None:
    spool = Spool(directory)
    piece = spool.append(b"x" * (1 << 22))
    with piece.open() as stream:
        del spool
        assert stream.read(len(piece)) == b"x" * (1 << 22)


def test_killed_owner_leaves_nothing(directory: str | None) -> None:
    ours, theirs = fork.Pipe()
    process = fork.Process(target=spool_and_wait, args=(directory, theirs))
    process.start()
    piece = ours.recv()
    assert read_content(piece) == b"content"
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    with pytest.raises(FileNotFoundError) as caught:
        piece.open()
    for part in (piece.path, "No such file", "is alive", "same user", "pid namespace", "/proc"):
        assert part in str(caught.value)
    if directory is not None:
        assert os.listdir(directory) == []


def spool_and_wait(directory: str | None, pipe: Any) -> None:
    spool = Spool(directory)
    pipe.send(spool.append(b"content"))
    pipe.recv()


def test_another_file_at_the_same_path_is_refused(directory: str | None) -> None:
    """Its descriptor's number may have been given out again."""
    spool = Spool(directory)
    piece = spool.append(b"content")
    spool.close()
    with tempfile.TemporaryFile() as other:
        other.write(b"foreign content")
        other.flush()
        number = int(piece.path.rpartition("/")[2])
        taken = other.fileno() if other.fileno() == number else os.dup2(other.fileno(), number)
        with pytest.raises(OSError, match="another one by now"):
            piece.open()
        if taken != other.fileno():
            os.close(taken)


def test_bytes_that_have_changed_are_refused(spool: Spool, tmp_path: Path) -> None:
    """A disk that could not write them back gives others without an error."""
    piece = spool.append(b"x" * 3_000_000)
    descriptor = int(piece.path.rpartition("/")[2])
    os.pwrite(descriptor, b"y", 2_999_999)
    path = tmp_path / "dp0__0-8.tar"
    with pytest.raises(OSError, match="not those that were spooled there") as caught:
        write_batched_tar(str(path), b"{}", [("0-8.pt.zst", piece)])
    assert str(path) in str(caught.value)
    assert not list(tmp_path.glob("*.tar*"))
    with piece.open() as stream:
        assert stream.read(10) == b"x" * 10


# ---- failures -----------------------------------------------------------------------------------


def in_child(check: Callable[..., None], *arguments: Any) -> None:
    """Run *check* in a process of its own, for limits that stay."""
    process = fork.Process(target=check, args=arguments)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


def test_limit_on_files_is_an_error_that_loses_nothing(directory: str | None) -> None:
    in_child(spool_up_to_a_limit, directory)


def spool_up_to_a_limit(directory: str | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    spool = Spool(directory)
    kept = spool.append(b"a" * 60_000)
    where = "memory" if directory is None else directory
    with pytest.raises(OSError, match=f"cannot write 60000 bytes to a spool in {where}: .*large"):
        spool.append(b"b" * 60_000)
    # What was written in part is written over.
    after = spool.append(b"c" * 40_000)
    assert read_content(kept) == b"a" * 60_000
    assert read_content(after) == b"c" * 40_000


def test_full_disk_is_an_error(
    spool: Spool, directory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(OSError, match="No space left on device") as caught:
        spool.append(b"content")
    assert caught.value.errno == errno.ENOSPC
    assert (directory or "memory") in str(caught.value)


def test_short_writes_are_continued(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    pieces = [spool.append(content) for content in (b"0123456789" * 5, b"abcdefgh")]
    assert [read_content(piece) for piece in pieces] == [b"0123456789" * 5, b"abcdefgh"]


def test_directory_is_tried_and_left_empty(tmp_path: Path) -> None:
    check_directory(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((tmp_path / "missing", "No such file"), (file, "Not a directory")):
        with pytest.raises(OSError, match=f"spool in {re.escape(str(path))}: {reason}"):
            check_directory(str(path))


@pytest.mark.parametrize("number", spool_module._NO_TMPFILE)
def test_file_systems_that_only_know_names_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened: list[int] = []
    unnamed = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        opened.append(flags)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return unnamed(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    check_directory(str(tmp_path))
    assert len(opened) == 2
    assert list(tmp_path.iterdir()) == []


# ---- what is held -------------------------------------------------------------------------------


def test_most_memory_since_the_last_look_is_told(tmp_path: Path) -> None:
    held = HeldMemory()
    assert held.take_peak() == 0
    first, second = Spool(None, held), Spool(None, held)
    on_disk = Spool(str(tmp_path), held)
    first.append(b"x" * 10)
    second.append(b"x" * 5)
    on_disk.append(b"x" * 1000)
    first.close()
    assert held.take_peak() == 15
    assert held.take_peak() == 5
    second.close()
    second.close()
    on_disk.close()
    assert held.take_peak() == 5
    assert held.take_peak() == 0
