# SPDX-License-Identifier: Apache-2.0
"""The flags, their checks before anything is built, and the views of Megatron's arguments."""

import argparse
import functools
import hashlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.training import arguments as megatron_arguments
from megatron.training.distillation import argument_checks, arguments
from megatron.training.distillation.argument_checks import check_flags, finalize_args
from megatron.training.distillation.arguments import (
    FLAGS,
    RunSettings,
    add_distillation_args,
    run_identifiers,
)

BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 1"
SAVE = "--async-save --use-persistent-ckpt-worker --save ckpt --save-interval 4"
SHARD = "dp0__0-16.tar"


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own parser, extended as the entry scripts extend it; it takes a while to build."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_distillation_args(megatron_arguments.add_megatron_arguments(parser))


def parse(command_line: str) -> argparse.Namespace:
    return megatron_parser().parse_args(shlex.split(f"{BASE} {command_line}"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    (directory / SHARD).touch()
    return directory


# ---- defaults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("destination", "default"),
    [
        ("logits_save_dir", None),
        ("logits_save_top_k", 128),
        ("logits_save_top_p", None),
        ("logits_save_top_p_min_k", 1),
        ("logits_save_dtype", "fp16"),
        ("logits_save_8bit", False),
        ("logits_save_format", "auto"),
        ("logits_save_max_waiting_bytes", 8 * 2**30),
        ("logits_save_spool_dir", None),
        ("logits_load_dir", None),
        ("logits_load_decode_threads", 4),
        ("logits_load_msc_prefetch_depth", 2),
        ("logits_load_max_ahead_bytes", 2 * 2**30),
        ("logits_load_kd_loss_alpha", 1.0),
        ("logits_load_ignore_errors", False),
        ("logits_load_max_skipped_share", 0.05),
        ("logits_load_ignore_hash", False),
        ("logits_load_prefetch_factor", None),
        ("freeze_all_layers", False),
    ],
)
def test_defaults(destination: str, default: object) -> None:
    args = parse("")
    assert getattr(args, destination) == default
    assert type(getattr(args, destination)) is type(default)


def test_megatrons_own_entry_point_takes_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x.py", *BASE.split(), "--logits-save-top-k", "7"])
    args = megatron_arguments.parse_args(add_distillation_args)
    assert args.logits_save_top_k == 7
    assert args.logits_load_ignore_hash is False


def test_values_are_parsed() -> None:
    args = parse(
        "--logits-save-dir out --logits-save-top-k 7 --logits-save-top-p 0.5 "
        "--logits-save-top-p-min-k 3 --logits-save-dtype bf16 "
        "--logits-save-8bit --logits-save-format 3 "
        "--logits-save-max-waiting-bytes 5000 --logits-save-spool-dir /local "
        "--logits-load-dir in "
        "--logits-load-decode-threads 9 --logits-load-msc-prefetch-depth 0 "
        "--logits-load-max-ahead-bytes 6000 "
        "--logits-load-kd-loss-alpha 0.25 --logits-load-ignore-errors --logits-load-ignore-hash "
        "--logits-load-prefetch-factor 5 --freeze-all-layers",
    )
    assert (args.logits_save_dir, args.logits_load_dir) == ("out", "in")
    assert (args.logits_save_top_k, args.logits_save_top_p_min_k) == (7, 3)
    assert (args.logits_save_top_p, args.logits_load_kd_loss_alpha) == (0.5, 0.25)
    assert args.logits_save_dtype == "bf16"
    assert args.logits_save_8bit
    assert args.logits_save_format == "3"
    assert args.logits_save_max_waiting_bytes == 5000
    assert args.logits_save_spool_dir == "/local"
    assert (args.logits_load_decode_threads, args.logits_load_msc_prefetch_depth) == (9, 0)
    assert args.logits_load_max_ahead_bytes == 6000
    assert args.logits_load_prefetch_factor == 5
    assert args.logits_load_ignore_errors
    assert args.logits_load_ignore_hash
    assert args.freeze_all_layers


@pytest.mark.parametrize(
    ("flag", "value", "choices"),
    [
        ("--logits-save-dtype", "fp8", ("fp16", "bf16", "fp32")),
        ("--logits-save-format", "1", ("auto", "2", "3")),
    ],
)
def test_unknown_choice_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, choices: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(f"{flag} {value}")
    assert caught.value.code != 0
    message = capsys.readouterr().err
    for part in (flag, value, *choices):
        assert part in message


def test_megatrons_own_parser_has_every_choice() -> None:
    """The trainer parses the command line again, without the entry script's flags and corrections.

    A flag that it does not know it passes over; a choice that it does not know ends the job.
    """
    own = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    shared = [flag for flag in FLAGS if flag.name in own._option_string_actions]
    assert len(shared) > 5
    for flag in shared:
        choices = own._option_string_actions[flag.name].choices
        assert set(flag.options.get("choices") or []) <= set(choices or []), flag.name


def test_a_format_that_no_parser_checked_is_refused() -> None:
    args = parse(f"--logits-save-dir out {SAVE}")
    args.logits_save_format = 2  # as a YAML file may have it
    with pytest.raises(ValueError, match=r"--logits-save-format is 2: choose one of 'auto', '2'"):
        check_flags(args)


def test_flags_stand_on_a_parser_that_has_none() -> None:
    parser = add_distillation_args(argparse.ArgumentParser())
    assert parser.parse_args([]).logits_save_top_k == 128


# ---- refusals before validation ---------------------------------------------------------------

REFUSED_WHEN_SAVING = [
    ("--use-persistent-ckpt-worker --save ckpt --save-interval 4", ["add --async-save."]),
    ("--async-save --save ckpt --save-interval 4", ["add --use-persistent-ckpt-worker."]),
    ("--async-save --use-persistent-ckpt-worker --save-interval 4", ["add --save DIR."]),
    ("--async-save --use-persistent-ckpt-worker --save ckpt", ["add --save-interval N."]),
    (
        "",
        ["--async-save", "--use-persistent-ckpt-worker", "--save DIR", "--save-interval N"],
    ),
    (f"{SAVE} --logits-save-top-k 0", ["--logits-save-top-k is 0", "at least 1"]),
    (f"{SAVE} --logits-save-top-k -3", ["--logits-save-top-k is -3", "at least 1"]),
    (f"{SAVE} --logits-save-top-p 0", ["--logits-save-top-p is 0.0", "(0, 1]"]),
    (f"{SAVE} --logits-save-top-p 1.01", ["--logits-save-top-p is 1.01", "(0, 1]"]),
    (f"{SAVE} --logits-save-top-p nan", ["--logits-save-top-p is nan", "(0, 1]"]),
    (f"{SAVE} --logits-save-top-p-min-k 0", ["--logits-save-top-p-min-k is 0", "from 1"]),
    (
        f"{SAVE} --logits-save-top-k 8 --logits-save-top-p-min-k 9",
        ["--logits-save-top-p-min-k is 9", "--logits-save-top-k (8)"],
    ),
    *[
        (
            f"{SAVE} --logits-save-max-waiting-bytes {bound}",
            [f"--logits-save-max-waiting-bytes is {bound}", "at least 1"],
        )
        for bound in (0, -5)
    ],
    (
        f"{SAVE} --logits-save-spool-dir msc://bucket/spool",
        ["--logits-save-spool-dir is msc://bucket/spool", "a disk of the node"],
    ),
    (
        f"{SAVE} --logits-save-format 2 --logits-save-8bit",
        ["--logits-save-8bit", "which --logits-save-format 2 does not have", "3 or auto"],
    ),
    (
        f"{SAVE} --logits-save-8bit --logits-save-dtype fp32",
        ["--logits-save-8bit", "fp16, not fp32", "--logits-save-dtype out"],
    ),
]


@pytest.mark.parametrize(("flags", "parts"), REFUSED_WHEN_SAVING)
def test_refused_when_saving(flags: str, parts: list[str]) -> None:
    args = parse(f"--logits-save-dir out {flags}")
    with pytest.raises(ValueError) as caught:
        check_flags(args)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "--logits-load-kd-loss-alpha -0.1",
            ["--logits-load-kd-loss-alpha is -0.1", "[0, 1]"],
        ),
        ("--logits-load-kd-loss-alpha 1.5", ["--logits-load-kd-loss-alpha is 1.5", "[0, 1]"]),
        ("--logits-load-kd-loss-alpha nan", ["--logits-load-kd-loss-alpha is nan", "[0, 1]"]),
        ("--logits-load-decode-threads 0", ["--logits-load-decode-threads is 0", "at least 1"]),
        ("--logits-load-max-ahead-bytes 0", ["--logits-load-max-ahead-bytes is 0", "at least 1"]),
        (
            "--logits-load-msc-prefetch-depth -1",
            ["--logits-load-msc-prefetch-depth is -1", "0 or more"],
        ),
        *[
            (
                f"--logits-load-ignore-errors --logits-load-max-skipped-share {share}",
                [f"--logits-load-max-skipped-share is {share}", "[0, 1]"],
            )
            for share in ("-0.1", "1.1", "nan")
        ],
        (
            "--logits-load-max-skipped-share 0.5",
            ["--logits-load-max-skipped-share 0.5", "--logits-load-ignore-errors", "add it"],
        ),
    ],
)
def test_refused_when_loading(cache: Path, flags: str, parts: list[str]) -> None:
    args = parse(f"--logits-load-dir {cache} {flags}")
    with pytest.raises(ValueError) as caught:
        check_flags(args)
    for part in parts:
        assert part in str(caught.value)


