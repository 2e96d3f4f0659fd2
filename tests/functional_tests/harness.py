# SPDX-License-Identifier: Apache-2.0
"""Runs the real trainer under torchrun and reads what it printed.

Jobs run one after another, each with a time limit, its output in a file. A job that does not end as
expected raises AssertionError with the rank that failed first and the end of its output.
"""

import itertools
import os
import re
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional_tests.launcher import REPOSITORY_ROOT, start_torchrun

PRETRAIN_GPT = REPOSITORY_ROOT / "pretrain_gpt.py"
RECORDING_SCRIPT = Path(__file__).resolve().parent / "pretrain_gpt_recorded.py"
SLOW_STORE_SCRIPT = Path(__file__).resolve().parent / "pretrain_gpt_slow_store.py"
RECORD_DIR_VARIABLE = "KD_TEST_RECORD_DIR"
CROSSCHECK_VARIABLE = "KD_TEST_CROSSCHECK"
WRITE_SECONDS_VARIABLE = "KD_TEST_WRITE_SECONDS"

SEQ_LENGTH = 16
REAL_VOCAB = 95
PADDED_VOCAB = 128
"""Megatron pads the vocabulary to a multiple of 64 x TP: the same for TP 1 and 2."""

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} "
    "--attention-dropout 0 --hidden-dropout 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {REAL_VOCAB} --make-vocab-size-divisible-by 64"
)
OPTIMIZER = shlex.split("--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --weight-decay 0.1")
RUN = shlex.split("--distributed-backend gloo --log-interval 1 --num-workers 0 --split 80,20,0")
NO_EVALUATION = shlex.split("--eval-iters 0 --eval-interval 1000")

