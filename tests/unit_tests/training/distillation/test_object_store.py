# SPDX-License-Identifier: Apache-2.0
"""What a real S3 server's refusals, absences and returns become, and that objects appear whole."""

import errno
import json
import logging
import os
import threading
import time
import traceback

import pytest

from megatron.training.distillation import object_store, storage, storage_retry
from megatron.training.distillation.store_errors import is_transient

botocore = pytest.importorskip("botocore.exceptions")
multistorageclient = pytest.importorskip("multistorageclient")


def put(url: str, content: bytes) -> None:
    storage.publish(url, lambda stream: stream.write(content))


def get(url: str) -> bytes:
    with storage.open_read(url) as stream:
        return stream.read()


VERBS = {
    "list": lambda url: storage.list_names(url),
    "list by prefix": lambda url: storage.list_names(url, "dp0__"),
    "write": lambda url: put(f"{url}/x.tar", b"x"),
    "open": lambda url: get(f"{url}/x.tar"),
    "copy": lambda url: object_store.move(f"{url}/x.tar", f"{url}/y.tar"),
    "delete": lambda url: storage.set_aside(f"{url}/x.tar"),
}

# ---- what the store refuses --------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("profile", "kind", "advice"),
    [
        ("-wrong", PermissionError, r"Check the credentials .* MSC_CONFIG"),
        ("-missing", FileNotFoundError, r"does not exist.*Check that the bucket .* exists"),
    ],
)
def test_refusals_come_at_once_and_say_where_and_what_to_do(
    server, caplog, verb, profile, kind, advice
):
    url = server.url("refused", profile=profile)
    began = time.monotonic()
    with pytest.raises(kind, match=advice) as caught:
        VERBS[verb](url)
    assert time.monotonic() - began < 20
    assert url in str(caught.value)
    assert "Trying again" not in caplog.text
    told = caplog.text + "".join(traceback.format_exception(caught.value))
    for secret in (server.secret_key, server.wrong_secret):
        assert secret not in told


