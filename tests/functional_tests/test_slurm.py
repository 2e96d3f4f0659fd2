# SPDX-License-Identifier: Apache-2.0
"""The SLURM scripts with the real trainer: warned in the middle, requeued, finished, distilled.

``srun`` and ``scontrol`` are stand-ins; everything below them is real. They signal whole process
groups, so this also shows that the checkpoint worker outlives the warning.
"""

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from megatron.training.distillation.utils import ShardName
from tests.functional_tests.cases import Workshop
from tests.functional_tests.harness import MODEL, SEQ_LENGTH
from tests.unit_tests.examples.fake_slurm import FakeSlurm, wait_until

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ITERATIONS, BATCH = 150, 2
ON_THE_CPU = "--distributed-backend gloo --num-workers 0 --log-interval 1"


def model_flags() -> str:
    """Return the model of these tests without what the scripts give themselves."""
    words = list(MODEL)
    at = words.index("--seq-length")
    del words[at : at + 2]
    return shlex.join(words)


def run(slurm: FakeSlurm, script: str, variables: dict[str, str], output: Path) -> None:
    """Run a batch script to its end, which must be a good one."""
    process = slurm.start(script, variables, output)
    try:
        assert process.wait(180) == 0, output.read_text(errors="replace")[-4000:]
    finally:
        slurm.stop(process)


def test_dump_over_two_jobs_and_a_student(workshop: Workshop, tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", tasks_per_node=2, hosts=("localhost",))
    cache, save, output = tmp_path / "cache", tmp_path / "dump", tmp_path / "job.out"
    shared = {
        "DATA_ARGS": f"--data-path {workshop.corpus} --split 80,20,0",
        "SEQ_LENGTH": str(SEQ_LENGTH),
        "TRAIN_ITERS": str(ITERATIONS),
        "GLOBAL_BATCH_SIZE": str(BATCH),
        "MICRO_BATCH_SIZE": "1",
        "MODEL_ARGS": model_flags(),
        "CACHE_DIR": str(cache),
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "EXTRA_ARGS": ON_THE_CPU,
    }
    teacher = shared | {
        "TEACHER_CHECKPOINT": str(workshop.teacher),
        "CHECKPOINT_DIR": str(save),
        # Never reached: only the warning and the end write.
        "SAVE_INTERVAL": str(10 * ITERATIONS),
        "TOP_K": "8",
        "EXTRA_ARGS": f"{ON_THE_CPU} --logits-save-format {workshop.format_of(3)}",
    }

    process = slurm.start("dump_teacher.sbatch", teacher, output)
    try:
        wait_until(
            lambda: process.poll() is not None or "iteration        3/" in output.read_text(),
            "the third iteration",
            timeout=120,
        )
        process.send_signal(signal.SIGUSR1)
        status = process.wait(120)
    finally:
        slurm.stop(process)
    log = output.read_text(errors="replace")
    assert status == 0, log[-4000:]
    assert "exiting program after receiving SIGTERM" in log
    confirmed = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= confirmed < ITERATIONS
    assert slurm.requeued() == ["4711"]
    window = confirmed * BATCH
    assert sorted(path.name for path in cache.iterdir()) == [
        str(ShardName(rank, 0, window)) for rank in (0, 1)
    ]

    run(slurm, "dump_teacher.sbatch", teacher, output)
    assert slurm.requeued() == ["4711"]
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        str(ShardName(rank, *span))
        for rank in (0, 1)
        for span in ((0, window), (window, ITERATIONS * BATCH))
    )
    assert [path.name for path in save.glob("iter_*")] == [f"iter_{ITERATIONS:07d}"], (
        "checkpoints of a dump hold the same weights, so the older one is deleted"
    )

    students = tmp_path / "students.txt"
    students.write_text("kd --logits-load-kd-loss-alpha 0.5\n")
    student = shared | {
        "OPTIMIZER_ARGS": "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant",
        "STUDENTS_FILE": str(students),
        "CHECKPOINT_ROOT": str(tmp_path / "students"),
        "SAVE_INTERVAL": str(ITERATIONS),
        "EVAL_ITERS": "0",
    }
    alone = FakeSlurm(tmp_path / "one", hosts=("localhost",), array=(4712, 0))
    run(alone, "train_student.sbatch", student, tmp_path / "student.out")
    log = (tmp_path / "student.out").read_text(errors="replace")
    losses = re.findall(r"logits distillation loss: (\S+)", log)
    assert len(losses) == ITERATIONS
    assert float(losses[-1]) < float(losses[0])
    assert alone.requeued() == []
