# SPDX-License-Identifier: Apache-2.0
"""Which format a dump is written in, and how its encoder is called."""

import pytest

from megatron.training.distillation import save_format
from megatron.training.distillation.payload import encode_logprobs_payload
from megatron.training.distillation.save_format import (
    SAVE_FORMATS,
    choose_format,
    recorded_dtype,
)

LIMIT = 1 << 17


@pytest.mark.parametrize(
    ("wanted", "save_dtype", "vocab_size", "padded", "version", "bound"),
    [
        ("auto", "fp16", 1000, 1024, 2, 1024),
        ("auto", "fp16", None, None, 2, None),
        ("auto", "fp32", LIMIT, None, 2, LIMIT),
        ("auto", "fp16", LIMIT, LIMIT, 2, LIMIT),
        ("auto", "fp16", LIMIT, LIMIT + 1, 3, LIMIT + 1),
        ("auto", "fp16", None, LIMIT + 1, 3, LIMIT + 1),
        ("auto", "bf16", 1 << 31, 1 << 31, 3, 1 << 31),
        ("auto", "uint8", 1000, 1024, 3, 1024),
        ("2", "fp16", LIMIT, LIMIT + 128, 2, LIMIT + 128),
        ("3", "fp16", 1000, None, 3, 1000),
        ("3", "uint8", 1000, 1024, 3, 1024),
        ("3", "fp16", 1 << 31, None, 3, 1 << 31),
    ],
)
def test_version_and_bound_of_the_ids(
    wanted: str,
    save_dtype: str,
    vocab_size: int | None,
    padded: int | None,
    version: int,
    bound: int | None,
) -> None:
    found = choose_format(wanted, save_dtype, vocab_size=vocab_size, padded_vocab_size=padded)
    assert (found.version, found.vocab_size) == (version, bound)


@pytest.mark.parametrize("wanted", SAVE_FORMATS)
@pytest.mark.parametrize("sizes", [(1 << 31, (1 << 31) + 128), ((1 << 31) + 1, None)])
def test_ids_of_more_than_31_bits_are_refused(wanted: str, sizes: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match=r"no format stores ids from 2147483648 on"):
        choose_format(wanted, "fp16", vocab_size=sizes[0], padded_vocab_size=sizes[1])


@pytest.mark.parametrize(
    ("save_dtype", "vocab_size", "message"),
    [
        ("uint8", None, "--logits-save-8bit .* use --logits-save-format 3 or auto"),
        ("fp16", LIMIT + 1, r"131073 entries.* below 131072 \(17 bits\): use .* 3 or auto"),
    ],
)
def test_format_2_says_what_it_cannot_store(
    save_dtype: str, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_format("2", save_dtype, vocab_size=vocab_size)


def test_recorded_dtype() -> None:
    assert [recorded_dtype(name, False) for name in ("fp16", "fp32")] == ["fp16", "fp32"]
    assert [recorded_dtype(name, True) for name in ("fp16", "uint8")] == ["uint8", "uint8"]
    with pytest.raises(ValueError, match=r"read as fp16, not bf16: leave it or --logits-save-dtyp"):
        recorded_dtype("bf16", True)


def test_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        save_format, "encode_framed_payload", lambda *tensors, **how: calls.append((tensors, how))
    )
    assert choose_format("2", "fp16").encoder() is encode_logprobs_payload
    for save_dtype in ("fp16", "uint8"):
        choose_format("3", save_dtype, vocab_size=10).encoder()("values", "indices")
    assert calls == [
        (("values", "indices"), {"vocab_size": 10, "eight_bit": False}),
        (("values", "indices"), {"vocab_size": 10, "eight_bit": True}),
    ]
    with pytest.raises(ValueError, match=r"its size is not known: configure a tokenizer"):
        choose_format("3", "fp16").encoder()