REFUSED_WITH_BOTH = [
    ("--rampup-batch-size 4 4 100", "--rampup-batch-size", "fixed global batch size"),
    ("--step-batch-size-schedule 0:4", "--step-batch-size-schedule", "fixed global batch size"),
    (
        "--decrease-batch-size-if-needed",
        "--decrease-batch-size-if-needed",
        "fixed global batch size",
    ),
    ("--phase-transition-iterations 5", "--phase-transition-iterations", "order"),
    ("--dataloader-type cyclic", "--dataloader-type cyclic", "sequential sampler"),
    ("--dataloader-type external", "--dataloader-type external", "sequential sampler"),
    ("--hybrid-context-parallel", "--hybrid-context-parallel", "order"),
    ("--tensor-parallel-num-weight-shards 2", "GTP", "order"),
    ("--skip-train", "--skip-train", "no training step"),
]


@pytest.mark.parametrize("side", ["save", "load"])
@pytest.mark.parametrize(("flags", "named", "reason"), REFUSED_WITH_BOTH)
def test_refused_on_both_sides(cache: Path, side: str, flags: str, named: str, reason: str) -> None:
    ours = f"--logits-save-dir out {SAVE}" if side == "save" else f"--logits-load-dir {cache}"
    check_flags(parse(ours))
    with pytest.raises(ValueError) as caught:
        check_flags(parse(f"{ours} {flags}"))
    message = str(caught.value)
    assert named in message
    assert reason in message
    assert "Leave it out" in message
    # A run without distillation is none of our business.
    check_flags(parse(flags))


