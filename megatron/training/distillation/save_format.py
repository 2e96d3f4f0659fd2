# SPDX-License-Identifier: Apache-2.0
"""Which format a dump is written in, and what encodes its members, pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron.training.distillation.frame_layout import MAX_VOCAB_SIZE_V3
from megatron.training.distillation.payload import MAX_VOCAB_SIZE, encode_logprobs_payload
from megatron.training.distillation.payload_v3 import encode_framed_payload

AUTO = "auto"
SAVE_FORMATS = (AUTO, "2", "3")
EIGHT_BIT = "uint8"
"""What metadata give as the dtype of log-probabilities that are stored as 8-bit codes."""

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    EIGHT_BIT: torch.float16,  # until they are encoded
}
"""What log-probabilities are rounded to, by the dtype that metadata give."""

PayloadEncoder = Callable[..., bytes]
"""Returns a member's bytes; takes the tensors of :func:`encode_logprobs_payload`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFormat:
    """The format that a dump is written in."""

    version: int
    reason: str
    """Why it is this version, as part of a sentence."""
    save_dtype: str
    vocab_size: int | None
    """What all ids are below; None if it is not known."""

    def encoder(self) -> PayloadEncoder:
        """Return what encodes the members.

        Raises:
            ValueError: The format needs the size of the vocabulary.
        """
        if self.version == 2:
            return encode_logprobs_payload
        if self.vocab_size is None:
            raise ValueError(
                "Format 3 stores ids in as many bits as the vocabulary needs, and its size is not "
                "known: configure a tokenizer, or use --logits-save-format 2."
            )
        return partial(
            encode_framed_payload,
            vocab_size=self.vocab_size,
            eight_bit=self.save_dtype == EIGHT_BIT,
        )


def recorded_dtype(save_dtype: str, eight_bit: bool) -> str:
    """Return what a dump gives as its dtype.

    Args:
        save_dtype: The value of ``--logits-save-dtype``.
        eight_bit: Whether ``--logits-save-8bit`` is given.

    Raises:
        ValueError: Codes stand for another dtype.
    """
    if not eight_bit:
        return save_dtype
    if save_dtype not in ("fp16", EIGHT_BIT):
        raise ValueError(
            f"--logits-save-8bit stores codes that are read as fp16, not {save_dtype}: leave it or "
            "--logits-save-dtype out."
        )
    return EIGHT_BIT


def choose_format(
    wanted: str,
    save_dtype: str,
    *,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
) -> SaveFormat:
    """Return the format of a dump.

    Args:
        wanted: One of ``SAVE_FORMATS``.
        save_dtype: What the dump gives as its dtype.
        vocab_size: Size of the real vocabulary; None if it is not known.
        padded_vocab_size: Size of the output layer; None if it is not known.

    Raises:
        ValueError: The format cannot store the dtype or the vocabulary.
    """
    size = padded_vocab_size or vocab_size
    if size is not None and size > MAX_VOCAB_SIZE_V3:
        raise ValueError(
            f"The padded vocabulary has {size} entries, but no format stores ids from "
            f"{MAX_VOCAB_SIZE_V3} on (31 bits). This teacher cannot be recorded."
        )
    if wanted == "2":
        if save_dtype == EIGHT_BIT:
            raise ValueError(
                "--logits-save-8bit stores 8-bit codes, which --logits-save-format 2 does not "
                "have: use --logits-save-format 3 or auto, or leave it out."
            )
        # What only pads the vocabulary is never recorded.
        if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"The vocabulary has {vocab_size} entries, but --logits-save-format 2 stores ids "
                f"below {MAX_VOCAB_SIZE} (17 bits): use --logits-save-format 3 or auto."
            )
    version, reason = _version(wanted, save_dtype, size)
    return SaveFormat(version=version, reason=reason, save_dtype=save_dtype, vocab_size=size)


def _version(wanted: str, save_dtype: str, size: int | None) -> tuple[int, str]:
    """Return the version and why it is this one; *size* is that of the vocabulary."""
    if wanted != AUTO:
        return int(wanted), "--logits-save-format asks for it"
    if save_dtype == EIGHT_BIT:
        return 3, "format 2 does not have the 8-bit codes of --logits-save-8bit"
    if size is None:
        return 2, "the size of the vocabulary is not known"
    if size <= MAX_VOCAB_SIZE:
        return 2, f"the padded vocabulary of {size} entries fits its 17-bit ids"
    return 3, f"the padded vocabulary of {size} entries needs ids of more than 17 bits"