def test_a_profile_that_does_not_exist(server):
    with pytest.raises(
        OSError, match=r"Profile \"nowhere\" not found.*in the file that MSC_CONFIG"
    ) as caught:
        storage.list_names("msc://nowhere/cache")
    assert "msc://nowhere/cache" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"credentials_provider": "SECRET"}, r"credentials_provider breaks the rule 'type'"),
        ({"storage_provider": {"type": "s4", "SECRET": ""}}, r"breaks the rule"),
        ({"credentials_provider": {"type": "S3Credentials", "options": {}}}, r"access_key"),
    ],
)
def test_a_broken_profile_is_told_without_what_is_in_it(
    server, tmp_path, monkeypatch, change, told
):
    name = tmp_path.name.replace("_", "-")
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {name: {**server.profile(), **change}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    with pytest.raises(OSError, match=told) as caught:
        storage.exists(f"msc://{name}/x.tar")
    trace = "".join(traceback.format_exception(caught.value))
    assert "SECRET" not in trace
    assert server.secret_key not in trace


def client_error(status: int, code: str = "SomeCode") -> Exception:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.ClientError(answer, "GetObject")


def wrapped(cause: Exception, kind: type[Exception] = RuntimeError) -> Exception:
    error = kind("Failed to GET object(s)")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (wrapped(botocore.EndpointConnectionError(endpoint_url="x")), True),
        (wrapped(botocore.ConnectTimeoutError(endpoint_url="x")), True),
        (botocore.ReadTimeoutError(endpoint_url="x"), True),
        (botocore.ConnectionClosedError(endpoint_url="x"), True),
        (
            wrapped(
                wrapped(botocore.IncompleteReadError(actual_bytes=1, expected_bytes=2)), OSError
            ),
            True,
        ),
        (botocore.FlexibleChecksumError(error_msg="x"), True),
        (wrapped(client_error(500)), True),
        (client_error(503), True),
        (wrapped(client_error(429)), True),
        (multistorageclient.types.RetryableError("busy"), True),
        (OSError("Failed to download file x"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (RuntimeError("a store that msc reports in words alone"), True),
        (wrapped(client_error(403), PermissionError), False),
        (client_error(403, "SignatureDoesNotMatch"), False),
        (client_error(404, "NoSuchBucket"), False),
        (wrapped(client_error(400)), False),
        (wrapped(client_error(501), NotImplementedError), False),
        (wrapped(FileNotFoundError("gone"), OSError), False),
        (wrapped(botocore.NoCredentialsError()), False),
        (OSError(errno.ESTALE, "it changed"), False),
        (ValueError("start_after (b) must be before end_at (a)!"), False),
    ],
    ids=repr,
)
def test_what_is_tried_again(error, expected):
    assert is_transient(error) is expected


def test_what_makes_no_sense_to_the_client_is_an_error_of_the_store(server, monkeypatch):
    client, key = object_store._resolve(server.url("cache"))

    def refuse(*args, **options):
        raise ValueError("Symlink cycle detected at: cache")

    monkeypatch.setattr(client, "list", refuse)
    monkeypatch.setattr(object_store, "_resolve", lambda url: (client, key))
    with pytest.raises(OSError, match="cannot list: Symlink cycle detected") as caught:
        storage.list_names(server.url("cache"))
    assert server.url("cache") in str(caught.value)


# ---- a store that is away for a moment ---------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_outlives_a_restart(server, pauses, caplog, verb):
    url = server.url(f"restart-{verb.replace(' ', '-')}")
    put(f"{url}/x.tar", b"x")
    server.stop()
    pauses.extend([lambda: None, server.start])
    with caplog.at_level(logging.WARNING):
        VERBS[verb](url)
    told = [message for message in caplog.messages if "Trying again" in message]
    assert len(told) == 2
    assert all(url in message and "Could not connect" in message for message in told)
    expected = {"copy": ["y.tar"], "delete": ["x.tar.stale"]}.get(verb, ["x.tar"])
    assert storage.list_names(url) == expected


def test_a_real_restart(server, caplog):
    """Without any stand-in: the pauses are those of a dump."""
    url = server.url("real-restart/x.tar")
    server.stop()
    back = threading.Timer(2.0, server.start)
    back.start()
    put(url, b"content")
    back.join()
    assert get(url) == b"content"
    assert "Trying again" in caplog.text


def test_a_store_that_stays_away_is_an_error_with_a_reason(server, monkeypatch):
    monkeypatch.setattr(storage_retry, "PATIENCE_SECONDS", 0.5)
    server.stop()
    url = server.url("away/x.tar")
    with pytest.raises(OSError, match=r"Could not connect.*store can be reached") as caught:
        put(url, b"x")
    assert url in str(caught.value)


def test_an_upload_that_is_repeated_is_one_whole_object(server, pauses, calls):
    url = server.url("repeated/x.tar")
    calls.append("fail PutObject")
    put(url, b"content" * 1000)
    assert calls.count("PutObject") == 2
    assert get(url) == b"content" * 1000


def test_a_delete_whose_answer_was_lost_is_done(server, pauses, monkeypatch):
    from botocore.client import BaseClient

    url = server.url("lost-answer")
    put(f"{url}/x.tar", b"x")
    original = BaseClient._make_api_call
    lost = []

    def call(self, operation, parameters):
        answer = original(self, operation, parameters)
        if operation == "DeleteObject" and not lost:
            lost.append(operation)
            raise botocore.ReadTimeoutError(endpoint_url="x")
        return answer

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    assert storage.set_aside(f"{url}/x.tar") == f"{url}/x.tar.stale"
    assert lost
    assert storage.list_names(url) == ["x.tar.stale"]


# ---- reading -----------------------------------------------------------------------------------


@pytest.fixture
def by_ranges(monkeypatch):
    """Have every object be too large to be fetched whole."""
    client = multistorageclient.StorageClient
    original = client.open
    monkeypatch.setattr(
        client, "open", lambda self, *a, **k: original(self, *a, **k, memory_load_limit=0)
    )


CONTENT = os.urandom(50_000)


def test_a_failed_download_is_repeated(server, pauses, calls):
    url = server.url("repeated-download/x.tar")
    put(url, CONTENT)
    calls.append("fail GetObject")
    assert get(url) == CONTENT
    assert calls.count("GetObject") == 2


def test_an_object_that_was_fetched_outlives_its_store(server):
    url = server.url("fetched/x.tar")
    put(url, CONTENT)
    with storage.open_read(url) as stream:
        assert stream.read(10) == CONTENT[:10]
        server.stop()
        stream.seek(100)
        assert stream.read() == CONTENT[100:]


def test_a_large_object_goes_on_where_it_was(server, pauses, calls, by_ranges):
    url = server.url("large/x.tar", profile="-ranges")
    put(url, CONTENT)
    with storage.open_read(url) as stream:
        assert stream.read(1000) == CONTENT[:1000]
        server.stop()
        pauses.append(server.start)
        assert stream.read(1000) == CONTENT[1000:2000]
        assert stream.read(1000) == CONTENT[2000:3000]
    # One range a read, besides the one that failed.
    assert calls.count("GetObject") == 4


def test_an_object_replaced_by_a_longer_one_is_not_read_on(server, pauses, by_ranges):
    url = server.url("replaced/x.tar", profile="-ranges")
    put(url, CONTENT)
    with storage.open_read(url) as stream:
        stream.read(1000)
        server.stop()
        (server.objects / "replaced" / "x.tar").write_bytes(CONTENT + b"more")
        pauses.append(server.start)
        with pytest.raises(OSError, match=r"has 50004 bytes now and had 50000") as caught:
            stream.read(1000)
    assert caught.value.errno == errno.ESTALE
    assert url in str(caught.value)


def test_closing_does_not_wait_for_a_store_that_is_away(server):
    server.stop()
    began = time.monotonic()
    stream = storage.open_read(server.url("away/x.tar"))
    stream.close()
    assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match=r"after it was closed"):
        stream.read(1)
    opening = [thread for thread in threading.enumerate() if thread.name == "object-store-open"]
    for thread in opening:
        thread.join(20)
        assert not thread.is_alive()


