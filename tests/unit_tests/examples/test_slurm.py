# SPDX-License-Identifier: Apache-2.0
"""The SLURM scripts: shellcheck, the command of a dry run, signals, and when a job is requeued."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.unit_tests.examples.fake_slurm import (
    REPOSITORY_ROOT,
    SCRIPTS,
    FakeSlurm,
    clean_environment,
    wait_until,
)

TEACHER, STUDENT = "dump_teacher.sbatch", "train_student.sbatch"
SHELL_FILES = sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".sh", ".sbatch"))
SHARED = {
    "DATA_ARGS": "--data-path 0.3 /data/web 0.7 /data/books --split 99,1,0 "
    "--tokenizer-type NullTokenizer --vocab-size 1000",
    "SEQ_LENGTH": "4096",
    "TRAIN_ITERS": "1000",
    "GLOBAL_BATCH_SIZE": "64",
    "MICRO_BATCH_SIZE": "1",
    "SAVE_INTERVAL": "150",
    "PARALLEL_ARGS": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PYTHON": sys.executable,
}
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 4096 --bf16"
)
STUDENTS = """
# name and flags of each student
small      --num-layers 2 --hidden-size 32 --num-attention-heads 2

small-0.5  --num-layers 2 --hidden-size 32 --num-attention-heads 2 --logits-load-kd-loss-alpha 0.5
"""


def variables(script: str, root: str, folder: Path) -> dict[str, str]:
    """Return the variables of a script whose directories lie under *root*, a path or URL."""
    if script == TEACHER:
        own = {
            "MODEL_ARGS": MODEL,
            "TEACHER_CHECKPOINT": f"{root}/teacher",
            "CHECKPOINT_DIR": f"{root}/dump",
        }
    else:
        students = folder / "students.txt"
        students.write_text(STUDENTS)
        own = {
            "MODEL_ARGS": "--max-position-embeddings 4096 --bf16",
            "OPTIMIZER_ARGS": "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine",
            "STUDENTS_FILE": str(students),
            "CHECKPOINT_ROOT": f"{root}/students",
        }
    return SHARED | own | {"CACHE_DIR": f"{root}/cache"}


def bash(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *code* after common.sh has been sourced."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source {SCRIPTS}/common.sh\n{code}", "-", *arguments],
        env={**clean_environment(), "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def dry_run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / script)],
        env={**clean_environment(), "DRY_RUN": "1", **environment},
        cwd=REPOSITORY_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHELL_FILES)
def test_shellcheck(name: str) -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed; the dev extra brings it")
    result = subprocess.run(
        [found, "--external-sources", str(SCRIPTS / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SHELL_FILES)
def test_bash_reads_it(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=False).returncode == 0


@pytest.mark.parametrize("script", [TEACHER, STUDENT])
def test_sbatch_options(script: str) -> None:
    """A job must be warned in time, may come back, and keeps the log of its first try."""
    text = (SCRIPTS / script).read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    assert {"--signal=B:USR1@300", "--requeue", "--open-mode=append"} <= set(options)
    # sbatch stops to read options at the first command.
    assert "#SBATCH" not in text[text.index("\nset -") :]
    if script == STUDENT:
        assert "--output=%x-%A_%a.out" in options, "students of one array must not share a log"


def test_readme_names_every_variable() -> None:
    readme = (SCRIPTS / "README.md").read_text()
    for script in (TEACHER, STUDENT):
        names = re.findall(r"^([A-Z_]+)=\$\{\1", (SCRIPTS / script).read_text(), re.MULTILINE)
        assert len(names) > 15
        missing = [name for name in names if f"`{name}`" not in readme]
        assert missing == []


def test_msc_example_is_valid_and_holds_no_secret() -> None:
    schema = pytest.importorskip("multistorageclient.schema")
    config = yaml.safe_load((SCRIPTS / "msc_config.yaml").read_text())
    schema.validate_config(config)
    for profile in config["profiles"].values():
        for value in profile.get("credentials_provider", {}).get("options", {}).values():
            assert re.fullmatch(r"\$\{[A-Z0-9_]+\}", value), "credentials come from the environment"


# ---- dry run ----------------------------------------------------------------------------------

CASES = [
    (script, storage, nodes, array)
    for script, storage, nodes in product((TEACHER, STUDENT), ("local", "msc"), (1, 3))
    for array in ((None,) if script == TEACHER else (None, 1))
]


class Printed:
    """The command that a dry run printed, taken apart."""

    def __init__(self, text: str) -> None:
        words = shlex.split(text.replace("\\\n", " "))
        start = words.index("srun")
        self.environment = dict(word.split("=", 1) for word in words[:start])
        entry = words.index("pretrain_gpt.py")
        self.srun = words[start + 1 : entry - 3]
        self.launch = words[entry - 3 : entry]
        self.flags = words[entry + 1 :]

    def value(self, flag: str) -> str:
        """Return the last value of a flag, which is the one that counts."""
        last = max(i for i, word in enumerate(self.flags) if word == flag)
        return self.flags[last + 1]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[object, ...], Printed]:
    """What the dry runs of all cases print, in a fake SLURM job."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "data" / "cache").mkdir(parents=True)
    (folder / "data" / "cache" / "dp0__0-64.tar").touch()
    provider = {"type": "file", "options": {"base_path": str(folder / "data")}}
    config = folder / "msc.json"
    config.write_text(json.dumps({"profiles": {"slurm-test": {"storage_provider": provider}}}))
    found = {}
    for number, case in enumerate(CASES):
        script, storage, nodes, array = case
        slurm = FakeSlurm(
            folder / str(number),
            nodes=nodes,
            tasks_per_node=4,
            job_id=20017 + number,
            array=None if array is None else (20000, array),
        )
        root = str(folder / "data") if storage == "local" else "msc://slurm-test"
        environment = variables(script, root, folder) | slurm.environment
        if storage == "msc":
            environment["MSC_CONFIG"] = str(config)
        result = dry_run(script, **environment)
        assert result.returncode == 0, result.stderr
        # It asks for host names and starts nothing.
        assert [call["arguments"][:2] for call in slurm.calls()] == [["show", "hostnames"]]  # type: ignore[index]
        found[case] = Printed(result.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_printed_launch(printed: dict[tuple[object, ...], Printed], case: tuple) -> None:
    script, storage, nodes, _ = case
    command = printed[case]
    assert command.srun == [
        f"--nodes={nodes}",
        "--ntasks-per-node=4",
        "--distribution=block",
        "--kill-on-bad-exit=1",
    ]
    assert command.launch == ["bash", str(SCRIPTS / "rank.sh"), sys.executable]
    number = CASES.index(case)
    assert command.environment["MASTER_ADDR"] == "node1"
    assert command.environment["MASTER_PORT"] == str(20000 + 17 + number)
    assert command.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert ("MSC_CONFIG" in command.environment) == (storage == "msc")
    assert ("--enable-msc" in command.flags) == (storage == "msc")
    assert "--exit-signal-handler" in command.flags
    # Megatron deletes old checkpoints on file systems only.
    deletes = script == TEACHER and storage == "local"
    assert ("--save-retain-interval" in command.flags) == deletes


def test_dump_and_students_see_the_same_samples(
    printed: dict[tuple[object, ...], Printed],
) -> None:
    shared = [
        command.flags[: command.flags.index("--global-batch-size") + 2]
        for command in printed.values()
    ]
    assert all(flags == shared[0] for flags in shared)
    words = ["--data-path", "0.3", "/data/web", "0.7", "/data/books", "--split", "99,1,0"]
    assert shared[0][: len(words)] == words


def test_student_of_an_array_task(printed: dict[tuple[object, ...], Printed]) -> None:
    first, second = printed[STUDENT, "local", 1, None], printed[STUDENT, "local", 1, 1]
    assert first.value("--save").endswith("/students/small")
    assert second.value("--save").endswith("/students/small-0.5")
    assert second.value("--load") == second.value("--save")
    assert "--logits-load-kd-loss-alpha" not in first.flags
    assert second.value("--logits-load-kd-loss-alpha") == "0.5"


PARSE = """
import json, sys
from runtime.bootstrap import prepare_process
prepare_process()
from megatron.training.arguments import parse_args
from megatron.training.distillation.argument_checks import check_flags
from pretrain_common import add_extra_args

for flags in json.loads(sys.stdin.read()):
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        args = parse_args(add_extra_args)
        check_flags(args)
    except (SystemExit, ValueError) as problem:
        print(json.dumps({"problem": f"{type(problem).__name__} {problem}"}))
    else:
        names = ("save", "load", "save_interval", "train_iters", "logits_save_dir",
                 "logits_load_dir", "logits_save_top_k", "exit_signal_handler", "seq_length",
                 "save_retain_interval", "freeze_all_layers", "async_strategy", "num_layers")
        values = {name: getattr(args, name) for name in names}
        print(json.dumps(values | {"exit_signal": args.exit_signal.name}))
"""


@pytest.fixture(scope="module")
def parsed(printed: dict[tuple[object, ...], Printed]) -> Iterator[dict[object, dict]]:
    """What Megatron's parser and the checks of the package make of each command."""
    configs = {c.environment.get("MSC_CONFIG") for c in printed.values()} - {None}
    cases: dict[object, list[str]] = {case: command.flags for case, command in printed.items()}
    cases["unknown flag"] = [*printed[TEACHER, "local", 1, None].flags, "--no-such-flag"]
    cases["no shards"] = [
        *printed[STUDENT, "local", 1, None].flags,
        *("--logits-load-dir", "/nowhere"),
    ]
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(list(cases.values())),
        env={
            **clean_environment(),
            "PYTHONPATH": str(REPOSITORY_ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MSC_CONFIG": str(configs.pop()),
        },
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, lines, strict=True))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_megatron_takes_every_flag(parsed: dict[object, dict], case: tuple) -> None:
    script, storage = case[:2]
    args = parsed[case]
    assert "problem" not in args
    assert args["exit_signal_handler"] is True
    assert args["exit_signal"] == "SIGTERM", "the signal that rank.sh sends"
    assert args["save"] == args["load"]
    assert (args["train_iters"], args["save_interval"], args["seq_length"]) == (1000, 150, 4096)
    cache = args["logits_save_dir" if script == TEACHER else "logits_load_dir"]
    assert cache.startswith("msc://") == (storage == "msc")
    assert cache.endswith("/cache")
    assert args["num_layers"] == (4 if script == TEACHER else 2)
    if script == TEACHER:
        assert args["freeze_all_layers"] is True
        assert args["async_strategy"] == "mcore"
        assert args["save_retain_interval"] == (1050 if storage == "local" else None)


