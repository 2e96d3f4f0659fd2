# SPDX-License-Identifier: Apache-2.0
"""Which differences between a shard and a run matter, and that each is named by value."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.distillation.errors import CacheIdentityError
from megatron.training.distillation.manifest import (
    PACKAGE_VERSION,
    ExpectedRun,
    RunManifest,
    compare,
    compare_identifiers,
)
from megatron.training.distillation.shard_meta import SaverSettings, ShardMeta, check_identity
from megatron.training.distillation.tokenizer_fingerprint import tokenizer_fingerprint

MANIFEST = RunManifest(
    sequence_length=8,
    vocab_size=100,
    padded_vocab_size=128,
    tokenizer={"type": "NullTokenizer", "fingerprint": "ab"},
    split="80,20,0",
    dataloader_type="single",
    sft=False,
    blend_weighted=True,
    package_version="1",
    megatron_core_version="2",
    teacher={"checkpoint": "teacher", "step": 3},
)
IDENTIFIERS = {"seed": 1, "train_samples": 8, "blend": {"kind": "mock", "mock": True}}
SAVER = SaverSettings(mbs_save=1, dp_size_save=1, gbs_save=1)


def blend(*pairs: tuple[float, str]) -> dict:
    return {"blend": {"kind": "blend", "blend": [list(pair) for pair in pairs]}}


# ---- the manifest --------------------------------------------------------------------------


def test_json_gives_it_back_and_more_is_ignored():
    stored = json.loads(json.dumps(MANIFEST.to_dict()))
    assert RunManifest.from_dict(stored | {"from the future": 1}) == MANIFEST
    assert RunManifest.from_dict({}) == RunManifest()


def test_the_version_is_that_of_the_project():
    project = Path(__file__).parents[4] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == PACKAGE_VERSION


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("sequence_length", 16, "its sequence_length is 8, here it is 16"),
        ("vocab_size", 99, "its vocab_size is 100, here it is 99"),
        (
            "tokenizer",
            {"type": "NullTokenizer", "fingerprint": "cd"},
            'its tokenizer is {"type":"NullTokenizer","fingerprint":"ab"}, here it is',
        ),
        ("split", "70,30,0", 'its split is "80,20,0", here it is "70,30,0"'),
        ("split", "nonsense", 'here it is "nonsense"'),
        ("dataloader_type", "cyclic", 'its dataloader_type is "single", here it is "cyclic"'),
        ("sft", True, "its sft is false, here it is true"),
        ("blend_weighted", False, "its blend_weighted is true, here it is false"),
    ],
)
def test_fatal_differences_are_named_with_both_values(field, value, text):
    found = compare(MANIFEST, replace(MANIFEST, **{field: value}))
    assert not found.harmless
    (difference,) = found.fatal
    assert text in str(difference)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("padded_vocab_size", 256),
        ("package_version", "3"),
        ("megatron_core_version", "3"),
        ("teacher", {"checkpoint": "teacher", "step": 4}),
        ("split", "80,10,10"),
    ],
)
def test_harmless_differences_are_told(field, value):
    found = compare(MANIFEST, replace(MANIFEST, **{field: value}))
    assert not found.fatal
    assert [difference.name for difference in found.harmless] == [field]


@pytest.mark.parametrize(
    ("field", "value"),
    [("split", "8, 2,0"), ("split", "0.8,0.2"), ("sequence_length", 4), ("vocab_size", None)],
)
def test_what_is_the_same_in_other_words_is_no_difference(field, value):
    found = compare(MANIFEST, replace(MANIFEST, **{field: value}))
    assert not found.fatal
    assert not found.harmless


def test_a_dump_does_not_go_on_with_shorter_sequences():
    found = compare(MANIFEST, replace(MANIFEST, sequence_length=4), may_trim=False)
    assert [difference.name for difference in found.fatal] == ["sequence_length"]


# ---- the blend -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "known", "same"),
    [
        (blend((1, "a"), (3, "b")), blend((0.25, "a"), (0.75, "b")), False, True),
        (blend((3, "b"), (1, "a")), blend((0.25, "a"), (0.75, "b")), False, False),
        (blend((1, "a"), (3, "b")), blend((0.25, "a"), (0.75, "c")), False, False),
        (blend((1, "a"), (3, "b")), blend((1, "a"), (2, "b")), False, False),
        # 0.3 / (0.1 + 0.3) is not 0.75 in binary, and Megatron would deal ties otherwise.
        (blend((1, "a"), (3, "b")), blend((0.1, "a"), (0.3, "b")), False, False),
        # Without weights the identifiers show 1.0, and the data sets are mixed by their sizes.
        (blend((1.0, "a"), (1.0, "b")), blend((2.0, "a"), (2.0, "b")), False, False),
        (blend((1.0, "a"), (1.0, "b")), blend((2.0, "a"), (2.0, "b")), True, True),
        (blend((0, "a")), blend((1, "a")), False, False),
        ({"blend": {"kind": "blend", "blend": "x"}}, blend((1, "a")), False, False),
        (
            {"blend": {"kind": "blend_per_split", "train": [[1, "a"], [3, "b"]]}},
            {"blend": {"kind": "blend_per_split", "train": [[2, "a"], [6, "b"]]}},
            False,
            True,
        ),
        ({"blend": {"kind": "blend_per_split", "train": None}}, blend((1, "a")), False, False),
    ],
)
def test_scaled_weights_are_the_same_data(theirs, ours, known, same):
    found = compare_identifiers(theirs, ours, weights_are_given=known)
    assert [d.name for d in found.harmless] == ["blend"] * same
    assert [d.name for d in found.fatal] == ["blend"] * (not same)


def test_weights_that_count_as_the_same_are_dealt_alike_by_megatron():
    numpy = pytest.importorskip("numpy")
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    from megatron.core.datasets.utils import normalize

    def dealt(weights: list[float]) -> list[int]:
        index, sample = numpy.zeros(4000, numpy.int16), numpy.zeros(4000, numpy.int64)
        helpers.build_blending_indices(
            index, sample, numpy.array(normalize(weights)), len(weights), 4000, False
        )
        return index.tolist()

    for weights, scaled in (([1, 3], [0.25, 0.75]), ([1, 2, 5], [4, 8, 20])):
        pairs = [blend(*zip(each, "abc", strict=False)) for each in (weights, scaled)]
        assert compare_identifiers(*pairs).harmless
        assert dealt(weights) == dealt(scaled)


def test_a_scaled_blend_passes_whatever_the_hash_and_is_told():
    meta = ShardMeta.for_run(IDENTIFIERS | blend((1, "a"), (3, "b")), SAVER)
    told = check_identity(meta, IDENTIFIERS | blend((0.25, "a"), (0.75, "b")), "here")
    assert [difference.name for difference in told] == ["blend"]
    assert "the same proportions" in str(told[0])


# ---- the check -----------------------------------------------------------------------------


def test_all_fatal_differences_are_in_one_error():
    meta = ShardMeta.for_run(IDENTIFIERS, SAVER, MANIFEST)
    ours = replace(MANIFEST, split="1,0,0", vocab_size=1, package_version="9")
    run = ExpectedRun(identifiers=IDENTIFIERS | {"seed": 2}, manifest=ours)
    with pytest.raises(CacheIdentityError) as caught:
        check_identity(meta, run, "/c/dp0__0-8.tar")
    for text in ("/c/dp0__0-8.tar", "its seed is 1", "its vocab_size is 100", "its split is"):
        assert text in str(caught.value)
    assert "package_version" not in str(caught.value)
    told = check_identity(meta, replace(run, enforced=False), "/c/dp0__0-8.tar")
    assert {d.name for d in told} == {"seed", "vocab_size", "split", "package_version"}


def test_a_cache_without_manifest_is_compared_by_its_identifiers():
    meta = ShardMeta.for_run(IDENTIFIERS, SAVER)
    assert check_identity(meta, ExpectedRun(identifiers=IDENTIFIERS, manifest=MANIFEST), "x") == []


# ---- the tokenizer -------------------------------------------------------------------------


class Tokens:
    """A tokenizer that tells its vocabulary."""

    def __init__(self, vocab) -> None:
        self.vocab = vocab
        self.vocab_size = len(vocab)


class Mute:
    """A tokenizer that does not, in either of the ways Megatron's do not."""

    vocab_size = 3

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    @property
    def vocab(self):
        if self._raises:
            raise NotImplementedError
        return NotImplementedError("not used")


