# SPDX-License-Identifier: Apache-2.0
"""The ``_meta.json`` of a shard: what it says, and whether it is of the run that reads it, pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.training.distillation.errors import CacheFormatError, CacheIdentityError
from megatron.training.distillation.frame_layout import FORMAT_VERSION_V3
from megatron.training.distillation.manifest import (
    Difference,
    Differences,
    ExpectedRun,
    RunManifest,
    compare,
    compare_identifiers,
)
from megatron.training.distillation.payload import FORMAT_VERSION
from megatron.training.distillation.shard_content import ShardContent

META_TAR_MEMBER = "_meta.json"
FORMAT_VERSIONS = (FORMAT_VERSION, FORMAT_VERSION_V3)
"""Versions whose shards are alike but for the codec of their payloads."""
_IDENTIFIER_KEYS = ("seed", "train_samples", "blend")
_SETTINGS: tuple[str, ...] = ("k", "p", "min_k", "save_dtype")
_GEOMETRY = ("mbs_save", "dp_size_save", "gbs_save")


def identity_hash(identifiers: Mapping[str, Any]) -> str:
    """Return the md5 hex digest over ``seed``, ``train_samples`` and ``blend``, in that order.

    Further identifiers do not enter it, so that every reader of the format computes the same hash.
    """
    text = _compact_json({key: identifiers[key] for key in _IDENTIFIER_KEYS})
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverSettings:
    """How the teacher recorded a shard.  Only version and batch geometry are needed to read it."""

    k: int | None = None
    p: float | None = None
    min_k: int | None = None
    save_dtype: str | None = None
    format_version: int = FORMAT_VERSION
    mbs_save: int
    dp_size_save: int
    gbs_save: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMeta:
    """The ``_meta.json`` of a shard."""

    hash: str | None
    identifiers: Mapping[str, Any] | None
    saver: SaverSettings
    manifest: RunManifest | None = None
    content: ShardContent | None = None

    @classmethod
    def for_run(
        cls,
        identifiers: Mapping[str, Any],
        saver: SaverSettings,
        manifest: RunManifest | None = None,
    ) -> ShardMeta:
        """Return the metadata of a run over the data that *identifiers* describe, hash included."""
        return cls(
            hash=identity_hash(identifiers),
            identifiers=identifiers,
            saver=saver,
            manifest=manifest,
        )

    def to_bytes(self) -> bytes:
        """Return the compact JSON of the run, its keys in the order of the format.

        The content of one shard is added when that is written.
        """
        saver = self.saver
        content: dict[str, Any] = {
            "hash": self.hash,
            "identifiers": self.identifiers and dict(self.identifiers),
            "saver": {
                "k": saver.k,
                "p": saver.p,
                "min_k": saver.min_k,
                "save_dtype": saver.save_dtype,
                "format_version": saver.format_version,
                "mbs_save": saver.mbs_save,
                "dp_size_save": saver.dp_size_save,
                "gbs_save": saver.gbs_save,
            },
        }
        if self.manifest is not None:
            content["manifest"] = self.manifest.to_dict()
        return _compact_json(content).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "the shard") -> ShardMeta:
        """Parse *data*; unknown keys are ignored, ``hash`` and ``identifiers`` may be missing.

        Raises:
            CacheFormatError: *data* (found in *where*) is not metadata of these format versions.
        """
        content = parse_meta(data, where)
        saver = content["saver"]
        mbs, dp_size, gbs = (
            _positive_size(saver, key, where) for key in ("mbs_save", "dp_size_save", "gbs_save")
        )
        if gbs % (mbs * dp_size):
            raise CacheFormatError(
                f"{META_TAR_MEMBER} in {where} has gbs_save {gbs}, which is not a multiple of "
                f"mbs_save * dp_size_save = {mbs} * {dp_size}."
            )
        identifiers = content.get("identifiers")
        manifest = content.get("manifest")
        recorded = ShardContent.from_meta(content, where)
        if manifest is not None and recorded is None:
            raise CacheFormatError(
                f"{META_TAR_MEMBER} in {where} has a manifest and does not say what the shard "
                "holds: it is damaged."
            )
        return cls(
            hash=content.get("hash"),
            identifiers=identifiers if isinstance(identifiers, dict) else None,
            saver=SaverSettings(
                k=saver.get("k"),
                p=saver.get("p"),
                min_k=saver.get("min_k"),
                save_dtype=saver.get("save_dtype"),
                format_version=int(saver["format_version"]),
                mbs_save=mbs,
                dp_size_save=dp_size,
                gbs_save=gbs,
            ),
            manifest=RunManifest.from_dict(manifest) if isinstance(manifest, dict) else None,
            content=recorded,
        )


def parse_meta(
    data: bytes, where: str, versions: Sequence[int | None] = FORMAT_VERSIONS
) -> dict[str, Any]:
    """Return the JSON of a ``_meta.json``: an object with a ``saver`` object of these *versions*.

    Raises:
        CacheFormatError: *data* (found in *where*) is not that.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CacheFormatError(f"{META_TAR_MEMBER} in {where} is not JSON: {error}") from error
    saver = content.get("saver") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(saver, dict):
        raise CacheFormatError(
            f"{META_TAR_MEMBER} in {where} has no 'saver' object, found {str(content)[:80]!r}: "
            "the file was not written by a teacher dump."
        )
    version = saver.get("format_version")
    if version not in versions:
        raise CacheFormatError(
            f"{META_TAR_MEMBER} in {where} has format_version {version!r}, expected "
            f"{' or '.join(map(str, versions))}. Read it with the software that wrote it, or dump "
            "it again."
        )
    return content