@pytest.mark.slow
def test_parser_refuses_what_it_should(parsed: dict[object, dict]) -> None:
    assert parsed["unknown flag"]["problem"] == "SystemExit 2"
    assert "/nowhere cannot be read" in parsed["no shards"]["problem"]


@pytest.mark.parametrize("script", [TEACHER, STUDENT])
def test_dry_run_outside_of_slurm(script: str, tmp_path: Path) -> None:
    """Without SLURM's programs and variables."""
    environment = variables(script, "/cluster", tmp_path)
    environment |= {"TOP_P": "0.9", "SPOOL_DIR": "/local/spool"}
    result = dry_run(script, **environment, EXTRA_ARGS="--seed 7 --log-throughput")
    assert result.returncode == 0, result.stderr
    command = Printed(result.stdout)
    assert command.environment["MASTER_ADDR"] == "localhost"
    assert command.srun[0] == "--nodes=1"
    assert command.value("--seed") == "7", "EXTRA_ARGS come after the script's own flags"
    assert ("--logits-save-top-p" in command.flags) == (script == TEACHER)
    if script == TEACHER:
        assert command.value("--logits-save-spool-dir") == "/local/spool"


@pytest.mark.parametrize("script", [TEACHER, STUDENT])
def test_secrets_stay_out_of_the_output(script: str, tmp_path: Path) -> None:
    environment = variables(script, "msc://profile", tmp_path)
    result = dry_run(script, **environment, MSC_CONFIG="/config.yaml", S3_SECRET_KEY="hush-hush")
    assert result.returncode == 0, result.stderr
    assert "hush-hush" not in result.stdout + result.stderr