@pytest.mark.parametrize("side", ["save", "load"])
@pytest.mark.parametrize(
    ("seq_length", "cp_size", "chunks"), [(18, 2, 4), (4096, 3, 6), (2, 2, 4), (12, 4, 8)]
)
def test_sequence_that_cp_cannot_cut_is_refused(
    cache: Path, side: str, seq_length: int, cp_size: int, chunks: int
) -> None:
    ours = f"--logits-save-dir out {SAVE}" if side == "save" else f"--logits-load-dir {cache}"
    cut = f"--seq-length {seq_length} --context-parallel-size {cp_size}"
    with pytest.raises(ValueError) as caught:
        check_flags(parse(f"{ours} {cut}"))
    message = str(caught.value)
    for part in (f"--seq-length {seq_length}", f"{chunks} equal chunks", f"multiple of {chunks}"):
        assert part in message
    check_flags(
        parse(f"{ours} --seq-length {seq_length * chunks} --context-parallel-size {cp_size}")
    )
    check_flags(parse(f"{ours} --seq-length {seq_length}"))


@pytest.mark.parametrize("side", ["save", "load"])
def test_linear_cross_entropy_fusion_is_refused(cache: Path, side: str) -> None:
    ours = f"--logits-save-dir out {SAVE}" if side == "save" else f"--logits-load-dir {cache}"
    args = parse(f"{ours} --cross-entropy-loss-fusion")
    # The command line of 0.19.2 does not offer this choice; a YAML configuration does.
    args.cross_entropy_fusion_impl = "linear"
    with pytest.raises(ValueError, match=r"fusion-impl linear.*losses instead of logits"):
        check_flags(args)
    # Without the fusion its implementation is not used.
    args.cross_entropy_loss_fusion = False
    check_flags(args)


