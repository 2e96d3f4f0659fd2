# SPDX-License-Identifier: Apache-2.0
"""The file verbs, each on a local directory, on one behind msc://, and on a real S3 server."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from megatron.training.distillation import object_store, storage
from tests.s3_server import file_profile

# The server's answers take their time on a machine that is busy with other jobs.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["local", "file profile", "s3"])
def place(request, tmp_path, monkeypatch):
    """A directory of the cache, as a path or as a URL, and where its files really lie."""
    folder = tmp_path / "cache"
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        monkeypatch.setenv("MSC_CONFIG", str(server.config))
        folder = server.objects / tmp_path.name
        root = server.url(tmp_path.name)
    elif request.param == "file profile":
        pytest.importorskip("multistorageclient")
        profile = f"test-{tmp_path.name.replace('_', '-')}"
        config = tmp_path / "msc.json"
        config.write_text(json.dumps({"profiles": {profile: file_profile(tmp_path)}}))
        monkeypatch.setenv("MSC_CONFIG", str(config))
        root = f"msc://{profile}/cache"
    else:
        root = str(folder)
    folder.mkdir()
    return root, folder


@pytest.fixture
def root(place) -> str:
    return place[0]


@pytest.fixture
def folder(place) -> Path:
    return place[1]


def put(path: str, content: bytes) -> None:
    storage.publish(path, lambda stream: stream.write(content))


def get(path: str) -> bytes:
    with storage.open_read(path) as stream:
        return stream.read()


def test_paths():
    assert storage.is_remote("msc://profile/dir")
    assert not storage.is_remote("/data/msc://dir")
    assert storage.join("msc://profile/dir/", "x.tar") == "msc://profile/dir/x.tar"
    assert storage.join("/data/dir/", "x.tar") == "/data/dir/x.tar"


def test_a_revision_tells_what_was_written_again(root):
    path = storage.join(root, "x.tar")
    with pytest.raises(OSError):
        storage.revision(path)
    put(path, b"one")
    first = storage.revision(path)
    assert first.size == 3
    assert abs(first.modified - time.time()) < 60
    assert storage.revision(path) == first
    put(path, b"two")
    assert storage.revision(path) != first


def test_publish_read_list_exists(root):
    path = storage.join(root, "x.tar")
    assert storage.list_names(root) == []
    assert not storage.exists(path)
    put(path, b"one")
    assert storage.exists(path)
    put(path, b"second")
    put(storage.join(root, "a.tar"), b"")
    assert storage.list_names(root) == ["a.tar", "x.tar"]
    assert get(path) == b"second"
    with storage.open_read(path) as stream:
        assert stream.seek(0, os.SEEK_END) == 6
        stream.seek(3)
        assert stream.read(2) == b"on"


def test_listing_is_not_recursive(root, folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "deep.tar").write_bytes(b"x")
    put(storage.join(root, "x.tar"), b"x")
    assert storage.list_names(root) == ["inner", "x.tar"]


def test_listing_by_prefix(root, folder):
    names = ["dp1__0-8.tar", "dp1__8-16.tar", "dp10__0-8.tar", "dp11__0-8.tar", "dp2__0-8.tar"]
    names += ["dp1__0-8.tar.stale", "dp1_", "dp0__0-8.tar", "notes"]
    for name in names:
        (folder / name).write_bytes(b"x")
    assert storage.list_names(root) == sorted(names)
    wanted = ["dp1__0-8.tar", "dp1__0-8.tar.stale", "dp1__8-16.tar"]
    assert storage.list_names(root, "dp1__") == wanted
    assert storage.list_names(root, "dp3__") == []


def test_reading_at_any_position(root):
    path = storage.join(root, "x.tar")
    content = bytes(range(256)) * 40
    put(path, content)
    with storage.open_read(path) as stream:
        assert (stream.readable(), stream.seekable(), stream.tell()) == (True, True, 0)
        assert stream.read(3) == content[:3]
        assert stream.seek(10_000) == 10_000
        assert stream.read(1000) == content[10_000:]
        assert stream.read(1000) == b""
        assert stream.seek(-6, os.SEEK_END) == len(content) - 6
        assert stream.read() == content[-6:]
        assert stream.seek(5) == 5
        assert stream.seek(2, os.SEEK_CUR) == 7
        assert stream.read(1) == content[7:8]
        assert stream.tell() == 8
        assert not stream.closed
    assert stream.closed


def test_a_missing_file_is_named(root):
    path = storage.join(root, "x.tar")
    with pytest.raises(FileNotFoundError, match=r"x\.tar"), storage.open_read(path) as stream:
        stream.read(1)
    with pytest.raises(FileNotFoundError, match=r"x\.tar"):
        storage.set_aside(path)


def test_a_failed_publish_changes_nothing(root):
    path = storage.join(root, "x.tar")
    put(path, b"old")

    def fail(stream):
        stream.write(b"half of the new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        storage.publish(path, fail)
    assert get(path) == b"old"
    assert storage.list_names(root) == ["x.tar"]


def test_set_aside_overwrites_nothing(root):
    path = storage.join(root, "dp0__0-8.tar")
    expected = ["dp0__0-8.tar.stale", "dp0__0-8.1.tar.stale", "dp0__0-8.2.tar.stale"]
    for number, name in enumerate(expected):
        put(path, f"{number}".encode())
        assert storage.set_aside(path) == storage.join(root, name)
        assert not storage.exists(path)
    assert storage.list_names(root) == sorted(expected)
    assert [get(storage.join(root, name)) for name in expected] == [b"0", b"1", b"2"]


def test_makedirs(root):
    inner = storage.join(root, "a/b")
    storage.makedirs(inner)
    storage.makedirs(inner)
    put(storage.join(inner, "x.tar"), b"x")
    assert storage.list_names(inner) == ["x.tar"]


def test_errors_name_the_path(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"cannot list the directory.*missing"):
        storage.list_names(missing)
    with pytest.raises(FileNotFoundError, match=r"cannot write the file.*missing/x.tar"):
        put(os.path.join(missing, "x.tar"), b"")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        storage.list_names(str(tmp_path / "file"))


@pytest.mark.parametrize("place", ["file profile"], indirect=True)
def test_file_profile_is_the_local_file_system(root, folder):
    """The client would write without fsync and take a directory it cannot read for an empty one."""
    assert object_store.local_path(root) == str(folder)
    with pytest.raises(FileNotFoundError, match=r"cannot list the directory.*msc://.*missing"):
        storage.list_names(storage.join(root, "missing"))


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_store_has_no_directories(root):
    assert object_store.local_path(root) is None
    assert storage.list_names(storage.join(root, "missing")) == []


@pytest.mark.parametrize("place", ["local", "file profile"], indirect=True)
def test_local_publish_is_durable_before_it_is_visible(root, monkeypatch):
    events = []
    path = storage.join(root, "x.tar")
    fsync, replace = os.fsync, os.replace

    def log_fsync(descriptor):
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("fsync directory" if is_directory else "fsync file")
        fsync(descriptor)

    def log_replace(source, target):
        events.append((os.path.basename(source), os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    put(path, b"x")
    assert events == ["fsync file", ("x.tar.tmp", "x.tar"), "fsync directory"]
