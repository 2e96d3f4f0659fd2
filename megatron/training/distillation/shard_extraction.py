# SPDX-License-Identifier: Apache-2.0
"""Makes a shard of some members of another one, which stays; needs no trainer."""

import contextlib

from megatron.training.distillation import storage
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.publication import Extract
from megatron.training.distillation.shard_content import seal_meta
from megatron.training.distillation.utils import (
    ShardName,
    parse_member_name,
    read_member,
    read_meta_member,
    read_tar_index,
    write_shard_tar,
)


def extract(directory: str, step: Extract) -> None:
    """Publish the members of a shard that lie in the target's range, byte for byte.

    Raises:
        CacheFormatError: The shard is damaged.
        ValueError: A member lies partly in the range.
        OSError: The shard cannot be read, or the new one not be written.
    """
    source, target = (storage.join(directory, str(name)) for name in (step.source, step.target))
    with contextlib.closing(storage.open_read(source)) as stream:
        index = read_tar_index(stream)
        meta_bytes = read_meta_member(stream, index, source)
        members: list[tuple[str, Content]] = [
            (entry.name, read_member(stream, entry))
            for entry in index
            if _belongs_to(step.target, entry.name, source)
        ]
        meta_bytes = seal_meta(meta_bytes, str(step.target), members)
    storage.publish(target, lambda out: write_shard_tar(out, meta_bytes, members))


def _belongs_to(target: ShardName, member: str, source: str) -> bool:
    """Return whether the samples of a member of *source* lie in *target*'s range."""
    span = parse_member_name(member)
    if span is None or span[1] <= target.start or target.end <= span[0]:
        return False
    if target.start <= span[0] and span[1] <= target.end:
        return True
    raise ValueError(
        f"Member {member} of {source} would have to be cut to give {target}: the dump was resumed "
        "with another global batch size. Resume it with the one it was begun with."
    )
