# SPDX-License-Identifier: Apache-2.0
"""The shard that the checkpoint worker writes."""

import errno
import functools
import io
import itertools
import json
import os
import pickle
import re
import tarfile

import pytest

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training.distillation import shard_writer, storage, storage_retry
from megatron.training.distillation.shard_writer import write_batched_tar

META = b'{"saver":{}}'
MEMBERS = [("0-8.pt.zst", b"first"), ("8-16.pt.zst", b"second" * 200)]


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(path) -> dict[str, bytes]:
    """Return the members of a shard, its metadata without the seal."""
    with tarfile.open(path) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    meta = json.loads(members["_meta.json"])
    assert meta.pop("content")["name"] == path.name
    return members | {"_meta.json": json.dumps(meta, separators=(",", ":")).encode()}


# ---- the write -----------------------------------------------------------------------------


def test_writes_metadata_first_then_the_members(tmp_path):
    path = tmp_path / "dp0__0-16.tar"
    write_batched_tar(str(path), META, MEMBERS, False)
    assert list(contents(path).items()) == [("_meta.json", META), *MEMBERS]
    assert names(path.parent) == ["dp0__0-16.tar"]


def test_directory_that_is_gone_is_not_made_again(tmp_path):
    gone = tmp_path / "unmounted"
    with pytest.raises(FileNotFoundError, match=str(gone)):
        write_batched_tar(str(gone / "dp0__0-16.tar"), META, MEMBERS, False)
    assert not gone.exists()


def test_same_input_gives_the_same_bytes(tmp_path):
    path = tmp_path / "dp0__0-16.tar"
    write_batched_tar(str(path), META, MEMBERS, False)
    first = path.read_bytes()
    write_batched_tar(str(path), META, MEMBERS, False)
    assert path.read_bytes() == first
    assert names(tmp_path) == ["dp0__0-16.tar"]


def test_nothing_to_write(tmp_path):
    write_batched_tar("", META, [], False)
    write_batched_tar(str(tmp_path / "never" / "dp0__0-16.tar"), META, [], False)
    assert names(tmp_path) == []


class FailingDisk:
    """Fails the next fsyncs with these error numbers, one each."""

    def __init__(self, monkeypatch, *errors):
        self.errors = list(errors)
        self.pauses = []
        fsync = os.fsync

        def failing_fsync(descriptor):
            if self.errors:
                number = self.errors.pop(0)
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing_fsync)
        patient = functools.partial(storage_retry.retry, pause=self.pauses.append)
        monkeypatch.setattr(shard_writer, "retry", patient)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_what_may_pass_is_tried_again(tmp_path, monkeypatch, caplog, number):
    disk = FailingDisk(monkeypatch, number, number)
    old = tmp_path / "dp0__4-24.tar"
    old.write_bytes(b"")
    path = tmp_path / "dp0__0-16.tar"
    write_batched_tar(str(path), META, MEMBERS, False)
    assert disk.errors == []
    assert len(disk.pauses) == 2
    assert list(contents(path).items()) == [("_meta.json", META), *MEMBERS]
    assert names(tmp_path) == ["dp0__0-16.tar", "dp0__4-24.tar.stale"]
    told = [message for message in caplog.messages if "Trying again" in message]
    assert len(told) == 2
    assert all(str(path) in message and os.strerror(number) in message for message in told)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.EFBIG])
