# SPDX-License-Identifier: Apache-2.0
"""Keeps a dump from going on in a directory that another dump has begun."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, CacheIdentityError
from megatron.training.distillation.manifest import Difference, Differences, compare
from megatron.training.distillation.utils import (
    ShardMeta,
    ShardName,
    read_shard_meta,
    read_tar_index,
)

logger = logging.getLogger(__name__)

FLAG_OF_FIELD = {
    "k": "--logits-save-top-k",
    "p": "--logits-save-top-p",
    "min_k": "--logits-save-top-p-min-k",
    "save_dtype": "--logits-save-dtype or --logits-save-8bit",
    "format_version": "version of the cache format",
    "mbs_save": "--micro-batch-size",
    "dp_size_save": "data parallel size",
    "gbs_save": "--global-batch-size",
    "seed": "--seed",
    "train_samples": "train samples",
    "blend": "data blend",
    "sequence_length": "--seq-length",
    "split": "--split",
    "dataloader_type": "--dataloader-type",
    "sft": "--sft",
    "blend_weighted": "weights in the data blend",
    "vocab_size": "vocabulary size",
    "padded_vocab_size": "padded vocabulary size",
    "package_version": "version of this package",
    "megatron_core_version": "version of megatron-core",
    "teacher": "teacher's checkpoint",
}

_HARMLESS = ("format_version",)
"""What each shard says for itself, so that readers take any."""


def check_continues(directory: str, meta: ShardMeta) -> None:
    """Compare the dump that *meta* describes with the newest shard in *directory*, if there is one.

    Another teacher's step, software version or version of the format is a warning. A blend must be
    the same to the last weight, scaled or not, because other readers compare its hash.

    Raises:
        CacheIdentityError: They differ; names each field with both values.
        OSError: The directory cannot be listed.
    """
    found = next(_metas_from_newest(directory), None)
    if found is None:
        return
    path, other = found
    differences = _differences(other, meta)
    if differences.fatal:
        raise CacheIdentityError(
            f"--logits-save-dir holds shards of another dump, such as {path}: "
            f"{'; '.join(map(_in_words, differences.fatal))}. Resume the dump with its own "
            "settings, or give this one another directory."
        )
    if differences.harmless:
        logger.warning(
            "This dump goes on in %s, whose shard %s differs: %s.",
            directory,
            path,
            "; ".join(map(_in_words, differences.harmless)),
        )


def _differences(other: ShardMeta, meta: ShardMeta) -> Differences:
    """Return how the dump that wrote *other* differs from the one that *meta* describes."""
    result = Differences()
    ours, theirs = _fields(meta), _fields(other)
    for field in ours:
        if field in theirs and theirs[field] != ours[field]:
            severity = result.harmless if field in _HARMLESS else result.fatal
            severity.append(Difference(field, theirs[field], ours[field]))
    if meta.manifest is not None and other.manifest is not None:
        result += compare(other.manifest, meta.manifest, may_trim=False)
    return result


def _in_words(difference: Difference) -> str:
    name = FLAG_OF_FIELD.get(difference.name, difference.name)
    return f"{name} is {difference.theirs!r} there, {difference.ours!r} here"


def _metas_from_newest(directory: str) -> Iterator[tuple[str, ShardMeta]]:
    """Yield path and metadata of the readable live shards, the one that ends last first."""
    shards = [shard for shard in map(ShardName.parse, storage.list_names(directory)) if shard]
    for shard in sorted(shards, key=lambda shard: (-shard.end, shard.dp_rank)):
        path = storage.join(directory, str(shard))
        with contextlib.closing(storage.open_read(path)) as stream:
            try:
                meta = read_shard_meta(stream, read_tar_index(stream), path)
            except CacheFormatError as error:
                logger.warning("Teacher shard %s is damaged: %s.", path, error)
                continue
        yield path, meta


def _fields(meta: ShardMeta) -> dict[str, Any]:
    """Return what decides the content of a shard, in the order it is reported."""
    identifiers = {key: _plain(value) for key, value in (meta.identifiers or {}).items()}
    fields = identifiers | asdict(meta.saver)
    return {field: fields[field] for field in FLAG_OF_FIELD if field in fields}


def _plain(value: Any) -> Any:
    """Return *value* as JSON gives it back: lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