SFT = "--sft --tokenizer-type SFTTokenizer --no-create-attention-mask-in-dataloader"
PACKED_BY_DOCUMENT = "--dataloader-inter-document-masking"
REFUSED_WHEN_PACKED = [
    ("--sft --no-create-attention-mask-in-dataloader", ["is None: use SFTTokenizer"]),
    (
        "--sft --no-create-attention-mask-in-dataloader --tokenizer-type HuggingFaceTokenizer",
        ["is HuggingFaceTokenizer: use SFTTokenizer"],
    ),
    (
        "--sft --tokenizer-type SFTTokenizer",
        ["add --no-create-attention-mask-in-dataloader"],
    ),
    (f"{SFT} --reset-position-ids", ["--reset-position-ids", "Leave it out"]),
    (f"{SFT} --reset-attention-mask", ["--reset-attention-mask", "Leave it out"]),
    (
        f"{SFT} --eval-iters 0 --data-path corpus.jsonl",
        ["--eval-iters 0", "add --split 100,0,0"],
    ),
    (f"{SFT} --eval-iters 0 --data-path x --split 98,0,2", ["add --split 100,0,0"]),
    (f"{SFT} --eval-iters 0 --train-data-path x --valid-data-path y", ["evaluate at least once"]),
    (
        f"{SFT} --context-parallel-size 2",
        ["--sft with --context-parallel-size 2", "tokens differ", "Use --context-parallel-size 1"],
    ),
    (
        f"{SFT} --pipeline-model-parallel-size 2 --micro-batch-size 4",
        ["--sft with --pipeline-model-parallel-size 2 and --micro-batch-size 4"],
    ),
    (
        f"{PACKED_BY_DOCUMENT} --context-parallel-size 2 --micro-batch-size 2",
        [f"{PACKED_BY_DOCUMENT} with --context-parallel-size 2 and --micro-batch-size 2"],
    ),
    (
        f"{PACKED_BY_DOCUMENT} --pipeline-model-parallel-size 2 --micro-batch-size 2",
        [f"{PACKED_BY_DOCUMENT} with --pipeline-model-parallel-size 2 and --micro-batch-size 2"],
    ),
]


@pytest.mark.parametrize("side", ["save", "load"])
@pytest.mark.parametrize(("flags", "parts"), REFUSED_WHEN_PACKED)
def test_refused_with_packed_sequences(
    cache: Path, side: str, flags: str, parts: list[str]
) -> None:
    ours = f"--logits-save-dir out {SAVE}" if side == "save" else f"--logits-load-dir {cache}"
    with pytest.raises(ValueError) as caught:
        check_flags(parse(f"{ours} {flags}"))
    message = str(caught.value)
    assert message.count("\n  - ") == 1
    for part in parts:
        assert part in message
    # A run without distillation is none of our business.
    check_flags(parse(flags))


@pytest.mark.parametrize("side", ["save", "load"])
@pytest.mark.parametrize(
    "flags",
    [
        SFT,
        f"{SFT} --micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
        f"{SFT} --pipeline-model-parallel-size 2",
        f"{SFT} --eval-iters 0 --data-path corpus.jsonl --split 100,0,0",
        f"{SFT} --eval-iters 0 --data-path corpus.jsonl --split 1",
        f"{SFT} --eval-iters 0 --train-data-path x",
        f"{SFT} --eval-iters 1 --data-path corpus.jsonl",
        f"{PACKED_BY_DOCUMENT} --micro-batch-size 4",
        f"{PACKED_BY_DOCUMENT} --context-parallel-size 2",
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4",
    ],
)
def test_accepted_with_packed_sequences(cache: Path, side: str, flags: str) -> None:
    ours = f"--logits-save-dir out {SAVE}" if side == "save" else f"--logits-load-dir {cache}"
    check_flags(parse(f"{ours} {flags}"))


@pytest.mark.parametrize("spelling", ["{cache}", "{cache}/", "{cache}/../cache", "{link}"], ids=str)
def test_saving_and_loading_in_one_directory_is_refused(
    cache: Path, tmp_path: Path, spelling: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache)
    other = spelling.format(cache=cache, link=link)
    args = parse(f"--logits-save-dir {other} {SAVE} --logits-load-dir {cache}")
    with pytest.raises(ValueError, match=r"are the same directory.*save to another one"):
        check_flags(args)
    check_flags(parse(f"--logits-save-dir {tmp_path}/new {SAVE} --logits-load-dir {cache}"))


