# SPDX-License-Identifier: Apache-2.0
"""The head of a message, and a failure as bytes."""

import itertools

import pytest
import torch

from megatron.training.distillation import errors
from megatron.training.distillation.packed_rows import BlockLayout
from megatron.training.distillation.replica_message import (
    HEAD_BYTES,
    Head,
    decode_failure,
    encode_failure,
)
from megatron.training.distillation.targets import IterationFailure


@pytest.mark.parametrize(
    ("dtype", "has_tail", "chunks"),
    list(
        itertools.product(
            (torch.float16, torch.bfloat16, torch.float32), (False, True), (0, 1, 2**20)
        )
    ),
)
def test_head_of_rows(dtype: torch.dtype, has_tail: bool, chunks: int) -> None:
    blocks = BlockLayout(
        positions=2**20 + 1,
        samples=3,
        k=129,
        high_planes=15,
        dtype=dtype,
        has_tail=has_tail,
        chunks=chunks,
    )
    head = Head(needed=2**40 + 5, wait=1.234567, microbatches=7, blocks=blocks)
    encoded = head.encode()
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (HEAD_BYTES,))
    assert Head.decode(encoded) == head


def test_head_of_a_failure() -> None:
    head = Head(needed=17, wait=0.0)
    assert Head.decode(head.encode()) == head


def test_head_by_hand() -> None:
    fields = Head(needed=300, wait=0.5).encode().view(torch.int64).tolist()
    assert fields == [300, 500_000] + 14 * [0]


@pytest.mark.parametrize(
    "error",
    [
        errors.TeacherDataMissingError("sample 3 \u2014 \u65e5\u672c\nsecond line"),
        errors.CacheIdentityError(""),
        errors.TeacherDataExhaustedError("x" * 100_000),
    ],
)
@pytest.mark.parametrize("fatal", [False, True])
def test_failure(error: Exception, fatal: bool) -> None:
    failure = IterationFailure(start=2**40, error=error, fatal=fatal)
    found = decode_failure(encode_failure(failure))
    assert (found.start, found.fatal) == (2**40, fatal)
    assert type(found.error) is type(error)
    assert str(found.error) == str(error)


def test_error_of_another_module_comes_back_as_one_of_ours() -> None:
    found = decode_failure(
        encode_failure(IterationFailure(start=0, error=OSError(5, "broken"), fatal=True))
    )
    assert type(found.error) is errors.TeacherDataError
    assert "broken" in str(found.error)
