# SPDX-License-Identifier: Apache-2.0
"""Tests of examples.offline_distillation.stages and progress, with shell commands as stages."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from examples.offline_distillation.progress import Progress, format_seconds
from examples.offline_distillation.stages import Stage, StageError, run_stages


def shell(tmp_path: Path, name: str, script: str, needs: tuple[Stage, ...] = ()) -> Stage:
    """A stage that runs a shell script with the tests' folder as working directory."""
    return Stage(
        name=name,
        title=f"Stage {name}",
        command=("sh", "-c", script),
        folder=tmp_path / name,
        needs=needs,
    )


def test_done_stages_are_skipped_and_changed_ones_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shell(tmp_path, "first", "echo run >> count")
    second = shell(tmp_path, "second", "echo second; cat count", (first,))
    run_stages([first, second], cwd=tmp_path)
    run_stages([first, second], cwd=tmp_path)
    assert (tmp_path / "count").read_text() == "run\n"
    assert "[2/2] Stage second: done before" in capsys.readouterr().out
    assert second.log.read_text().endswith("second\nrun\n")

    changed = dataclasses.replace(first, command=("sh", "-c", "echo again >> count"))
    dependent = dataclasses.replace(second, needs=(changed,))
    (first.folder / "old").touch()
    run_stages([changed, dependent], cwd=tmp_path)
    assert (tmp_path / "count").read_text() == "run\nagain\n"
    assert dependent.log.read_text().endswith("second\nrun\nagain\n")
    assert not (first.folder / "old").exists()
    assert "settings have changed" in capsys.readouterr().out


def test_environment_is_passed_and_part_of_the_key(tmp_path: Path) -> None:
    stage = dataclasses.replace(shell(tmp_path, "a", "echo $X"), environment={"X": "7"})
    run_stages([stage], cwd=tmp_path)
    assert stage.log.read_text().endswith("\n7\n")
    assert stage.key() != dataclasses.replace(stage, environment={"X": "8"}).key()
    assert stage.key() != dataclasses.replace(stage, depends_on=("2.0",)).key()


def test_failure_shows_reason_log_and_way_on_and_the_retry_keeps_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "if [ -f a/half ]; then exit 0; fi; touch a/half; "
        "echo 'ValueError: no space'; echo bye; exit 3"
    )
    stage = shell(tmp_path, "a", script)
    with pytest.raises(StageError) as error:
        run_stages([stage], cwd=tmp_path)
    message = str(error.value)
    assert "Stage 'a' failed with exit status 3." in message
    assert "  | ValueError: no space\n" in message
    assert str(stage.log) in message
    assert "bye" not in message
    assert "run the same command again" in message
    run_stages([stage], cwd=tmp_path)
    assert "(going on where it stopped)" in capsys.readouterr().out
    assert stage.seconds_if_done() is not None


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    stage = shell(tmp_path, "a", "true")
    stage.folder.mkdir()
    (stage.folder / "thesis.tex").touch()
    with pytest.raises(StageError, match=r"not empty and was not made by this example"):
        run_stages([stage], cwd=tmp_path)
    assert (stage.folder / "thesis.tex").exists()


def test_interruption_stops_the_command(tmp_path: Path) -> None:
    stage = shell(tmp_path, "a", "echo $$ > pid; echo begun; exec sleep 60")

    def interrupt() -> None:
        # Its output in the log says that the command is being waited for, not only started.
        while not stage.log.exists() or "\nbegun\n" not in stage.log.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    # A shell starts background jobs with SIGINT ignored, and a test run may be one.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_stages([stage], cwd=tmp_path)
    finally:
        signal.signal(signal.SIGINT, inherited)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert stage.seconds_if_done() is None


def test_a_process_left_behind_does_not_keep_the_stage_open(tmp_path: Path) -> None:
    stage = shell(tmp_path, "a", "sleep 30 & echo $! > pid; echo over")
    started = time.monotonic()
    run_stages([stage], cwd=tmp_path)
    assert time.monotonic() - started < 10
    assert stage.log.read_text().endswith("\nover\n")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_progress_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    line = " iteration {}/ 50 | elapsed time per iteration (ms): 9.0 | lm loss: 4.5E+00 | x"
    progress.line(line.format(10))
    now = 110.0
    progress.tick()
    assert capsys.readouterr().out == "      iteration 10/50  0:10  lm loss 4.500\n"
    now = 120.0
    progress.line(line.format(20))
    assert capsys.readouterr().out == "      iteration 20/50  0:20, 1:00 left  lm loss 4.500\n"
    now = 121.0
    progress.line(line.format(30))
    assert capsys.readouterr().out == ""


def test_format_seconds() -> None:
    assert [format_seconds(s) for s in (0, 59.6, 187)] == ["0:00", "1:00", "3:07"]


def test_quickstart_help_names_its_options() -> None:
    root = Path(__file__).parents[3]
    shown = subprocess.run(
        [sys.executable, "-m", "examples.offline_distillation.quickstart", "--help"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert all(option in shown for option in ("--out", "--processes", "--smoke"))