_RANK_LINE = re.compile(r"^\[default(\d+)\]:(.*)$", re.MULTILINE)
_AMID_A_LINE = re.compile(r"(?<!\n)(?=\[default\d+\]:)")
_ITERATION_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
_ENTRY = re.compile(r"([A-Za-z][\w\- ]*?): +([-+\d.naif]+(?:E[-+]\d+)?)\s*\|", re.IGNORECASE)
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: +(\d+)", re.DOTALL)
_TAIL_LINES = 60
_SHUTDOWN_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job that has ended.

    Attributes:
        name: Name of the job, for messages.
        returncode: Exit status of torchrun.
        log: Everything the ranks printed; each line starts with ``[defaultRANK]:``.
        seconds: Wall-clock time.
    """

    name: str
    returncode: int
    log: str = field(repr=False)
    seconds: float

    def of_rank(self, rank: int) -> str:
        """Return what one rank printed."""
        return "\n".join(
            text for number, text in _RANK_LINE.findall(self.log) if int(number) == rank
        )

    def iterations(self) -> dict[int, dict[str, float]]:
        """Return the numbers of every training log line by 1-based iteration.

        Megatron logs the first iteration of a run without clearing its sums, so the second line
        has the mean losses of two iterations; that is undone here.
        """
        found: dict[int, dict[str, float]] = {}
        for number, entries in _ITERATION_LINE.findall(self.log):
            found[int(number)] = {
                name.strip(): float(value) for name, value in _ENTRY.findall(entries + "|")
            }
        for first, second in itertools.pairwise(list(found.values())[:2]):
            for name in first.keys() & second.keys():
                if name.endswith("loss"):
                    second[name] = 2 * second[name] - first[name]
        return found

    def series(self, name: str) -> list[float]:
        """Return one logged number over the iterations; all of them must have it."""
        return [entries[name] for _, entries in sorted(self.iterations().items())]

    @property
    def first_failed_rank(self) -> int | None:
        """Return the rank that torchrun holds responsible."""
        match = _ROOT_CAUSE.search(self.log)
        return int(match.group(1)) if match else None

    def tail(self) -> str:
        """Return the end of the output of the rank that failed first, or of all ranks."""
        rank = self.first_failed_rank
        text = self.log if rank is None else self.of_rank(rank)
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


class JobRunner:
    """Runs jobs in a directory of their own and remembers how long they took."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.finished: list[JobResult] = []

    def run(
        self,
        name: str,
        arguments: list[str],
        *,
        ranks: int = 1,
        script: Path | None = None,
        record: Path | None = None,
        crosscheck: bool = False,
        succeeds: bool = True,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> JobResult:
        """Run the trainer and wait for it.

        Args:
            name: Name of the job; names its output file.
            arguments: The command line after the script.
            ranks: Number of processes.
            script: The entry script. By default the recording one if *record* is given, and
                ``pretrain_gpt.py`` itself otherwise.
            record: Where the recording script keeps logits or targets.
            crosscheck: Also record the logits that the model returns when asked for no loss.
            succeeds: Whether the job must exit with 0; otherwise it must not.
            timeout: Seconds after which the job has failed.
            env: Further environment variables.
            fresh: Start the ranks, and the fork servers of their checkpoint workers, as
                interpreters of their own, with nothing imported.

        Raises:
            AssertionError: The job hung, or ended otherwise than expected.
        """
        if script is None:
            script = PRETRAIN_GPT if record is None else RECORDING_SCRIPT
        environment = {**os.environ, **(env or {})}
        if record is not None:
            record.mkdir(parents=True)
            environment[RECORD_DIR_VARIABLE] = str(record)
        if crosscheck:
            environment[CROSSCHECK_VARIABLE] = "1"
        command = ["--standalone", "--tee", "3", "--nproc-per-node", str(ranks)]
        command += ["--log-dir", str(self.directory / "torchrun"), str(script), *arguments]
        output = self.directory / f"{name}.log"
        began = time.monotonic()
        launcher = start_torchrun(command, environment, output, fresh=fresh)
        returncode = None
        try:
            launcher.join(timeout)
            returncode = launcher.exitcode
            if returncode is None:
                # Before torchrun adds how it was ended.
                tail = "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        finally:
            if returncode is None:
                _end(launcher)
        seconds = time.monotonic() - began
        # torchrun may put a rank's line behind the first half of another's.
        log = _AMID_A_LINE.sub("\n", output.read_text(errors="replace"))
        if returncode is None:
            raise AssertionError(f"{name} still ran after {timeout:.0f} s. {output}:\n{tail}")
        result = JobResult(name=name, returncode=returncode, log=log, seconds=seconds)
        self.finished.append(result)
        if (returncode == 0) != succeeds:
            expected = "succeed" if succeeds else "fail"
            raise AssertionError(
                f"{name} was expected to {expected}, but exited with {returncode}; first failed "
                f"rank: {result.first_failed_rank}. {output}:\n{result.tail()}"
            )
        return result


def _end(launcher: BaseProcess) -> None:
    """End torchrun, which ends its ranks, or else all of its process group."""
    launcher.terminate()
    launcher.join(_SHUTDOWN_SECONDS)
    if launcher.exitcode is None:
        assert launcher.pid is not None
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.join()


def curves(directory: Path) -> dict[str, dict[int, float]]:
    """Return what a job wrote to TensorBoard: by name, the values by step; each step once."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        scalars = events.Scalars(name)
        found[name] = {scalar.step: scalar.value for scalar in scalars}
        assert len(found[name]) == len(scalars), f"{name} has a step twice"
    return found


def check_same_curves(
    tensorboard: Mapping[str, Mapping[int, float]],
    wandb: Mapping[str, Mapping[int, float]],
    names: set[str],
) -> None:
    """Check that W&B has the curves of these names, as TensorBoard has them in single precision."""
    assert names <= tensorboard.keys()
    for name in names:
        assert wandb[name] == pytest.approx(tensorboard[name], rel=1e-6), name


def batch(micro: int, global_: int, iterations: int) -> list[str]:
    """Return the flags of a batch schedule."""
    sizes = f"--micro-batch-size {micro} --global-batch-size {global_}"
    return shlex.split(f"{sizes} --train-iters {iterations}")
