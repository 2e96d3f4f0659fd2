# SPDX-License-Identifier: Apache-2.0
"""The file verbs, each on a local directory and on the same directory behind msc://."""

import json
import os
import stat

import pytest

from megatron.training.distillation import storage


@pytest.fixture(params=["local", "msc"])
def root(request, tmp_path, monkeypatch):
    """A directory of the cache, as a path or as a URL, that lies in ``tmp_path / "cache"``."""
    (tmp_path / "cache").mkdir()
    if request.param == "local":
        return str(tmp_path / "cache")
    pytest.importorskip("multistorageclient")
    profile = f"test-{tmp_path.name.replace('_', '-')}"
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {profile: {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    return f"msc://{profile}/cache"


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


def test_listing_is_not_recursive(root, tmp_path):
    (tmp_path / "cache" / "inner").mkdir()
    (tmp_path / "cache" / "inner" / "deep.tar").write_bytes(b"x")
    put(storage.join(root, "x.tar"), b"x")
    assert storage.list_names(root) == ["inner", "x.tar"]


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


def test_local_publish_is_durable_before_it_is_visible(tmp_path, monkeypatch):
    events = []
    path = str(tmp_path / "x.tar")
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