def test_saving_and_loading_at_one_object_store_url_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(argument_checks.storage, "list_names", lambda directory: [SHARD])
    args = parse(f"--logits-save-dir msc://s/c/ {SAVE} --logits-load-dir msc://s/c")
    args.enable_msc = True
    with pytest.raises(ValueError, match=r"are the same directory"):
        check_flags(args)


def test_object_store_url_needs_the_client() -> None:
    args = parse(f"--logits-save-dir msc://store/cache {SAVE}")
    with pytest.raises(ValueError, match=r"msc://store/cache is an object-store URL.*--enable-msc"):
        check_flags(args)


def test_unreadable_load_directory_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ValueError) as caught:
        check_flags(parse(f"--logits-load-dir {missing}"))
    message = str(caught.value)
    assert f"--logits-load-dir {missing} cannot be read" in message
    assert "No such file or directory" in message
    assert "--logits-save-dir" in message


def test_load_directory_is_listed_by_rank_0_only(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    list_names = argument_checks.storage.list_names
    monkeypatch.setattr(
        argument_checks.storage, "list_names", lambda path: listed.append(path) or list_names(path)
    )
    monkeypatch.setenv("RANK", "3")
    check_flags(parse(f"--logits-load-dir {cache}"))
    check_flags(parse(f"--logits-load-dir {tmp_path}/missing"))
    assert listed == []
    # What the flags alone say is still checked everywhere.
    with pytest.raises(ValueError, match=r"kd-loss-alpha is 2"):
        check_flags(parse(f"--logits-load-dir {cache} --logits-load-kd-loss-alpha 2"))
    monkeypatch.setenv("RANK", "0")
    check_flags(parse(f"--logits-load-dir {cache}"))
    assert listed == [str(cache)]


def test_load_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match=r"cannot be read.*Not a directory"):
        check_flags(parse(f"--logits-load-dir {path}"))


@pytest.mark.parametrize(
    "content", [[], ["notes.txt"], ["dp0__0-16.tar.stale", "dp0__0-8.tar.tmp"]]
)
def test_load_directory_without_shards_is_refused(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as caught:
        check_flags(parse(f"--logits-load-dir {tmp_path}"))
    assert "holds no shard named like dp0__0-1024.tar" in str(caught.value)
    assert f"{len(content)} entries" in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    args = parse(
        "--logits-save-dir out --logits-save-top-k 0 --logits-save-top-p 2 "
        "--rampup-batch-size 4 4 100 --dataloader-type cyclic",
    )
    with pytest.raises(ValueError) as caught:
        check_flags(args)
    message = str(caught.value)
    for part in ("--async-save", "top-k is 0", "top-p is 2.0", "--rampup", "cyclic"):
        assert part in message


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--logits-save-top-p 1",
        "--logits-save-top-p 1e-9 --logits-save-top-k 1 --logits-save-top-p-min-k 1",
        "--logits-save-top-k 8 --logits-save-top-p-min-k 8",
        "--logits-save-max-waiting-bytes 1",
        "--logits-save-spool-dir /local",
        "--logits-save-format 2 --logits-save-dtype fp32",
        "--logits-save-format 3",
        "--logits-save-format 3 --logits-save-8bit",
        "--logits-save-8bit --logits-save-dtype fp16",
        "--dataloader-type single",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    ],
)
def test_accepted_when_saving(flags: str) -> None:
    check_flags(parse(f"--logits-save-dir out {SAVE} {flags}"))


@pytest.mark.parametrize("share", ["0", "0.05", "1"])
def test_accepted_share_of_skipped_steps(cache: Path, share: str) -> None:
    flags = f"--logits-load-ignore-errors --logits-load-max-skipped-share {share}"
    args = parse(f"--logits-load-dir {cache} {flags}")
    check_flags(args)
    assert args.logits_load_max_skipped_share == float(share)


@pytest.mark.parametrize("alpha", ["0", "0.5", "1"])
def test_accepted_when_loading(cache: Path, alpha: str) -> None:
    check_flags(parse(f"--logits-load-dir {cache} --logits-load-kd-loss-alpha {alpha}"))


# ---- after validation -------------------------------------------------------------------------


