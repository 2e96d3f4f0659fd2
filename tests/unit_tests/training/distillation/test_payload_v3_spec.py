# SPDX-License-Identifier: Apache-2.0
"""Format v3 is what its specification says: kept files, and a reader written from the text."""

import importlib.metadata

import numpy as np
import pytest
import torch

from megatron.training.distillation import payload_v3
from megatron.training.distillation.payload_v3 import decode_framed_rows, read_header
from tests.unit_tests.training.distillation.payload_v3_cases import (
    SENTINEL,
    Member,
    bits_of,
    check_rows,
    make_member,
)
from tests.unit_tests.training.distillation.payload_v3_golden import DIRECTORY, GOLDEN
from tests.unit_tests.training.distillation.payload_v3_reader import read_payload

WRITTEN_WITH = "1.1.0"


@pytest.mark.parametrize("name", GOLDEN)
def test_kept_payloads_are_decoded(name: str) -> None:
    member, options = GOLDEN[name]
    data = (DIRECTORY / name).read_bytes()
    rows = range(member.values.shape[1])
    found = decode_framed_rows(read_header(data), data, rows)
    check_rows(found, member, is_sorted=options.get("sort_ties", True))


@pytest.mark.parametrize("name", GOLDEN)
def test_kept_payloads_are_what_is_written(name: str) -> None:
    member, options = GOLDEN[name]
    assert member.encode(**options) == (DIRECTORY / name).read_bytes(), (
        f"The bytes of {name} have changed. If nothing but pcodec has (installed: "
        f"{importlib.metadata.version('pcodec')}, the files are of {WRITTEN_WITH}) and the kept "
        "payloads are still decoded, write them again with `python -m "
        f"tests.unit_tests.training.distillation.payload_v3_golden` and change WRITTEN_WITH. "
        "If what is written was changed on purpose, and readers of the specification still read "
        "it, likewise; else it needs a format version of its own."
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_kept_payloads_as_the_specification_reads_them(name: str) -> None:
    member, options = GOLDEN[name]
    _check(read_payload((DIRECTORY / name).read_bytes()), member, options)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("positions", "rows", "k", "vocab_size"),
    [(1, 1, 1, 2), (300, 2, 3, 70000), (70, 3, 9, 1 << 31), (513, 1, 2, 500)],
)
def test_payloads_as_the_specification_reads_them(
    positions: int,
    rows: int,
    k: int,
    vocab_size: int,
    dtype: torch.dtype,
    is_masked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload_v3, "_SEGMENT_ENTRIES", 700)
    for has_extras, sort_ties in ((False, False), (True, True)):
        member = make_member(
            positions,
            rows,
            k,
            vocab_size=vocab_size,
            dtype=dtype,
            is_masked=is_masked,
            has_extras=has_extras,
        )
        options = {"sort_ties": sort_ties}
        _check(read_payload(member.encode(**options)), member, options)


def test_codes_by_the_specification() -> None:
    """The codes are those whose values, by the formula, are the member's."""
    member, _ = GOLDEN["v3_eight_bit.payload"]
    found = read_payload((DIRECTORY / "v3_eight_bit.payload").read_bytes())
    for position in range(90):
        entries, _ = found["tokens"][0, position]
        codes = np.array([code for code, _ in entries], np.float64)
        values = (-24 * (codes / 255) ** 2).astype(np.float16)
        assert values.tolist() == member.values[position, 0].tolist()


def _check(found: dict, member: Member, options: dict) -> None:
    """Compare what the plain reader found with the truth."""
    positions, rows, k = member.values.shape
    value_type = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}[member.values.dtype]
    if is_coded := options.get("eight_bit", False):
        value_type = 3
    bits = (member.vocab_size - 1).bit_length()
    assert found["sizes"] == (positions, rows, k, bits, value_type)
    proofs = () if member.proofs is None else tuple(member.proofs.t().flatten().tolist())
    assert found["proofs"] == proofs
    assert len(found["tokens"]) == positions * rows
    value_bits = bits_of(member.values).long() & ((1 << 8 * member.values.itemsize) - 1)
    for (row, position), (entries, tail) in found["tokens"].items():
        kept = member.values[position, row] != SENTINEL
        values = value_bits[position, row][kept].tolist()
        expected = list(zip(values, member.indices[position, row][kept].tolist(), strict=True))
        if is_coded:  # the values have a test of their own
            assert [of for _, of in entries] == [of for _, of in expected]
        else:
            assert [value for value, _ in entries] == values
            same = sorted if options.get("sort_ties", True) else list
            assert same(entries) == same(expected)
        if member.tail is None:
            assert tail is None
        else:
            assert np.uint32(tail).view(np.float32) == member.tail[position, row].item()
