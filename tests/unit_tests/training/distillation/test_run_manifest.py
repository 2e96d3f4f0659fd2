# SPDX-License-Identifier: Apache-2.0
"""What a run's arguments become in the manifest."""

import argparse
from types import SimpleNamespace

import pytest

from megatron.core import __version__
from megatron.training.distillation.manifest import PACKAGE_VERSION
from megatron.training.distillation.run_manifest import run_manifest

TOKENIZER = SimpleNamespace(vocab_size=100)


def arguments(**changes) -> argparse.Namespace:
    """Return what Megatron's parser gives, as far as it matters here."""
    values = {
        "seq_length": 8,
        "padded_vocab_size": 128,
        "tokenizer_type": "NullTokenizer",
        "split": "80,20,0",
        "dataloader_type": None,
        "sft": False,
        "logits_save_dir": None,
        "load": None,
        "save": None,
        "pretrained_checkpoint": None,
        "ckpt_step": None,
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
    }
    return argparse.Namespace(**values | changes)


def test_a_run_by_hand():
    manifest = run_manifest(arguments(), TOKENIZER)
    assert manifest.sequence_length == 8
    assert (manifest.vocab_size, manifest.padded_vocab_size) == (100, 128)
    assert manifest.tokenizer is not None
    assert manifest.tokenizer["type"] == "NullTokenizer"
    assert manifest.split == "80,20,0"
    assert manifest.dataloader_type == "single"
    assert manifest.sft is False
    assert manifest.package_version == PACKAGE_VERSION
    assert manifest.megatron_core_version == __version__
    assert manifest.teacher is None
    assert run_manifest(arguments(tokenizer_type=None), None).tokenizer is None


@pytest.mark.parametrize(
    ("changes", "weighted"),
    [
        ({}, None),
        ({"data_path": ["/d/x"]}, False),
        ({"data_path": ["1", "/d/x", "2", "/d/y"]}, True),
        ({"data_path": ["/d/x", "/d/y"]}, False),
        ({"train_data_path": ["/d/x"]}, False),
    ],
)
def test_whether_the_blend_has_weights(changes, weighted):
    assert run_manifest(arguments(**changes), TOKENIZER).blend_weighted is weighted


def test_size_and_prompt_format_are_in_the_fingerprint():
    def fingerprint(size: int = 100, **changes) -> str:
        tokenizer = SimpleNamespace(vocab_size=size)
        found = run_manifest(arguments(**changes), tokenizer).tokenizer
        assert found is not None
        return found["fingerprint"]

    assert fingerprint() == fingerprint(sft_tokenizer_prompt_format="default")
    assert fingerprint() != fingerprint(101)
    packed = {"tokenizer_type": "SFTTokenizer", "sft": True}
    assert fingerprint(**packed, sft_tokenizer_prompt_format="default") != fingerprint(
        **packed, sft_tokenizer_prompt_format="identity"
    )


@pytest.mark.parametrize(
    ("changes", "teacher"),
    [
        ({}, None),
        ({"pretrained_checkpoint": "{}/big/", "load": "x", "save": "x"}, ("big", 12)),
        ({"load": "{}/big", "save": "{}/dump"}, ("big", 12)),
        ({"load": "{}/big", "save": "{}/dump", "ckpt_step": 4}, ("big", 4)),
        # The dump's own checkpoints move on with it.
        ({"load": "{}/big", "save": "{}/big"}, ("big", None)),
        ({"load": "{}/none", "save": "{}/dump"}, ("none", None)),
    ],
)
def test_the_teacher_is_its_checkpoint_and_step(tmp_path, changes, teacher):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "latest_checkpointed_iteration.txt").write_text("12\n")
    paths = {
        key: value.format(tmp_path) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    found = run_manifest(arguments(logits_save_dir="/cache", **paths), TOKENIZER).teacher
    expected = None if teacher is None else dict(zip(("checkpoint", "step"), teacher, strict=True))
    assert found == expected
    # A student says nothing of a teacher.
    assert run_manifest(arguments(**paths), TOKENIZER).teacher is None
