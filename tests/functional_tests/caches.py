# SPDX-License-Identifier: Apache-2.0
"""Reads the payloads of a cache as bytes, for comparison with another cache; converts a cache."""

import json
import tarfile
from pathlib import Path

from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import FORMAT_VERSION, decode_teacher_rows
from megatron.training.distillation.payload_v3 import decode_framed_payload, encode_framed_payload
from tests.functional_tests.harness import PADDED_VOCAB
from tools.cache.conversion import Converted
from tools.cache.conversion_target import Target
from tools.cache.converted_cache import convert_cache, plan_conversion
from tools.cache.entry_change import unmasked

Payloads = dict[tuple[str, str], bytes]
"""By DP rank (``dp0``) and member name."""


def read_cache(cache: Path, save_format: int | None = None) -> Payloads:
    """Return the content of every payload in live shards.

    Args:
        cache: The directory.
        save_format: What a dump in this format has written instead, which is told only of format 2
            read as 3: that one does not keep the order of equal values. None for what is there.
    """
    payloads: Payloads = {}
    for path in sorted(cache.glob("*.tar")):
        with tarfile.open(path) as tar:
            meta, *members = tar.getmembers()
            written_in = json.loads(_content(tar, meta))["saver"]["format_version"]
            for member in members:
                content = _content(tar, member)
                if save_format is not None and save_format != written_in:
                    assert (written_in, save_format) == (FORMAT_VERSION, 3), path
                    content = _in_format_3(content)
                place = path.name.partition("__")[0], member.name
                assert place not in payloads
                payloads[place] = content
    return payloads


def formats_of(cache: Path) -> dict[str, int]:
    """Return the format of every live shard, by its name."""
    found = {}
    for path in sorted(cache.glob("*.tar")):
        with tarfile.open(path) as tar:
            meta = json.loads(_content(tar, tar.getmembers()[0]))
        found[path.name] = meta["saver"]["format_version"]
    return found


def decode(payload: bytes, save_format: int) -> TeacherRows:
    """Return the rows of a payload in one of the formats."""
    if save_format == FORMAT_VERSION:
        return decode_teacher_rows(payload)
    return decode_framed_payload(payload).unpack_all()


def convert(source: Path, target: Path, save_format: int) -> Path:
    """Convert all shards of a cache and return *target*."""
    plan = plan_conversion(str(source), str(target), Target(format_version=save_format))
    found = list(convert_cache(plan, jobs=1, spool_dir=None))
    assert all(isinstance(shard, Converted) for shard in found), found
    return target


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def _in_format_3(payload: bytes) -> bytes:
    """Return what a dump in format 3 writes in place of a payload of format 2."""
    rows = unmasked(decode_teacher_rows(payload))
    parts = rows.values, rows.indices, rows.tail_logprob, rows.label_fingerprints
    return encode_framed_payload(*parts, vocab_size=PADDED_VOCAB)