@pytest.mark.parametrize("script", [TEACHER, STUDENT])
def test_missing_variables_are_named(script: str, tmp_path: Path) -> None:
    environment = variables(script, "/cluster", tmp_path)
    optional = {"PARALLEL_ARGS", "PYTHON"} | ({"MODEL_ARGS"} if script == STUDENT else set())
    for name in environment.keys() - optional:
        result = dry_run(script, **{key: environment[key] for key in environment.keys() - {name}})
        assert result.returncode != 0
        assert re.search(rf"\b{name}: \w+", result.stderr), result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("script", "name", "value", "message"),
    [
        (TEACHER, "SAVE_INTERVAL", "0", "SAVE_INTERVAL is '0'"),
        (TEACHER, "TRAIN_ITERS", "1e5", "TRAIN_ITERS is '1e5'"),
        (TEACHER, "CACHE_DIR", "msc://profile/cache", "MSC_CONFIG: the profiles"),
        (STUDENT, "STUDENT", "2", "has 2 students, numbered from 0; there is no student 2"),
        (STUDENT, "STUDENT", "-1", "STUDENT is '-1'"),
    ],
)
def test_wrong_values_are_refused(
    script: str, name: str, value: str, message: str, tmp_path: Path
) -> None:
    environment = variables(script, "/cluster", tmp_path) | {name: value}
    result = dry_run(script, **environment)
    assert result.returncode != 0
    assert message in result.stderr


