# SPDX-License-Identifier: Apache-2.0
"""The payload of one member: token ids packed into 17 bits, and the codec around them, pure.

A later format changes this module only: bytes and a row selection in, entries out.
"""

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zstandard

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.fingerprint import CHUNK, chunk_count
from megatron.training.distillation.packed_rows import (
    PackedRows,
    TeacherRows,
    bits_by_token,
    join_halves,
)

FORMAT_VERSION = 2
LOGPROB_SENTINEL = -1000.0
"""Value of an entry that top-P masked; a reader decides by it, never by the index."""
INDEX_SENTINEL = -1
"""Index of a masked entry before packing; 17 bits turn it into 131071."""
MAX_VOCAB_SIZE = 1 << 17

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A zstd block takes at least 4 bytes and holds at most 128 KiB (RFC 8878, section 3.1.1.2).
_ZSTD_BLOCK_MAX = 1 << 17
_ZSTD_BLOCK_MIN_BYTES = 4
MAX_PAYLOAD_BYTES = 1 << 36
"""What a payload may decompress to where nothing tells its shape: 64 GiB."""
# What torch.save adds to the tensors: a zip entry each, aligned to 64 bytes, and a small pickle.
_ARCHIVE_OVERHEAD = 1 << 16
# What the restricted unpickler and the zip reader behind torch.load raise on damaged input.
_UNPICKLING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


