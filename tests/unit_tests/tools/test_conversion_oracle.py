# SPDX-License-Identifier: Apache-2.0
"""A converted cache holds what a brute-force cut of the stored entries gives, for every sample."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.distillation import eight_bit
from tests.unit_tests.tools.conversion_cases import (
    DTYPES,
    Case,
    assert_same,
    cut,
    read,
    recorded,
    settings,
    write,
)
from tools.cache.conversion import Converted
from tools.cache.conversion_target import Target
from tools.cache.converted_cache import convert_cache, plan_conversion

WINDOWS = (0, 16), (16, 24)
LAYOUTS = {
    "as it is": {},
    "more ranks": {"dp_size": 4, "mbs": 1},
    "one rank, all at once": {"dp_size": 1, "mbs": 2, "gbs": 24},
    "odd batches": {"dp_size": 3, "mbs": 1, "gbs": 3},
    "shards of one iteration": {"samples_per_shard": 4},
    "all in one shard": {"samples_per_shard": 48},
}
ENTRIES = {
    "all": {},
    "K": {"k": 3},
    "P": {"p": 0.6, "min_k": 2},
    "K and P in bf16": {"k": 5, "p": 0.8, "dtype": "bf16"},
    "fp32": {"dtype": "fp32"},
    "fp16": {"dtype": "fp16"},
}
SOURCES = {
    "v1": Case(version=1, dp=2, mbs=2, p=0.9, min_k=2, dtype="fp16"),
    "v2": Case(dp=2, mbs=1),
    "v2 in bf16 without proof": Case(mbs=2, dtype="bf16", proven=False),
    "v3 of P": Case(version=3, dp=2, p=0.9, min_k=3, dtype="fp16"),
}


def convert(source: Path, target: Path, **wanted) -> None:
    plan = plan_conversion(str(source), str(target), Target(**wanted))
    found = list(convert_cache(plan, jobs=1, spool_dir=None))
    assert all(isinstance(shard, Converted) for shard in found), found
    assert len(found) == plan.shards


def as_asked(case: Case, wanted: dict) -> Case:
    """Return what the metadata of the target must say, worked out from the flags alone."""
    has_p = case.p is not None or "p" in wanted
    return replace(
        case,
        version=wanted["format_version"],
        k=wanted.get("k", case.k),
        p=wanted.get("p", case.p),
        min_k=wanted.get("min_k", case.min_k) if has_p else 1,
        dtype=wanted.get("dtype", case.dtype),
        dp=wanted.get("dp_size", case.dp),
        mbs=wanted.get("mbs", case.mbs),
        gbs=wanted.get("gbs", case.gbs),
        proven=case.proven and case.version != 1,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {name: write(root / name, case, *WINDOWS) for name, case in SOURCES.items()}


GRID = [*itertools.product(SOURCES, (2, 3), ENTRIES, LAYOUTS)]
THIRD = [
    point
    for number, point in enumerate(itertools.product(SOURCES, (2, 3), ENTRIES, range(6)))
    if (sum(divmod(number // 6, 5)) + point[-1]) % 3 == 0
]


def check(source: Path, target: Path, case: Case, wanted: dict) -> None:
    """Convert and compare every sample with what is left of it by brute force."""
    convert(source, target, **wanted)
    found, expected = read(target), as_asked(case, wanted)
    assert found.samples.keys() == set(range(24))
    for number, sample in found.samples.items():
        left = cut(
            recorded(number, case),
            k=wanted.get("k"),
            p=wanted.get("p"),
            min_k=expected.min_k,
            dtype=expected.dtype,
        )
        assert_same(sample, left)
    assert found.dtypes == {DTYPES[expected.dtype]}
    assert all(saver == settings(expected) for saver in found.savers)
    counts = [len(values) for s in found.samples.values() for values in s.values]
    assert max(found.widths.values()) == max(counts)


@pytest.mark.parametrize(("name", "version", "entries", "layout"), THIRD)
def test_every_entry_of_every_sample(sources, tmp_path, name, version, entries, layout):
    wanted = {"format_version": version, **ENTRIES[entries], **[*LAYOUTS.values()][layout]}
    check(sources[name], tmp_path / "cache", SOURCES[name], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version", "entries", "layout"), GRID)
def test_every_combination(sources, tmp_path, name, version, entries, layout):
    wanted = {"format_version": version, **ENTRIES[entries], **LAYOUTS[layout]}
    check(sources[name], tmp_path / "cache", SOURCES[name], wanted)


def test_a_nucleus_of_stored_fp32_is_that_of_the_teacher(tmp_path):
    """All entries are there in fp32, so that all comes out as if it had been dumped so."""
    everything = Case(k=300, version=3, gbs=8)
    wanted = Case(k=20, p=0.7, min_k=2, dtype="fp16", dp=2, mbs=2, gbs=8)
    convert(
        write(tmp_path / "all", everything, (0, 16)),
        tmp_path / "cut",
        format_version=2,
        k=20,
        p=0.7,
        min_k=2,
        dtype="fp16",
        dp_size=2,
        mbs=2,
    )
    write(tmp_path / "dumped", wanted, (0, 16))
    cut_off, dumped = read(tmp_path / "cut"), read(tmp_path / "dumped")
    assert cut_off.samples.keys() == dumped.samples.keys()
    for number, sample in cut_off.samples.items():
        assert_same(sample, dumped.samples[number])
    assert cut_off.savers == dumped.savers
    assert cut_off.metas == dumped.metas
    assert cut_off.widths == dumped.widths


def test_what_is_padded_to_the_widest_is_so_again(tmp_path):
    """By hand: three entries of which P keeps one, two and three."""
    case = Case(k=12, gbs=2)
    convert(write(tmp_path / "all", case, (0, 8)), tmp_path / "cut", p=1e-6)
    found = read(tmp_path / "cut")
    assert set(found.widths.values()) == {1}
    assert all(len(values) == 1 for s in found.samples.values() for values in s.values)


def test_eight_bit_codes_stay_codes_until_a_dtype_is_named(tmp_path):
    source = write(tmp_path / "source", Case(dtype="fp16"), (0, 8))
    convert(source, tmp_path / "coded", format_version=3, eight_bit=True, k=4)
    convert(tmp_path / "coded", tmp_path / "again", dp_size=2)
    convert(tmp_path / "coded", tmp_path / "plain", dtype="fp16")
    convert(tmp_path / "coded", tmp_path / "v2", format_version=2)
    coded, again, plain, v2 = (read(tmp_path / name) for name in ("coded", "again", "plain", "v2"))
    for found, dtype, version in (
        (coded, "uint8", 3),
        (again, "uint8", 3),
        (plain, "fp16", 3),
        (v2, "fp16", 2),
    ):
        saver = found.savers[0]
        assert (saver["save_dtype"], saver["format_version"], saver["k"]) == (dtype, version, 4)
        assert found.samples.keys() == set(range(8))
        for number, sample in found.samples.items():
            assert_same(sample, coded.samples[number])
            assert np.isin(np.concatenate(sample.values), eight_bit.VALUES.astype(float)).all()
    assert {path.stat().st_size for path in (tmp_path / "coded").iterdir()} == {10240}


def test_wider_dtypes_are_exact(tmp_path):
    for dtype in ("fp16", "bf16"):
        source = write(tmp_path / dtype, Case(dtype=dtype), (0, 8))
        convert(source, tmp_path / f"{dtype}-32", dtype="fp32")
        convert(tmp_path / f"{dtype}-32", tmp_path / f"{dtype}-back", dtype=dtype)
        wide, back = read(tmp_path / f"{dtype}-32"), read(tmp_path / f"{dtype}-back")
        assert wide.dtypes == {torch.float32}
        for number in range(8):
            assert_same(wide.samples[number], recorded(number, Case(dtype=dtype)))
        files = [sorted(path.iterdir()) for path in (source, tmp_path / f"{dtype}-back")]
        assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in files[1]]
        assert back.savers[0]["save_dtype"] == dtype