# ---- publication -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "size", "operations"),
    [
        ("", 1000, ["PutObject"]),
        ("-parts", 11 * 2**20, ["CreateMultipartUpload", *["UploadPart"] * 3]),
    ],
)
def test_an_object_appears_whole_in_one_upload(server, calls, profile, size, operations):
    url = server.url(f"whole{profile}/x.tar", profile=profile)
    content = os.urandom(size)
    seen, done = [], threading.Event()

    def watch() -> None:
        path = server.objects / f"whole{profile}"
        while not done.is_set():
            # Through S3, as another client sees it; the server's own files are its own affair.
            seen.extend(
                item.content_length
                for item in multistorageclient.list(server.url(path.name + "/"))
                if item.key.endswith("x.tar")
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    put(url, content)
    done.set()
    watcher.join()
    assert set(seen) <= {size}
    written = [call for call in calls if not call.startswith(("List", "Head", "Get"))]
    closing = ["CompleteMultipartUpload"] if profile else []
    assert written == operations + closing
    assert get(url) == content


def test_a_listing_asks_for_its_prefix_only(server, calls):
    folder = server.objects / "many"
    folder.mkdir()
    for rank in range(12):
        for start in range(300):
            (folder / f"dp{rank}__{start}-{start + 1}.tar").write_bytes(b"x")
    url = server.url("many")
    assert len(storage.list_names(url)) == 3600
    whole = len(calls)
    calls.clear()
    assert len(storage.list_names(url, "dp1__")) == 300
    # One look whether there is a directory, one page.
    assert calls == ["ListObjectsV2", "ListObjectsV2"]
    assert whole >= 5