def v2_pack_indices(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split integer token ids into their low 16 bits and the bit above.

    Returns:
        ``low``, uint16 of the same shape, and ``bit_17``, 1-D uint8: ``numpy.packbits`` over the
        flattened ids.

    Raises:
        ValueError: An id is outside ``[-1, 131071]``; -1, the masked entry, becomes 131071.
    """
    ids = indices.detach().cpu().contiguous().numpy()
    if ids.size and (ids.min() < INDEX_SENTINEL or ids.max() >= MAX_VOCAB_SIZE):
        raise ValueError(
            f"Token ids {ids.min()} to {ids.max()} do not fit the 17 bits of format v2, at most "
            f"{MAX_VOCAB_SIZE - 1}. Use --logits-save-format 3."
        )
    low = ids.astype(np.uint16)  # keeps the low 16 bits, also of -1
    bit_17 = np.packbits((ids & 0x10000) != 0)
    return torch.from_numpy(low), torch.from_numpy(bit_17)


def v2_unpack_indices(low: torch.Tensor, bit_17: torch.Tensor) -> torch.Tensor:
    """Undo :func:`v2_pack_indices`: int64 ids shaped like *low*; -1 comes back as 131071."""
    bits = np.unpackbits(bit_17.numpy(), count=low.numel()).reshape(low.shape)
    return torch.from_numpy(join_halves(low.numpy(), bits)).long()


def encode_logprobs_payload(
    values: torch.Tensor,
    indices: torch.Tensor,
    tail_logprob: torch.Tensor | None = None,
    label_fingerprints: torch.Tensor | None = None,
) -> bytes:
    """Return the zstd frame of one member.

    Args:
        values: ``(S, n, K)`` log-probabilities in the dtype to store: fp16, bf16 or fp32.
        indices: ``(S, n, K)`` token ids, any integer dtype; -1 where *values* is -1000.0.
        tail_logprob: ``(S, n)`` log of the mass outside the K entries, stored as fp32; None leaves
            the key out.
        label_fingerprints: ``(ceil(S / 64), n)`` int64 fingerprints of the labels; None leaves
            their keys out.

    The frame carries a checksum, so a flipped bit is found when it is read.
    """
    assert values.dim() == 3, values.shape
    assert values.dtype in VALUE_DTYPES, values.dtype
    assert indices.shape == values.shape, (indices.shape, values.shape)
    low, bit_17 = v2_pack_indices(indices)
    payload = {
        "values": _compact_copy(values),
        "indices_low": low,
        "bit_17": bit_17,
        "format_version": FORMAT_VERSION,
    }
    if tail_logprob is not None:
        assert tail_logprob.shape == values.shape[:2], (tail_logprob.shape, values.shape)
        payload["tail_logprob"] = _compact_copy(tail_logprob.float())
    if label_fingerprints is not None:
        expected = (chunk_count(values.shape[0]), values.shape[1])
        assert label_fingerprints.shape == expected, (label_fingerprints.shape, expected)
        assert label_fingerprints.dtype == torch.int64, label_fingerprints.dtype
        payload["label_fingerprints"] = _compact_copy(label_fingerprints)
        payload["fingerprint_chunk"] = CHUNK
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(buffer.getbuffer())


def _compact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* alone in its storage: torch.save writes the whole storage behind a view."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def max_payload_bytes(positions: int, rows: int, k: int, high_planes: int = 1) -> int:
    """Return what a payload of these ``(S, n, K)`` may decompress to, in any dtype.

    *high_planes* are the bits of an id above the low 16.
    """
    tokens = positions * rows
    entries = tokens * k * 6 + tokens * high_planes * -(-k // 8)
    return entries + tokens * 4 + _ARCHIVE_OVERHEAD


def decode_packed_rows(data: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> PackedRows:
    """Decompress and check one member, executing nothing in it.

    Args:
        data: The member as stored.
        max_bytes: What it may decompress to.

    Raises:
        CacheFormatError: The frame, the archive inside or the tensors are not what format v2 says.
    """
    payload = load_archive(data, max_bytes)
    version = payload.get("format_version") if isinstance(payload, dict) else None
    if version != FORMAT_VERSION:
        raise CacheFormatError(
            f"its payload has format_version {version!r}, expected {FORMAT_VERSION}"
        )
    values, low, bit_17, tail = map(
        payload.get, ("values", "indices_low", "bit_17", "tail_logprob")
    )
    check_tensor("values", values, VALUE_DTYPES)
    check_tensor("indices_low", low, (torch.uint16,), shape=values.shape)
    check_tensor("bit_17", bit_17, (torch.uint8,), shape=(-(-values.numel() // 8),))
    if tail is not None:
        check_tensor("tail_logprob", tail, (torch.float32,), shape=values.shape[:2])
    fingerprints = payload.get("label_fingerprints")
    if fingerprints is not None:
        _check_fingerprints(fingerprints, payload.get("fingerprint_chunk"), values.shape)
    return PackedRows(
        values=values.detach(),
        indices_low=low.detach(),
        high_bits=bits_by_token(bit_17.detach(), values.shape),
        tail_logprob=None if tail is None else tail.detach(),
        label_fingerprints=None if fingerprints is None else fingerprints.detach(),
    )


def _check_fingerprints(fingerprints: Any, chunk: Any, shape: Sequence[int]) -> None:
    if not isinstance(chunk, int) or chunk != CHUNK:
        raise CacheFormatError(
            f"its 'fingerprint_chunk' is {chunk!r}, expected {CHUNK}: another version of this "
            "package wrote it"
        )
    check_tensor(
        "label_fingerprints", fingerprints, (torch.int64,), shape=(chunk_count(shape[0]), shape[1])
    )


def decode_teacher_rows(data: bytes, rows: slice | Sequence[int] | None = None) -> TeacherRows:
    """Decode the selected *rows* (None: all) of one member; raises CacheFormatError."""
    return decode_packed_rows(data).unpack(rows)


def decode_logprobs_payload(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one member: ``values`` ``(S, n, K)`` as stored, ``indices`` ``(S, n, K)`` int64."""
    rows = decode_teacher_rows(data)
    return rows.values, rows.indices.long()


def load_archive(data: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> Any:
    """Decompress one zstd frame and load what torch.save wrote into it, executing nothing.

    Raises:
        CacheFormatError: The frame or the archive inside is damaged, or holds more than plain data.
    """
    return _load_payload(_decompress(data, max_bytes))


def _decompress(data: bytes, max_bytes: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            raise CacheFormatError("its zstd frame does not declare its content size")
        if declared > len(data) // _ZSTD_BLOCK_MIN_BYTES * _ZSTD_BLOCK_MAX:
            raise CacheFormatError(
                f"its zstd frame of {len(data)} bytes declares an impossible {declared} bytes"
            )
        if declared > max_bytes:
            raise CacheFormatError(
                f"its zstd frame declares {declared} bytes, expected at most {max_bytes}"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CacheFormatError(f"its {len(data)} bytes are not one zstd frame: {error}") from error


def _load_payload(content: bytes) -> Any:
    if not content.startswith(b"PK\x03\x04"):
        raise CacheFormatError("its decompressed content is not an archive of torch.save")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _UNPICKLING_ERRORS as error:
        raise CacheFormatError(
            f"torch.load refuses its content: {type(error).__name__}: {error}"
        ) from error


def check_tensor(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: Sequence[int] | None = None
) -> None:
    """Raise CacheFormatError unless *tensor* is dense, of *dtypes* and of *shape* (None: 3-D)."""
    if not isinstance(tensor, torch.Tensor):
        raise CacheFormatError(f"its {name!r} is a {type(tensor).__name__}, expected a tensor")
    found = tuple(tensor.shape)
    fits = len(found) == 3 if shape is None else found == tuple(shape)
    if tensor.dtype not in dtypes or not fits:
        expected = "(S, n, K)" if shape is None else tuple(shape)
        raise CacheFormatError(
            f"its {name!r} is {tensor.dtype} of shape {found}, expected shape {expected} in "
            f"{' or '.join(map(str, dtypes))}"
        )
    # Strides of zero would let a small archive stand for a huge tensor.
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not dense or not tensor.is_contiguous() or 0 in found:
        raise CacheFormatError(f"its {name!r} of shape {found} is empty or not a contiguous tensor")