def test_what_stays_wrong_is_raised_at_once(tmp_path, monkeypatch, number):
    disk = FailingDisk(monkeypatch, number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        write_batched_tar(str(tmp_path / "dp0__0-16.tar"), META, MEMBERS, False)
    assert caught.value.errno == number
    assert disk.pauses == []
    assert names(tmp_path) == []


def test_full_disk_is_an_error_in_the_end(tmp_path, monkeypatch):
    FailingDisk(monkeypatch, *[errno.ENOSPC] * 1000)
    ticks = itertools.count(step=60.0)
    patient = functools.partial(shard_writer.retry, clock=lambda: next(ticks))
    monkeypatch.setattr(shard_writer, "retry", patient)
    with pytest.raises(OSError, match="No space left on device"):
        write_batched_tar(str(tmp_path / "dp0__0-16.tar"), META, MEMBERS, False)
    assert names(tmp_path) == []


def test_travels_to_a_worker_process():
    arguments = ("/cache/dp0__0-16.tar", META, MEMBERS, False)
    function, found = pickle.loads(pickle.dumps((write_batched_tar, arguments)))
    assert function is write_batched_tar
    assert found == arguments


def test_old_shards_inside_the_new_one_are_set_aside_before_it_appears(tmp_path, monkeypatch):
    old = ["dp0__0-8.tar", "dp0__8-16.tar"]
    kept = [
        "dp0__16-24.tar",
        "dp1__0-8.tar",
        "dp10__0-8.tar",
        "dp0__0-16.tar",  # the same name is replaced in place
        "dp0__0-4.tar.tmp",
        "dp0__0-4.tar.stale",
        "notes.txt",
    ]
    for name in (*old, *kept):
        (tmp_path / name).write_bytes(name.encode())
    at_publish = []
    publish = storage.publish

    def watch(path, write):
        at_publish.extend(names(tmp_path))
        publish(path, write)

    monkeypatch.setattr(storage, "publish", watch)
    write_batched_tar(str(tmp_path / "dp0__0-16.tar"), META, MEMBERS, False)
    stale = [f"{name}.stale" for name in old]
    assert at_publish == names(tmp_path) == sorted(stale + kept)
    for name in old:
        assert (tmp_path / f"{name}.stale").read_bytes() == name.encode()
    assert contents(tmp_path / "dp0__0-16.tar")["0-8.pt.zst"] == b"first"


def test_an_old_shard_that_sticks_out_keeps_what_it_alone_owns(tmp_path):
    spans = [(start, start + 4) for start in range(0, 24, 4)]
    old = [(f"{a}-{b}.pt.zst", f"old {a}".encode()) for a, b in spans]
    write_batched_tar(str(tmp_path / "dp0__0-24.tar"), META, old, False)
    new = [("8-12.pt.zst", b"new 8"), ("12-16.pt.zst", b"new 12")]
    write_batched_tar(str(tmp_path / "dp0__8-16.tar"), b"{}", new, False)
    assert names(tmp_path) == [
        "dp0__0-24.tar.stale",
        "dp0__0-8.tar",
        "dp0__16-24.tar",
        "dp0__8-16.tar",
    ]
    meta = {"_meta.json": META}
    assert contents(tmp_path / "dp0__0-8.tar") == meta | dict(old[:2])
    assert contents(tmp_path / "dp0__16-24.tar") == meta | dict(old[4:])
    assert contents(tmp_path / "dp0__8-16.tar") == {"_meta.json": b"{}"} | dict(new)


def test_a_damaged_shard_that_sticks_out_is_set_aside_with_a_warning(tmp_path, caplog):
    (tmp_path / "dp0__12-20.tar").write_bytes(b"no tar")
    write_batched_tar(str(tmp_path / "dp0__0-16.tar"), META, MEMBERS, False)
    assert names(tmp_path) == ["dp0__0-16.tar", "dp0__12-20.tar.stale"]
    assert "Samples 16 to 19 were recorded in" in caplog.text
    assert "dp0__12-20.tar alone, which is damaged" in caplog.text


def test_an_iteration_is_never_cut(tmp_path):
    write_batched_tar(str(tmp_path / "dp0__0-16.tar"), META, MEMBERS, False)
    with pytest.raises(ValueError, match=r"8-16.pt.zst of .* with another global batch size"):
        write_batched_tar(str(tmp_path / "dp0__12-24.tar"), META, [("12-24.pt.zst", b"x")], False)
    assert names(tmp_path) == ["dp0__0-16.tar"]


def test_a_failed_write_is_raised_and_leaves_the_old_shard(tmp_path, monkeypatch):
    path = tmp_path / "dp0__0-16.tar"
    write_batched_tar(str(path), META, MEMBERS, False)

    def too_large(*_):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(shard_writer, "write_shard_tar", too_large)
    with pytest.raises(OSError, match=r"File too large.*dp0__0-16.tar"):
        write_batched_tar(str(path), META, MEMBERS[:1], False)
    assert len(contents(path)) == 3
    assert names(tmp_path) == ["dp0__0-16.tar"]


def test_object_storage_is_enabled_in_the_worker(tmp_path, monkeypatch):
    pytest.importorskip("multistorageclient")
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    config = {"profiles": {"test-shard-writer": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setattr(MultiStorageClientFeature, "_enabled", False)
    url = "msc://test-shard-writer/cache"
    storage.makedirs(url)
    write_batched_tar(f"{url}/dp0__0-8.tar", META, MEMBERS[:1], True)
    assert MultiStorageClientFeature.is_enabled()
    write_batched_tar(f"{url}/dp0__0-16.tar", META, MEMBERS, True)
    assert storage.list_names(url) == ["dp0__0-16.tar", "dp0__0-8.tar.stale"]
    with storage.open_read(f"{url}/dp0__0-16.tar") as stream:
        archive = io.BytesIO(stream.read())
    with tarfile.open(fileobj=archive) as tar:
        assert tar.getnames() == ["_meta.json", "0-8.pt.zst", "8-16.pt.zst"]
