# SPDX-License-Identifier: Apache-2.0
"""Run the jobs of an example in order: skip what is done, resume what was interrupted.

A stage is one command with a folder of its own. ``stage.json`` in that folder holds the stage's
key, a hash over its command and the keys of the stages it builds on, so a changed flag runs this
stage and all that depend on it again.
"""

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from examples.offline_distillation.megatron_log import failure_index
from examples.offline_distillation.progress import Progress, format_seconds

STATE_FILE = "stage.json"
LOG_FILE = "log.txt"
_TAIL_LINES = 25
_STOP_SECONDS = 30.0


class StageError(RuntimeError):
    """A stage cannot run or has failed; the message is for the user and says how to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One command of the example.

    ``folder`` belongs to the stage alone: it is emptied when the stage's key changes. ``needs`` are
    the stages whose output this one reads. ``environment`` is added to the process's own. The key
    covers these, the command, and ``depends_on``: versions of what the output depends on besides.
    """

    name: str
    title: str
    command: tuple[str, ...]
    folder: Path
    needs: tuple["Stage", ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """The file with everything the command prints, over all tries."""
        return self.folder / LOG_FILE

    def key(self) -> str:
        """Return the hash that decides whether finished or half-finished work can be used."""
        content = {
            "command": self.command,
            "environment": dict(sorted(self.environment.items())),
            "depends_on": self.depends_on,
            "needs": [stage.key() for stage in self.needs],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def seconds_if_done(self) -> float | None:
        """Return how long the finished stage took, or None if it is not finished with this key."""
        state = _read_state(self.folder)
        if state is None or state["key"] != self.key() or state["state"] != "done":
            return None
        return state["seconds"]


def run_stages(stages: list[Stage], *, cwd: Path) -> None:
    """Run the stages in order, each unless it is done.

    Raises:
        StageError: A command failed, or a folder holds something that no stage put there.
        KeyboardInterrupt: Passed on after the running command has been stopped.
    """
    for position, stage in enumerate(stages, start=1):
        header = f"[{position}/{len(stages)}] {stage.title}"
        seconds = stage.seconds_if_done()
        if seconds is not None:
            print(f"{header}: done before, in {format_seconds(seconds)}", flush=True)
            continue
        print(f"{header}{_prepare_folder(stage)}", flush=True)
        _run(stage, cwd=cwd)


def _prepare_folder(stage: Stage) -> str:
    """Make the folder ready, and return what to say about an earlier run in it."""
    state = _read_state(stage.folder)
    if state is None and stage.folder.exists() and any(stage.folder.iterdir()):
        raise StageError(
            f"{stage.folder} is not empty and was not made by this example (it has no "
            f"{STATE_FILE}). Remove it, or choose another output folder with --out."
        )
    if state is not None and state["key"] == stage.key():
        _write_state(stage, "running", state["seconds"])
        return " (going on where it stopped)"
    if state is not None:
        shutil.rmtree(stage.folder)
    stage.folder.mkdir(parents=True, exist_ok=True)
    _write_state(stage, "running", 0.0)
    return " (from the start, its settings have changed)" if state is not None else ""


def _run(stage: Stage, *, cwd: Path) -> None:
    """Run the command to its end, its output going to the log and its progress to the terminal."""
    state = _read_state(stage.folder)
    seconds_before = 0.0 if state is None else state["seconds"]
    started = time.monotonic()
    progress = Progress()
    tail: deque[str] = deque(maxlen=400)
    with stage.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(stage.command)}\n")
        log.flush()
        # In a session of its own, Ctrl-C reaches only this process, which then stops the command in
        # good order.
        process = subprocess.Popen(
            stage.command,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(stage.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for line in _lines(process, progress):
                log.write(line + "\n")
                log.flush()
                tail.append(line)
                progress.line(line)
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            progress.close()
            seconds = seconds_before + time.monotonic() - started
            _write_state(stage, "running", seconds)
    if code != 0:
        raise StageError(_failure_message(stage, code, list(tail)))
    _write_state(stage, "done", seconds)
    print(f"      done in {format_seconds(seconds)}", flush=True)


def _lines(process: subprocess.Popen[bytes], progress: Progress) -> Iterator[str]:
    """Yield the output's lines as they come; between them, let the display show the time."""
    stream = process.stdout
    assert stream is not None
    pending = b""
    while True:
        ready, _, _ = select.select([stream], [], [], 1.0)
        if not ready:
            # A process that outlives the command may hold the other end of the pipe open.
            if process.poll() is not None:
                break
            progress.tick()
            continue
        chunk = os.read(stream.fileno(), 1 << 16)
        if not chunk:
            break
        *complete, pending = (pending + chunk).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace")
    if pending:
        yield pending.decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the command and the ranks it started."""
    if process.poll() is not None:
        return
    # The launcher ends its ranks, which live in sessions of their own, when it is asked politely.
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure_message(stage: Stage, code: int, tail: list[str]) -> str:
    end = failure_index(tail)
    parts = [
        f"Stage '{stage.name}' failed with exit status {code}. The end of its log, {stage.log}:"
    ]
    # What follows the exception is the launcher's report that a rank has failed.
    shown = tail if end is None else tail[: end + 1]
    parts += [f"  | {line}" for line in shown[-_TAIL_LINES:]]
    parts.append("Once the cause is fixed, run the same command again: it goes on from here.")
    return "\n".join(parts)


def _read_state(folder: Path) -> dict | None:
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write_state(stage: Stage, state: str, seconds: float) -> None:
    path = stage.folder / STATE_FILE
    content = {"key": stage.key(), "state": state, "seconds": round(seconds, 1)}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)
