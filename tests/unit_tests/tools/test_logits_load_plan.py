# SPDX-License-Identifier: Apache-2.0
"""The command line of the predictions, and the table that the documentation shows of it."""

import json
import re
from pathlib import Path

import pytest

from tools.logits_load_plan import main

ROOT = Path(__file__).parents[3]
EXAMPLES = "tools/load_plan/example_runs.txt"
README = ROOT / "megatron" / "training" / "distillation" / "README.md"
RUN = (
    "--world-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--context-parallel-size 2 --micro-batch-size 2 --global-batch-size 64 --seq-length 4096 "
    "--train-samples 64000 --save-interval 10 --step-time 2"
)


def printed(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    assert main(flags.split()) == 0
    return capsys.readouterr().out


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_a_run_worked_out_by_hand(capsys):
    found = json.loads(printed(capsys, f"{RUN} --json --iterations 50"))
    member = 8 * 4096 * 340  # 64 samples over 8 replicas
    listing, reads, memory, stalls = (
        found[part] for part in ("listing", "reads", "memory", "stalls")
    )
    assert (listing["names"], listing["requests"]) == (8 * 100, 1)
    assert (listing["broadcast_ranks"], reads["readers"]) == (32, 8)
    assert (reads["members_per_iteration"], reads["amplification"]) == (8, 1)
    head = 2048 + 10 * 40  # the metadata and its index
    assert reads["bytes_per_second"] == pytest.approx(8 * (512 + member + head / 10) / 2)
    assert reads["requests_per_second"] == pytest.approx(8 * (1 + 2 / 10) / 2)
    # Ranks 32, 36, ... 60 are readers, 8 ranks to a node.
    assert memory["readers_per_node"] == 2
    assert memory["microbatch"] == 2 * 4096 * 533
    # The one in use, the next one, 3 on their way, and 4 ahead of these with their members
    assert memory["reader"] == 13 * 8 * 4096 * 533
    # Two opens of two requests, a member, its decoding
    read = 4 * 0.002 + 2 * head / 1.5e9 + 0.002 + (512 + member) / 1.5e9 + 8 * 4096 * 2e-6
    assert stalls["start"] == pytest.approx(listing["seconds"] + read, rel=0.01)
    assert stalls["resume"] == pytest.approx(stalls["start"])
    assert (stalls["steady"], stalls["boundary"]) == (0, 0)


def test_the_table_says_what_json_says(capsys):
    options = f"{RUN} --iterations 20 --store object --logits-load-decode-threads 1"
    found = json.loads(printed(capsys, options + " --json"))
    shown = cells(printed(capsys, options))
    stalls = found["stalls"]
    assert shown["20 iterations simulated"] == [""]
    assert shown["readers"] == ["8"]
    assert shown["shards are read"] == ["whole"]
    assert shown["wait at the start"] == [f"{stalls['start'] * 1e3:.1f} ms"]
    assert shown["wait per iteration besides"] == [f"{stalls['steady'] * 1e3:.1f} ms"]
    assert shown["share of an iteration"] == [f"{stalls['steady_share']:.1%}"]
    assert shown["host memory, one reader"] == [f"{found['memory']['reader'] / 1e6:.3g} MB"]


def test_a_file_of_runs_gives_columns(capsys, tmp_path):
    runs = tmp_path / "runs.txt"
    runs.write_text(f"# name flags\n\nsame {RUN}\nother {RUN} --save-data-parallel-size 2 # 2\n")
    flags = f"--runs {runs} --iterations 12"
    shown = cells(printed(capsys, flags))
    assert shown["12 iterations simulated"] == ["same", "other"]
    assert shown["rows decoded / needed"] == ["1.00", "4.00"]
    assert shown["longest wait at a shard's boundary"] == ["0.0 ms", "0.0 ms"]
    # The command line holds for all.
    shown = cells(printed(capsys, f"{flags} --save-data-parallel-size 8 --save-interval 50"))
    assert shown["rows decoded / needed"] == ["1.00", "1.00"]
    assert shown["longest wait at a shard's boundary"] == ["none passed"] * 2
    assert list(json.loads(printed(capsys, f"{flags} --json"))) == ["same", "other"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world-size 63", r"world size \(63\) must be a multiple of .*\(2 \* 2 \* 2 = 8\)"),
        ("--save-data-parallel-size 3", r"global batch size \(64\) .*\(2 \* 3\)"),
        ("--step-time -1", "step_time is -1.0, expected more than 0"),
        ("--train-samples 63", "63 samples, fewer than one iteration"),
        ("--store tape", "invalid choice: 'tape'"),
        ("--runs /nowhere/runs.txt", "No such file or directory: '/nowhere/runs.txt'"),
    ],
)
def test_what_cannot_be_is_an_error_of_the_command_line(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main([*RUN.split(), *flags.split()])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [("# nothing\n", "names no run"), ("a --x\na --y\n", "two runs named a")],
)
def test_files_of_runs_that_name_none_or_one_twice(capsys, tmp_path, text, message):
    runs = tmp_path / "runs.txt"
    runs.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["--runs", str(runs)])
    assert message in capsys.readouterr().err


def test_the_help_names_every_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "LOGITS_LOAD_MAX_AHEAD_BYTES the student's (default: 2147483648)" in text
    assert "to the first byte; default 2, object stores 30 --connection-gb-s" in text
    assert "None" not in text


@pytest.mark.slow
def test_the_documentation_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = README.read_text()
    assert f"python -m tools.logits_load_plan --runs {EXAMPLES}\n" in text
    assert printed(capsys, f"--runs {EXAMPLES}") in text
