# SPDX-License-Identifier: Apache-2.0
"""A dump goes on in its own directory only."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.distillation.continuation import FLAG_OF_FIELD, check_continues
from megatron.training.distillation.errors import CacheIdentityError
from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta
from tests.unit_tests.training.distillation.cache_files import encode_payload, rows_of

IDENTIFIERS = {
    "seed": 1,
    "train_samples": 64,
    "blend": {"kind": "blend", "blend": [[1.0, "text"]]},
}
SAVER = SaverSettings(
    k=8, p=0.9, min_k=2, save_dtype="fp16", mbs_save=1, dp_size_save=2, gbs_save=4
)
META = ShardMeta.for_run(IDENTIFIERS, SAVER)


def write(root: Path, name: str, meta: ShardMeta) -> None:
    start = int(name.split("__")[1].split("-")[0])
    payload = encode_payload(rows_of([start]), meta.saver.format_version)
    write_batched_tar(str(root / name), meta.to_bytes(), [(f"{start}-{start + 4}.pt.zst", payload)])


def test_an_empty_directory_and_the_same_dump_are_fine(tmp_path):
    check_continues(str(tmp_path), META)
    write(tmp_path, "dp0__0-4.tar", META)
    check_continues(str(tmp_path), META)


def test_tuples_of_a_blend_are_the_lists_that_json_gives_back(tmp_path):
    write(tmp_path, "dp0__0-4.tar", META)
    blend = {"kind": "blend", "blend": [(1.0, "text")]}
    check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS | {"blend": blend}, SAVER))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 16),
        ("p", None),
        ("min_k", 1),
        ("save_dtype", "bf16"),
        ("mbs_save", 2),
        ("dp_size_save", 1),
        ("gbs_save", 8),
    ],
)
def test_each_saver_setting_is_named_with_both_values(tmp_path, field, value):
    write(tmp_path, "dp1__0-4.tar", META)
    now = ShardMeta.for_run(IDENTIFIERS, replace(SAVER, **{field: value}))
    with pytest.raises(CacheIdentityError) as caught:
        check_continues(str(tmp_path), now)
    before = getattr(SAVER, field)
    assert f"{FLAG_OF_FIELD[field]} is {before!r} there, {value!r} here" in str(caught.value)
    assert str(caught.value).count(" there, ") == 1
    assert str(tmp_path / "dp1__0-4.tar") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("seed", 2), ("train_samples", 32), ("blend", {"kind": "mock"})]
)
def test_each_identifier_is_named_with_both_values(tmp_path, field, value):
    write(tmp_path, "dp0__0-4.tar", META)
    with pytest.raises(CacheIdentityError) as caught:
        check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS | {field: value}, SAVER))
    expected = f"{FLAG_OF_FIELD[field]} is {IDENTIFIERS[field]!r} there, {value!r} here"
    assert expected in str(caught.value)


MANIFEST = RunManifest(
    sequence_length=8,
    tokenizer={"type": "T", "fingerprint": "ab"},
    split="80,20,0",
    package_version="1",
    teacher={"checkpoint": "t", "step": 1},
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 4}, "--seq-length is 8 there, 4 here"),
        ({"split": "1,0,0"}, "--split is '80,20,0' there, '1,0,0' here"),
        ({"tokenizer": {"type": "T", "fingerprint": "cd"}}, "tokenizer is .*'ab'.* there, .*'cd'"),
    ],
)
def test_what_decides_the_numbers_must_be_that_of_the_dump(tmp_path, changes, message):
    write(tmp_path, "dp0__0-4.tar", ShardMeta.for_run(IDENTIFIERS, SAVER, MANIFEST))
    now = ShardMeta.for_run(IDENTIFIERS, SAVER, replace(MANIFEST, **changes))
    with pytest.raises(CacheIdentityError, match=message):
        check_continues(str(tmp_path), now)
    # A dump from before there were manifests may go on.
    check_continues(str(tmp_path), META)


def test_another_teacher_step_or_version_is_a_warning(tmp_path, caplog):
    write(tmp_path, "dp0__0-4.tar", ShardMeta.for_run(IDENTIFIERS, SAVER, MANIFEST))
    later = replace(MANIFEST, teacher={"checkpoint": "t", "step": 2}, package_version="2")
    check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS, SAVER, later))
    (text,) = caplog.messages
    assert "teacher's checkpoint is {'checkpoint': 't', 'step': 1} there" in text
    assert "version of this package is '1' there, '2' here" in text


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2)])
def test_another_format_is_a_warning(tmp_path, caplog, before, now):
    write(tmp_path, "dp0__0-4.tar", ShardMeta.for_run(IDENTIFIERS, _in_format(before)))
    check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS, _in_format(now)))
    (text,) = caplog.messages
    assert (
        f"dp0__0-4.tar differs: version of the cache format is {before} there, {now} here" in text
    )
    caplog.clear()
    check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS, _in_format(before)))
    assert caplog.messages == []
    # Where something else is wrong, that alone is said.
    other = replace(_in_format(now), k=16)
    with pytest.raises(CacheIdentityError) as caught:
        check_continues(str(tmp_path), ShardMeta.for_run(IDENTIFIERS, other))
    assert str(caught.value).count(" there, ") == 1


def _in_format(version: int) -> SaverSettings:
    return replace(SAVER, format_version=version)


def test_the_newest_readable_shard_decides(tmp_path, caplog):
    other = ShardMeta.for_run(IDENTIFIERS, replace(SAVER, k=16))
    write(tmp_path, "dp0__0-4.tar", other)
    write(tmp_path, "dp0__4-8.tar", META)
    (tmp_path / "dp0__8-12.tar").write_bytes(b"damaged")
    (tmp_path / "dp0__12-16.tar.stale").write_bytes(b"set aside")
    check_continues(str(tmp_path), META)
    assert "dp0__8-12.tar is damaged" in caplog.text
    with pytest.raises(CacheIdentityError, match=r"dp0__4-8\.tar.*top-k is 8 there, 16 here"):
        check_continues(str(tmp_path), other)