def _positive_size(saver: Mapping[str, Any], key: str, where: str) -> int:
    size = saver.get(key)
    if type(size) is int and size > 0:
        return size
    raise CacheFormatError(
        f"{META_TAR_MEMBER} in {where} has {key} {size!r}, expected a positive integer."
    )


def check_identity(
    meta: ShardMeta, expected: ExpectedRun | Mapping[str, Any], where: str
) -> list[Difference]:
    """Check that the shard at *where* was recorded over the data of the *expected* run.

    Returns:
        The differences that are no error, either because they are harmless or because the run does
        not enforce its identity.

    Raises:
        CacheIdentityError: A value that both sides know differs and matters, or the shard does not
            prove its identity. The message names each with both values.
    """
    run = ExpectedRun.of(expected)
    assert run is not None
    found = _differences(meta, run)
    problems = [str(difference) for difference in found.fatal]
    unproven = _hash_problem(meta, run.identifiers)
    if unproven and not problems:
        problems.append(unproven)
    if run.enforced and problems:
        raise CacheIdentityError(
            f"Teacher shard {where} belongs to another run: {'; '.join(problems)}. Give the "
            "student the teacher's value of each, or point --logits-load-dir at the cache of this "
            "data (--logits-load-ignore-hash skips this check)."
        )
    return [*found.fatal, *found.harmless]


def _differences(meta: ShardMeta, run: ExpectedRun) -> Differences:
    known = (meta.manifest, run.manifest)
    found = compare_identifiers(
        meta.identifiers or {},
        run.identifiers,
        weights_are_given=all(manifest and manifest.blend_weighted for manifest in known),
    )
    if meta.manifest is None or run.manifest is None:
        return found
    return found + compare(meta.manifest, run.manifest)


def _hash_problem(meta: ShardMeta, expected: Mapping[str, Any]) -> str:
    """Return why the hash does not prove an identity whose known fields agree; empty if it does."""
    expected_hash = identity_hash(json.loads(_compact_json(expected)))
    if meta.hash is None:
        return f"it carries no identity hash, expected {expected_hash}"
    found = meta.identifiers or {}
    if all(key in found for key in _IDENTIFIER_KEYS):
        expected_hash = identity_hash(found)  # the fields themselves have been compared
    if meta.hash == expected_hash:
        return ""
    return f"its identity hash is {meta.hash!r}, expected {expected_hash}"


def compare_neighbours(meta: ShardMeta, first: ShardMeta) -> Differences:
    """Return what two shards of one cache do not share, though one dump wrote them all.

    The format may change along a cache, as each shard says its own. So may batch sizes; but a dump
    that records a manifest refuses to go on with others, so where both shards have one they must
    agree.
    """
    result = Differences()
    ours, theirs = asdict(first.saver), asdict(meta.saver)
    settings = () if None in (ours["k"], theirs["k"]) else _SETTINGS
    if meta.manifest is not None and first.manifest is not None:
        settings += _GEOMETRY
        result += compare(meta.manifest, first.manifest, may_trim=False)
    for name in settings:
        if theirs[name] != ours[name]:
            result.fatal.append(Difference(name, theirs[name], ours[name]))
    return result


def _compact_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
