# SPDX-License-Identifier: Apache-2.0
"""Readers that do not know format v3 fail on it, and never take it for something else."""

import argparse
import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
import zstandard

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.payload import decode_packed_rows
from megatron.training.distillation.utils import SaverSettings, ShardMeta, member_name
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS
from tests.unit_tests.training.distillation.payload_v3_cases import make_member
from tests.unit_tests.training.distillation.payload_v3_golden import DIRECTORY, GOLDEN
from tests.unit_tests.training.distillation.wheel_modules import wheel_module

GBS = 4


def write_shard(path: Path, names: list[str]) -> None:
    """Write an archive of metadata and of members with these names."""
    saver = SaverSettings(
        k=5, p=None, min_k=1, save_dtype="fp16", mbs_save=1, dp_size_save=1, gbs_save=GBS
    )
    meta = json.loads(ShardMeta.for_run(IDENTIFIERS, saver).to_bytes())
    meta["saver"]["format_version"] = 3
    members = {"_meta.json": json.dumps(meta).encode()}
    members |= {name: make_member(300, GBS, 5).encode() for name in names}
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _read_with_the_wheel(rank: int, world_size: int, root: Path) -> None:
    """Give the wheel's reader a shard under our names, under its own, and a payload."""
    from megatron.training import arguments as megatron_arguments
    from megatron.training import global_vars

    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    global_vars.set_args(parser.parse_args(["--mock-data", "--seed", "1", "--seq-length", "300"]))
    utils = wheel_module("megatron.training.distillation.utils_logits", "utils_logits")
    reader = wheel_module("wheel_cached_logits_loss", "cached_logits_loss")

    def read(directory: str) -> None:
        list(reader.TeacherTarDataset(str(root / directory), 0, 0, 1))

    with pytest.raises(FileNotFoundError, match="No batched tar shards for cp0_dp0"):
        read("ours")
    with pytest.raises(RuntimeError, match="Data does not align"):
        read("renamed")
    # Nor without the check of metadata that stopped it: neither by its name nor by its content.
    shard = str(root / "renamed" / "cp0_dp0__1.tar")
    with pytest.raises(FileNotFoundError, match="No log-probs member found"):
        utils.load_log_probs_from_tar(shard, 0)
    shard = str(root / "renamed too" / "cp0_dp0__1.tar")
    with pytest.raises(zstandard.ZstdError):
        utils.load_log_probs_from_tar(shard, 0)


def test_the_wheels_reader(tmp_path: Path) -> None:
    names = [member_name(0, GBS), member_name(GBS, 2 * GBS)]
    for directory, shard, members in (
        ("ours", "dp0__0-8.tar", names),
        ("renamed", "cp0_dp0__1.tar", names),
        ("renamed too", "cp0_dp0__1.tar", ["0.pt.zst", "1.pt.zst"]),
    ):
        (tmp_path / directory).mkdir()
        write_shard(tmp_path / directory / shard, members)
    run_ranks(1, _read_with_the_wheel, tmp_path, timeout=100)  # most of it imports


@pytest.mark.parametrize("name", GOLDEN)
def test_readers_of_version_2(name: str) -> None:
    """A zstd frame of a torch archive, in whatever way one is read."""
    data = (DIRECTORY / name).read_bytes()
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompress(data)
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    with (
        pytest.raises(zstandard.ZstdError),
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream,
    ):
        stream.read()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(data), weights_only=True)
    with pytest.raises(CacheFormatError):
        decode_packed_rows(data)
