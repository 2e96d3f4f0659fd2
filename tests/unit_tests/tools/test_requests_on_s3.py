# SPDX-License-Identifier: Apache-2.0
"""What the model says that a reader asks an object store for, against a real S3 server."""

import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron.training.distillation import object_store, read_ahead, storage
from megatron.training.distillation.shard_reader import LoadLayout, TeacherRowReader
from megatron.training.distillation.targets import IterationTargets
from tests.unit_tests.tools.settings import setting
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, write_large_shard
from tools.load_plan.setting import Batches
from tools.load_plan.simulation import simulate

multistorageclient = pytest.importorskip("multistorageclient")

GBS, MEMBERS, SHARDS = 4, 16, 3
SHARD = GBS * MEMBERS
PART = 96 * 1024
"""Small enough for a shard to have several."""
SMALL, PIECE = 4096, 64 * 1024


class Requests:
    """Counts what the client asks the server for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from botocore.client import BaseClient

        self.count = self.bytes = 0
        lock = threading.Lock()
        original = BaseClient._make_api_call

        def call(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
            answer = original(client, operation, parameters)
            with lock:
                self.count += operation in ("GetObject", "HeadObject")
                self.bytes += answer["ContentLength"] if operation == "GetObject" else 0
            return answer

        monkeypatch.setattr(BaseClient, "_make_api_call", call)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    for start in range(0, SHARDS * SHARD, SHARD):
        write_large_shard(root, start, start + SHARD, gbs=GBS)
    return root


def url_of(server: Any, cache: Path, folder: Path, name: str, cached: bool) -> str:
    """Put the cache into the bucket, and return its URL through a profile with small parts."""
    for path in cache.iterdir():
        target = server.objects / name / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    options = {"multipart_threshold": PART, "multipart_chunksize": PART, "io_chunksize": PART}
    profile = server.profile(response_checksum_validation="when_required", **options)
    config: dict[str, Any] = {"profiles": {f"{server.name}-{name}": profile}}
    if cached:
        profile["caching_enabled"] = True
        lines = {"size": "1G", "location": str(folder / "msc"), "cache_line_size": "1M"}
        config["cache"] = lines
    path = folder / "msc.json"
    path.write_text(json.dumps(config))
    return f"msc://{server.name}-{name}/{name}"


def wanted_of(cache: Path, **changes: Any) -> Any:
    """Return the setting of this cache, whose members are taken to be equal."""
    path = min(cache.iterdir())
    with tarfile.open(path) as tar:
        _, *members = tar.getmembers()
    head = members[0].offset
    read = (path.stat().st_size - head) // MEMBERS
    return setting(
        gbs=GBS, mbs=GBS, save=Batches(dp=1, mbs=GBS, gbs=GBS), save_interval=MEMBERS,
        train_samples=SHARDS * SHARD, kind="object", seq_length=64,
        stored_bytes_per_token=(read - 512) / GBS / 64, header_bytes=512, metadata_bytes=head,
        part_bytes=PART, single_part_bytes=PART, small_range_bytes=SMALL, piece_bytes=PIECE,
        cache_line_bytes=1 << 20, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("start", [0, 9 * GBS])
@pytest.mark.parametrize("way", ["memory", "too large", "cache"])
def test_requests_and_bytes(s3_server, monkeypatch, tmp_path, cache, way, start):
    name = f"{way.replace(' ', '-')}-{start}"
    url = url_of(s3_server, cache, tmp_path, name, way == "cache")
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setattr(object_store, "SMALL_RANGE_BYTES", SMALL)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", PIECE)
    limit = PART if way == "too large" else 10**9
    if way == "too large":
        original = multistorageclient.StorageClient.open

        def open_with_less_memory(client: Any, *arguments: Any, **options: Any) -> Any:
            return original(client, *arguments, **{"memory_load_limit": limit, **options})

        monkeypatch.setattr(multistorageclient.StorageClient, "open", open_with_less_memory)
    names = storage.list_names(url)
    requests = Requests(monkeypatch)
    reader = TeacherRowReader(
        url, LoadLayout(dp_rank=0, dp_size=1, mbs=GBS, gbs=GBS),
        expected_identifiers=IDENTIFIERS, decode_threads=1, msc_prefetch_depth=1, names=names,
    )  # fmt: skip
    items = list(reader.iterations(start))[:-1]
    assert all(isinstance(item, IterationTargets) for item in items)
    wanted = wanted_of(cache, node_cache=way == "cache", whole_shard_bytes=limit, prefetch_depth=1)
    trace = simulate(wanted, start=start, iterations=len(items))
    assert requests.count == trace.store_requests
    # An archive is filled up at its end, and not all members are read to the next header.
    assert requests.bytes == pytest.approx(trace.store_bytes, rel=0.02)