def test_name_of_a_student_is_a_directory_name(tmp_path: Path) -> None:
    environment = variables(STUDENT, "/cluster", tmp_path)
    Path(environment["STUDENTS_FILE"]).write_text("../other --logits-load-kd-loss-alpha 1\n")
    result = dry_run(STUDENT, **environment)
    assert result.returncode != 0
    assert "'../other' cannot name a student" in result.stderr


@pytest.mark.parametrize("script", [TEACHER, STUDENT])
def test_running_outside_of_slurm_is_refused(script: str, tmp_path: Path) -> None:
    result = dry_run(script, **variables(script, "/cluster", tmp_path) | {"DRY_RUN": "0"})
    assert result.returncode != 0
    assert "submit the script with sbatch" in result.stderr


# ---- how far a run has come, and what follows -------------------------------------------------


@pytest.mark.parametrize(("content", "expected"), [(None, 0), ("12", 12), ("0000150\n", 150)])
@pytest.mark.parametrize("storage", ["local", "msc"])
def test_confirmed_iteration(
    storage: str, content: str | None, expected: int, tmp_path: Path
) -> None:
    environment, path = {}, str(tmp_path)
    if storage == "msc":
        pytest.importorskip("multistorageclient")
        provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
        config = tmp_path / "msc.json"
        config.write_text(json.dumps({"profiles": {"slurm": {"storage_provider": provider}}}))
        environment, path = {"MSC_CONFIG": str(config)}, "msc://slurm"
    if content is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    result = bash('confirmed_iteration "$1"', path, **environment)
    assert (result.returncode, result.stdout.strip()) == (0, str(expected)), result.stderr