def finalize(
    monkeypatch: pytest.MonkeyPatch,
    command_line: str,
    *,
    vocab_size: int = 1000,
    padded: int | None = None,
) -> argparse.Namespace:
    """Parse, then finish as after Megatron's validation, with a tokenizer of *vocab_size*."""
    args = parse(command_line)
    args.tokenizer_type = "NullTokenizer"
    args.padded_vocab_size = padded
    tokenizer = SimpleNamespace(vocab_size=vocab_size)
    monkeypatch.setattr(arguments, "get_tokenizer", lambda: tokenizer)
    finalize_args(args)
    return args


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A directory that Megatron takes for a checkpoint."""
    directory = tmp_path / "teacher"
    directory.mkdir()
    (directory / "latest_checkpointed_iteration.txt").write_text("5")
    return directory


def test_k_above_the_vocabulary_is_lowered_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], teacher: Path
) -> None:
    flags = "--logits-save-top-k 200 --logits-save-top-p-min-k 150"
    args = finalize(
        monkeypatch, f"--logits-save-dir out {SAVE} {flags} --load {teacher}", vocab_size=95
    )
    assert args.logits_save_top_k == 95
    assert args.logits_save_top_p_min_k == 95
    printed = capsys.readouterr().out
    assert "--logits-save-top-k 200 is larger than the vocabulary" in printed
    assert "95" in printed


def test_k_within_the_vocabulary_stays_without_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], teacher: Path
) -> None:
    args = finalize(
        monkeypatch,
        f"--logits-save-dir out {SAVE} --logits-save-top-k 95 --freeze-all-layers --load {teacher}",
        vocab_size=95,
    )
    assert args.logits_save_top_k == 95
    assert capsys.readouterr().out.count("\n") == 1  # the format


@pytest.mark.parametrize(
    ("flags", "vocab_size", "padded", "said"),
    [
        ("", 131072, 131072, "format 2: the padded vocabulary of 131072 entries fits"),
        ("", 131073, None, "format 3: the padded vocabulary of 131073 entries needs"),
        ("", 131072, 131200, "format 3: the padded vocabulary of 131200 entries needs"),
        ("--logits-save-format 2", 131072, 131200, "format 2: --logits-save-format asks for it"),
        ("--logits-save-format 3", 95, 128, "format 3: --logits-save-format asks for it"),
        ("--logits-save-8bit", 95, 128, "format 3: format 2 does not have the 8-bit codes"),
    ],
)
def test_format_is_said_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    teacher: Path,
    flags: str,
    vocab_size: int,
    padded: int | None,
    said: str,
) -> None:
    finalize(
        monkeypatch,
        f"--logits-save-dir out {SAVE} --load {teacher} {flags}",
        vocab_size=vocab_size,
        padded=padded,
    )
    assert re.search(f"> The dump is written in {said}", capsys.readouterr().out)


def test_vocabulary_must_fit_the_17_bits_of_format_2(
    monkeypatch: pytest.MonkeyPatch, teacher: Path
) -> None:
    command_line = f"--logits-save-dir out {SAVE} --load {teacher} --logits-save-format 2"
    finalize(monkeypatch, command_line, vocab_size=131072)
    with pytest.raises(ValueError, match=r"131073 entries.*131072 \(17 bits\): use .* 3 or auto"):
        finalize(monkeypatch, command_line, vocab_size=131073)


def test_teacher_that_is_not_frozen_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], teacher: Path
) -> None:
    command_line = f"--logits-save-dir out {SAVE} --load {teacher}"
    finalize(monkeypatch, command_line)
    warning = capsys.readouterr().out
    assert "WARNING" in warning
    assert "--freeze-all-layers" in warning
    assert "keeps training" in warning
    finalize(monkeypatch, f"{command_line} --freeze-all-layers")
    assert "WARNING" not in capsys.readouterr().out


def test_notes_come_from_rank_0_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], teacher: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    finalize(monkeypatch, f"--logits-save-dir out {SAVE} --load {teacher}")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "flags",
    [
        "--load {missing}",
        "--pretrained-checkpoint {missing}",
        "--load {missing} --pretrained-checkpoint {missing}2",
    ],
)
def test_dump_without_its_checkpoint_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str
) -> None:
    flags = flags.format(missing=tmp_path / "missing")
    with pytest.raises(ValueError) as caught:
        finalize(monkeypatch, f"--logits-save-dir out {SAVE} {flags}")
    message = str(caught.value)
    assert "No checkpoint was found" in message
    assert "random weights" in message
    for word in shlex.split(flags):
        assert word in message


def test_dump_that_resumes_or_starts_from_the_teacher_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, teacher: Path
) -> None:
    own = f"--load {tmp_path / 'own'} --pretrained-checkpoint {teacher}"
    finalize(monkeypatch, f"--logits-save-dir out {SAVE} {own}")
    finalize(monkeypatch, f"--logits-save-dir out {SAVE} --pretrained-checkpoint {teacher}")


def test_dump_from_scratch_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finalize(monkeypatch, f"--logits-save-dir out {SAVE} --freeze-all-layers")
    printed = capsys.readouterr().out
    assert "WARNING" in printed
    assert "random weights" in printed


def test_prefetch_factor_says_that_it_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    finalize(monkeypatch, f"--logits-load-dir {cache} --logits-load-prefetch-factor 3")
    assert "--logits-load-prefetch-factor has no effect" in capsys.readouterr().out
    finalize(monkeypatch, f"--logits-load-dir {cache}")
    assert capsys.readouterr().out == ""


# ---- settings of a run ------------------------------------------------------------------------


def test_settings_have_the_format_and_the_sizes_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parse("--seq-length 8 --global-batch-size 4 --train-iters 2 --mock-data")
    args.padded_vocab_size = 131200
    monkeypatch.setattr(arguments, "get_args", lambda: args)
    settings = RunSettings.from_global_args()
    assert (settings.save_format, settings.vocab_size) == ("auto", None)
    assert settings.padded_vocab_size == 131200
    assert settings.format_of("fp16").version == 3
    args.logits_save_8bit = True
    found = RunSettings.from_global_args().format_of("fp16")
    assert (found.version, found.save_dtype) == (3, "uint8")
    args.logits_save_format, args.logits_save_8bit = "2", False
    assert RunSettings.from_global_args().format_of("fp16").version == 2
    # A script that adds no flags of its own has only those of Megatron's parser.
    del args.logits_save_format, args.logits_save_8bit
    settings = RunSettings.from_global_args()
    assert (settings.save_format, settings.save_8bit) == ("auto", False)


# ---- run identity -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "blend"),
    [
        ("--mock-data", {"kind": "mock", "mock": True}),
        ("--data-path /a/b/text", {"kind": "blend", "blend": [[1.0, "text"]]}),
        ("--data-path a/x.v2 b/y", {"kind": "blend", "blend": [[1.0, "x"], [1.0, "y"]]}),
        (
            "--data-path 0.25 a/x 3 b/y",
            {"kind": "blend", "blend": [[0.25, "x"], [3.0, "y"]]},
        ),
        (
            "--train-data-path 2 a/x 1 b/y --valid-data-path c/z",
            {"kind": "blend_per_split", "train": [[2.0, "x"], [1.0, "y"]]},
        ),
    ],
)
def test_blend_identity(flags: str, blend: dict[str, object]) -> None:
    args = parse(f"--global-batch-size 4 --train-iters 10 --seed 7 {flags}")
    identifiers = run_identifiers(args)
    assert identifiers == {"seed": 7, "train_samples": 40, "blend": blend}
    # The hash is over this text, so the order of the keys counts.
    assert list(identifiers) == ["seed", "train_samples", "blend"]


def test_moved_data_has_the_same_identity() -> None:
    common = "--global-batch-size 4 --train-iters 10"
    here = run_identifiers(parse(f"{common} --data-path 0.5 /here/x 0.5 /here/y"))
    there = run_identifiers(parse(f"{common} --data-path 0.5 /moved/x 0.5 z/y"))
    assert here == there


@pytest.mark.parametrize(
    ("flags", "samples"),
    [
        ("--train-samples 1000 --global-batch-size 4", 1000),
        ("--train-iters 10 --global-batch-size 8", 80),
        ("--train-iters 20 --global-batch-size 4", 80),
    ],
)
def test_train_samples_identity(flags: str, samples: int) -> None:
    args = parse(f"--mock-data {flags}")
    assert run_identifiers(args)["train_samples"] == samples


def test_identity_hash_of_a_run_by_hand() -> None:
    args = parse("--global-batch-size 4 --train-iters 2 --seed 1 --data-path 0.5 d/x.bin.v1 2 y")
    text = '{"seed":1,"train_samples":8,"blend":{"kind":"blend","blend":[[0.5,"x.bin"],[2.0,"y"]]}}'
    assert json.dumps(run_identifiers(args), separators=(",", ":")) == text
    from megatron.training.distillation.utils import identity_hash

    assert identity_hash(run_identifiers(args)) == hashlib.md5(text.encode()).hexdigest()
