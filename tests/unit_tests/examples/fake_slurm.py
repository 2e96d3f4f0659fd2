# SPDX-License-Identifier: Apache-2.0
"""Stands in for the parts of SLURM that a batch script talks to: ``srun``, ``scontrol``, variables.

``srun`` starts its tasks on this machine and treats signals as SLURM's does: it hands SIGUSR1 on,
and on SIGTERM it kills the tasks. It signals whole process groups, as a cluster with
``SignalChildrenProcesses=yes`` does. ``scontrol`` knows ``show hostnames`` and ``requeue``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = REPOSITORY_ROOT / "examples" / "offline_distillation" / "slurm"

_COMMON = f"""#!{sys.executable}
import json, os, signal, subprocess, sys

def record(**entry):
    with open(os.environ["FAKE_SLURM_LOG"], "a") as log:
        log.write(json.dumps(entry) + "\\n")

arguments = sys.argv[1:]
"""

_SRUN = """
first = next(i for i, word in enumerate(arguments) if not word.startswith("-"))
options = dict(word.lstrip("-").partition("=")[::2] for word in arguments[:first])
nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
tasks = []

def forward(number, frame):
    name = signal.Signals(number).name
    record(tool="srun", signal=name)
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, signal.SIGKILL if name == "SIGTERM" else number)

signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
for rank in range(nodes * per_node):
    names = {
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NTASKS": nodes * per_node
    }
    environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
    tasks.append(
        subprocess.Popen(arguments[first:], env=environment, start_new_session=True)
    )
record(tool="srun", arguments=arguments, pid=os.getpid())
statuses = []
for task in tasks:
    code = task.wait()
    statuses.append(code if code >= 0 else 128 - code)
record(tool="srun", ended=os.getpid())
sys.exit(max(statuses))
"""

_SCONTROL = """
record(tool="scontrol", arguments=arguments)
if arguments[:2] == ["show", "hostnames"]:
    print(os.environ["FAKE_SLURM_HOSTS"])
elif arguments[0] == "requeue":
    sys.exit(int(os.environ.get("FAKE_SLURM_REQUEUE_STATUS", "0")))
else:
    sys.exit(2)
"""


class FakeSlurm:
    """A directory with the two programs, the log of their calls, and an environment for jobs.

    Args:
        directory: Where all of it goes.
        nodes: Nodes of the job.
        tasks_per_node: Tasks on each of them.
        job_id: Number of the job.
        array: ``(array job id, task id)`` of a task of a job array.
        hosts: Names of the nodes; ``node1`` and so on by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        tasks_per_node: int = 1,
        job_id: int = 4711,
        array: tuple[int, int] | None = None,
        hosts: tuple[str, ...] | None = None,
    ) -> None:
        programs = directory / "bin"
        programs.mkdir(parents=True)
        for name, code in (("srun", _SRUN), ("scontrol", _SCONTROL)):
            (programs / name).write_text(_COMMON + code)
            (programs / name).chmod(0o755)
        self._log = directory / "slurm.log"
        hosts = hosts or tuple(f"node{index}" for index in range(1, nodes + 1))
        self.environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "FAKE_SLURM_LOG": str(self._log),
            "FAKE_SLURM_HOSTS": "\n".join(hosts),
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
            "SLURM_SUBMIT_DIR": str(REPOSITORY_ROOT),
        }
        if array is not None:
            self.environment["SLURM_ARRAY_JOB_ID"] = str(array[0])
            self.environment["SLURM_ARRAY_TASK_ID"] = str(array[1])

    def calls(self) -> list[dict[str, object]]:
        """Return what the programs have recorded: calls, and the signals that srun got."""
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def requeued(self) -> list[str]:
        """Return the jobs that were queued again."""
        calls = [call["arguments"] for call in self.calls() if call["tool"] == "scontrol"]
        return [words[1] for words in calls if words[0] == "requeue"]  # type: ignore[index]

    def stop(self, process: "subprocess.Popen[bytes]") -> None:
        """End a batch script and the tasks of its ``srun``; nothing happens if all have ended."""
        process.kill()
        process.wait()
        calls = self.calls()
        ended = {call.get("ended") for call in calls}
        for pid in {call["pid"] for call in calls if "pid" in call} - ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # type: ignore[arg-type]

    def start(
        self, script: str, variables: dict[str, str], output: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a batch script from a copy elsewhere, as SLURM does, with its output in a file."""
        spooled = output.with_suffix(".script")
        spooled.write_text((SCRIPTS / script).read_text())
        with output.open("ab") as stream:
            return subprocess.Popen(
                ["bash", str(spooled)],
                env={**clean_environment(), **self.environment, **variables},
                cwd=REPOSITORY_ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what a job of its own would have set."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SRUN_", "MASTER_", "MSC_"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DRY_RUN")
    }


def wait_until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Return as soon as *condition* holds; raise AssertionError after *timeout* seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.05)