def test_unreadable_progress_is_no_progress_of_zero(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert bash('confirmed_iteration "$1"', str(tmp_path)).returncode != 0
    missing = bash("confirmed_iteration msc://no-such-profile/dump", MSC_CONFIG="/nowhere.yaml")
    assert missing.returncode != 0


def test_next_step() -> None:
    cases = list(product((0, 4, 8), (0, 4, 8, 9), (8,), ("", "USR1", "TERM")))
    code = 'while (($#)); do next_step "$1" "$2" "$3" "$4"; shift 4; done'
    answers = bash(code, *(str(value) for case in cases for value in case)).stdout.split()
    for (before, after, target, last), answer in zip(cases, answers, strict=True):
        if after >= target:
            assert answer == "finished"
        elif after > before and last != "TERM":
            assert answer == "requeue"
        else:
            assert answer == "stop"


@pytest.mark.parametrize(("array", "job"), [(None, "4711"), ((4709, 2), "4709_2")])
def test_requeue_names_the_job(array: tuple[int, int] | None, job: str, tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path, array=array)
    assert bash("requeue", **slurm.environment).returncode == 0
    assert slurm.requeued() == [job]


def test_requeue_that_fails_says_so(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    result = bash("requeue", **slurm.environment, FAKE_SLURM_REQUEUE_STATUS="1")
    assert result.returncode != 0
    assert "job 4711 could not be queued again" in result.stderr


# ---- running, with a stand-in for the trainer -------------------------------------------------

TRAINER = '''
"""Takes Megatron's place: flags as its, a step per 20 ms, saves and leaves on SIGTERM."""
import os, signal, subprocess, sys, time
from pathlib import Path

def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]

save, target, rank = Path(value("--save")), int(value("--train-iters")), os.environ["RANK"]
tracker = save / "latest_checkpointed_iteration.txt"
leave = []
signal.signal(signal.SIGTERM, lambda number, frame: leave.append(number))
# As the checkpoint worker: starts another program, sets no handler, must outlive the warning.
worker = subprocess.Popen(["sleep", "30"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
save.mkdir(parents=True, exist_ok=True)
(save / f"started-{rank}").write_text(" ".join(os.environ[name] for name in names))
stop_at = int(os.environ["TRAINER_STEPS"])
iteration = int(tracker.read_text()) if tracker.exists() else 0
while iteration < min(stop_at, target) and not leave:
    time.sleep(0.02)
    iteration += 1
alive = worker.poll() is None
worker.kill()
worker.wait()
(save / f"left-{rank}").write_text(f"{'signal' if leave else 'end'} {alive}")
if rank == "0" and os.environ["TRAINER_SAVES"] == "1":
    tracker.write_text(str(iteration))
sys.exit(int(os.environ["TRAINER_STATUS"]))
'''


class Job:
    """A batch script over the stand-in for the trainer."""

    def __init__(self, folder: Path, script: str, slurm: FakeSlurm, **trainer: int) -> None:
        self.slurm = slurm
        self.script = script
        self.output = folder / "job.out"
        entry = folder / "trainer.py"
        entry.write_text(TRAINER)
        settings = {"steps": 10**6, "status": 0, "saves": 1} | trainer
        self.variables = variables(script, str(folder), folder) | {
            "ENTRY": str(entry),
            **{f"TRAINER_{name.upper()}": str(value) for name, value in settings.items()},
        }
        student = slurm.environment.get("SLURM_ARRAY_TASK_ID", "0")
        self.save = folder / "dump"
        if script == STUDENT:
            self.save = folder / "students" / ("small", "small-0.5")[int(student)]

    def start(self) -> "subprocess.Popen[bytes]":
        return self.slurm.start(self.script, self.variables, self.output)

    def run(self, *signals: signal.Signals) -> int:
        """Run the script, send it signals once all ranks are up, return its exit status."""
        process = self.start()
        try:
            ranks = 2 * int(self.slurm.environment["SLURM_JOB_NUM_NODES"])
            if signals:
                started = [self.save / f"started-{rank}" for rank in range(ranks)]
                wait_until(lambda: all(path.exists() for path in started), "the ranks to start")
            for number in signals:
                process.send_signal(number)
            return process.wait(30)
        finally:
            self.slurm.stop(process)

    def confirmed(self) -> int:
        return int((self.save / "latest_checkpointed_iteration.txt").read_text())

    def left(self) -> list[str]:
        """Return how each rank ended: ``end`` or ``signal``, and whether its worker was alive."""
        return [path.read_text() for path in sorted(self.save.glob("left-*"))]


@pytest.mark.parametrize(
    ("script", "array", "job_name"),
    [(TEACHER, None, "4711"), (STUDENT, None, "4711"), (STUDENT, (4709, 1), "4709_1")],
)
def test_warning_reaches_the_ranks_and_the_job_comes_back(
    script: str, array: tuple[int, int] | None, job_name: str, tmp_path: Path
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", nodes=2, tasks_per_node=2, array=array)
    job = Job(tmp_path, script, slurm)
    assert job.run(signal.SIGUSR1) == 0, job.output.read_text()
    assert {"tool": "srun", "signal": "SIGUSR1"} in slurm.calls()
    assert job.left() == ["signal True"] * 4, "each rank got SIGTERM, and no worker died"
    assert 0 < job.confirmed() < 1000
    assert slurm.requeued() == [job_name]
    port = str(20000 + 4711)
    started = [(job.save / f"started-{rank}").read_text().split() for rank in range(4)]
    assert started == [
        [str(rank), str(rank % 2), "4", "node1", port] for rank in range(4)
    ]  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT

    # The next start goes on and finishes.
    job.variables["TRAIN_ITERS"] = str(job.confirmed() + 3)
    assert job.run() == 0
    assert job.left() == ["end True"] * 4
    assert slurm.requeued() == [job_name]
    # And one more has nothing to do.
    srun_calls = len([call for call in slurm.calls() if call["tool"] == "srun"])
    assert job.run() == 0
    assert "nothing to do" in job.output.read_text()
    assert len([call for call in slurm.calls() if call["tool"] == "srun"]) == srun_calls


def test_repeated_warnings_do_no_harm(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", tasks_per_node=2)
    job = Job(tmp_path, TEACHER, slurm)
    assert job.run(signal.SIGUSR1, signal.SIGUSR1) == 0, job.output.read_text()
    assert job.left() == ["signal True"] * 2
    assert slurm.requeued() == ["4711"]


def test_cancelled_job_saves_and_does_not_come_back(tmp_path: Path) -> None:
    """Scancel sends SIGTERM; a cluster that signals descendants kills the workers with it."""
    slurm = FakeSlurm(tmp_path / "slurm", tasks_per_node=2)
    job = Job(tmp_path, TEACHER, slurm)
    assert job.run(signal.SIGTERM) != 0
    assert {"tool": "srun", "signal": "SIGUSR1"} in slurm.calls()
    assert [text.split()[0] for text in job.left()] == ["signal"] * 2
    assert job.confirmed() > 0
    assert slurm.requeued() == []
    assert "ended from outside" in job.output.read_text()


@pytest.mark.parametrize(
    ("trainer", "fails", "requeued", "message"),
    [
        ({"steps": 5, "status": 1}, False, True, "ended with status 1 at iteration 5 of 1000"),
        ({"steps": 5, "status": 3, "saves": 0}, True, False, "no checkpoint was confirmed"),
        ({"steps": 5, "status": 0, "saves": 0}, True, False, "no checkpoint was confirmed"),
    ],
)
def test_crashed_job_comes_back_only_if_it_got_further(
    trainer: dict[str, int], fails: bool, requeued: bool, message: str, tmp_path: Path
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", tasks_per_node=2)
    job = Job(tmp_path, TEACHER, slurm, **trainer)
    status = job.run()
    assert (status != 0) == fails
    if trainer["status"] > 1:
        assert status == trainer["status"]
    assert slurm.requeued() == (["4711"] if requeued else [])
    assert message in job.output.read_text()


def test_signal_at_the_very_start_is_not_lost() -> None:
    """It may arrive before the script knows the process that is to get it."""
    code = """
child() {
    trap 'echo got TERM; exit 5' TERM
    kill -USR1 $$
    while true; do sleep 0.05; done
}
status=0
run_forwarding TERM child || status=$?
echo "$status $last_signal"
"""
    result = bash(code)
    assert result.stdout.split("\n")[:2] == ["got TERM", "5 USR1"], result.stderr
