# SPDX-License-Identifier: Apache-2.0
"""What decides the numbers in a cache, and which differences between two runs matter, pure.

A cache belongs to a student if both runs number the same tokens in the same order. The identifiers
(seed, train samples, data) are hashed for every reader of the format; the manifest tells the rest.
Everything is compared by value: no order of keys and no hash of Python's enters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

PACKAGE_VERSION = "0.1.0.dev0"
"""Version of this package; a tree that is used in place has no metadata to read it from."""

_HARMLESS = ("padded_vocab_size", "package_version", "megatron_core_version")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """What a run says of itself in the metadata of its shards; None where it does not know.

    Attributes:
        sequence_length: Tokens per sample.
        vocab_size: Size of the real vocabulary.
        padded_vocab_size: Size of the output layer, which depends on tensor parallelism.
        tokenizer: ``{"type", "fingerprint"}``, the latter a digest of what decides the ids.
        split: The shares of training, validation and test documents, as on the command line.
        dataloader_type: Megatron's sampler.
        sft: Whether samples are packed conversations.
        blend_weighted: Whether the data blend has weights; the identifiers show 1.0 for none.
        package_version: Version of this package.
        megatron_core_version: Version of megatron-core.
        teacher: ``{"checkpoint", "step"}``: base name and step of the recorded model.
    """

    sequence_length: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    split: str | None = None
    dataloader_type: str | None = None
    sft: bool | None = None
    blend_weighted: bool | None = None
    package_version: str | None = None
    megatron_core_version: str | None = None
    teacher: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON stores."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunManifest:
        """Return the manifest that JSON stored; what this version does not know is left out."""
        known = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        return cls(**known)


class Difference(NamedTuple):
    """One value that a shard and a run do not share."""

    name: str
    theirs: Any
    ours: Any
    remark: str = ""

    def __str__(self) -> str:
        """Return it in words, as part of a sentence about the shard."""
        text = f"its {self.name} is {_text(self.theirs)}, here it is {_text(self.ours)}"
        return f"{text} ({self.remark})" if self.remark else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What two runs do not share."""

    fatal: list[Difference] = field(default_factory=list)
    """What makes the targets those of other samples, tokens or ids."""
    harmless: list[Difference] = field(default_factory=list)

    def __add__(self, other: Differences) -> Differences:
        """Return both."""
        return Differences(
            fatal=[*self.fatal, *other.fatal], harmless=[*self.harmless, *other.harmless]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRun:
    """The run whose data a cache must have been recorded over.

    Attributes:
        identifiers: Its identity, as the format hashes it.
        manifest: What else decides the numbers; None compares the identifiers alone.
        enforced: Whether a fatal difference is an error; else it is reported like a harmless one.
        reports: Whether this process logs differences that are no error. One rank does.
    """

    identifiers: Mapping[str, Any]
    manifest: RunManifest | None = None
    enforced: bool = True
    reports: bool = False

    @classmethod
    def of(cls, expected: ExpectedRun | Mapping[str, Any] | None) -> ExpectedRun | None:
        """Return *expected*, which may be identifiers alone; None expects nothing."""
        if expected is None or isinstance(expected, ExpectedRun):
            return expected
        return cls(identifiers=expected)

    def with_identifiers(self, **more: Any) -> ExpectedRun:
        """Return the run with *more* identifiers."""
        return replace(self, identifiers={**self.identifiers, **more})


def compare(theirs: RunManifest, ours: RunManifest, *, may_trim: bool = True) -> Differences:
    """Return how the run that recorded a shard differs from this one.

    Values that one side does not know are passed over.

    Args:
        theirs: The shard's.
        ours: This run's.
        may_trim: Whether longer sequences than ours are fine, as the student trims them; it says
            so itself.
    """
    result = Differences()
    for name in RunManifest.__dataclass_fields__:
        pair = getattr(theirs, name), getattr(ours, name)
        if None in pair or pair[0] == pair[1]:
            continue
        difference = Difference(name, *pair)
        match name:
            case "sequence_length" if may_trim and _is_longer(*pair):
                continue
            case "split" if _shares(pair[0]) == _shares(pair[1]):
                continue
            case "split" if _shares(pair[0])[0] == _shares(pair[1])[0]:
                result.harmless.append(difference._replace(remark="the training share is the same"))
            case "teacher":
                result.harmless.append(difference)
            case _ if name in _HARMLESS:
                result.harmless.append(difference)
            case _:
                result.fatal.append(difference)
    return result


def compare_identifiers(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, weights_are_given: bool = False
) -> Differences:
    """Return how the identifiers differ that both sides have.

    Weights of a blend that are scaled by a constant are the same data: Megatron divides them by
    their sum, and only what is equal then, to the last bit, is dealt in the same order. Weights of
    1.0 may also stand for none at all, which is another blend.

    Args:
        theirs: The shard's.
        ours: This run's.
        weights_are_given: Whether both runs are known to have weights.
    """
    result = Differences()
    for name, value in json.loads(json.dumps(dict(ours))).items():
        if name not in theirs or theirs[name] == value:
            continue
        difference = Difference(name, theirs[name], value)
        if name == "blend" and _same_proportions(theirs[name], value, weights_are_given):
            result.harmless.append(difference._replace(remark="the same proportions"))
        else:
            result.fatal.append(difference)
    return result


def _same_proportions(theirs: Any, ours: Any, weights_are_given: bool) -> bool:
    if not isinstance(theirs, dict) or theirs.get("kind") != ours.get("kind"):
        return False
    blends = [_weights_and_names(blend) for blend in (theirs, ours)]
    if None in blends:
        return False
    (their_weights, their_names), (our_weights, our_names) = filter(None, blends)
    if not weights_are_given and any(set(w) == {1.0} for w in (their_weights, our_weights)):
        return False
    return their_names == our_names and _normalized(their_weights) == _normalized(our_weights)


def _weights_and_names(blend: Mapping[str, Any]) -> tuple[list[float], list[Any]] | None:
    """Return the weights and the names of the blend that is trained on; None without weights."""
    pairs = blend.get("blend") if blend.get("kind") == "blend" else blend.get("train")
    if not isinstance(pairs, list) or not pairs:
        return None
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    weights = [weight for weight, _ in pairs]
    if not all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights):
        return None
    return (weights, [name for _, name in pairs]) if sum(weights) > 0 else None


def _normalized(weights: Iterable[float]) -> list[float]:
    """Divide by the sum, to the last bit as Megatron does."""
    array = np.array(list(weights), dtype=np.float64)
    return (array / np.sum(array)).tolist()


def _shares(split: Any) -> list[float] | list[Any]:
    """Return the shares that Megatron makes of a split, or the split alone if it is none."""
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except (TypeError, ValueError):
        return [split]
    return _normalized([*parts, 0.0, 0.0, 0.0][:3]) if sum(parts[:3]) > 0 else [split]


def _is_longer(theirs: Any, ours: Any) -> bool:
    return type(theirs) is int and type(ours) is int and theirs > ours


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