def test_the_vocabulary_decides_in_whatever_form_it_is_told():
    fingerprint = tokenizer_fingerprint("T", Tokens(["a", "b", "\ud800"]))
    assert len(fingerprint) == 32
    for same in ({"b": 1, "a": 0, "\ud800": 2}, {2: "\ud800", 0: "a", 1: "b"}):
        assert tokenizer_fingerprint("T", Tokens(same)) == fingerprint
    for other in (["b", "a", "\ud800"], ["a", "b"], ["ab", "", "\ud800"]):
        assert tokenizer_fingerprint("T", Tokens(other)) != fingerprint
    assert tokenizer_fingerprint("U", Tokens(["a", "b", "\ud800"])) != fingerprint
    assert tokenizer_fingerprint("T", Tokens(["a", "b", "\ud800"]), options=["x"]) != fingerprint


def test_a_library_inside_megatrons_wrappers_is_asked():
    class HuggingFace:
        def get_vocab(self):
            return {"a": 0, "c": 2}  # with a hole

    class Wrapper:
        vocab_size = 3

        def __init__(self, inner, name):
            setattr(self, name, inner)

        @property
        def vocab(self):
            raise KeyError(1)

    wrapped = Wrapper(Wrapper(HuggingFace(), "tokenizer"), "_tokenizer")
    flat = Tokens({"a": 0, "c": 2})
    flat.vocab_size = 3
    assert tokenizer_fingerprint("T", wrapped) == tokenizer_fingerprint("T", flat)


@pytest.mark.parametrize("raises", [True, False])
def test_files_decide_where_the_vocabulary_is_not_told(tmp_path, raises):
    def fingerprint(name: str, content: str) -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "tokenizer.json").write_text(content)
        (directory / "unrelated").write_text(name)
        return tokenizer_fingerprint("T", Mute(raises), files=[str(directory)])

    assert fingerprint("here", "1") == fingerprint("moved", "1")
    assert fingerprint("here", "1") != fingerprint("here", "2")
    assert tokenizer_fingerprint("T", Mute(raises), files=["/no/such/file"])


def test_the_fingerprint_is_the_same_in_every_process():
    code = (
        "from megatron.training.distillation.tokenizer_fingerprint import tokenizer_fingerprint\n"
        "class T:\n    vocab = {c: ord(c) for c in set('abcdefgh')}\n    vocab_size = 8\n"
        "print(tokenizer_fingerprint('T', T()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
