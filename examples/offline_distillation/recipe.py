# SPDX-License-Identifier: Apache-2.0
"""The jobs of the quickstart: which flags each run of ``pretrain_gpt.py`` gets, and why.

What carries over to a real run: the dump and every student have the same data arguments, seed,
``--train-iters`` and batch size, because these decide which sample comes when.
"""

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from examples.offline_distillation import corpus as corpus_module
from examples.offline_distillation.corpus import TRAIN_NAME, VALID_NAME
from examples.offline_distillation.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Size of a GPT model."""

    layers: int
    hidden: int
    heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Every number of the quickstart. Iterations are optimizer steps of ``batch`` sequences."""

    vocab_size: int
    sequence: int
    batch: int
    corpus_bytes: int | None
    teacher: ModelShape
    teacher_iters: int
    teacher_lr: float
    student: ModelShape
    student_iters: int
    student_lr: float
    top_k: int
    alpha: float
    eval_interval: int
    save_interval: int


FULL = Recipe(
    vocab_size=2048,
    sequence=128,
    batch=16,
    corpus_bytes=None,
    teacher=ModelShape(layers=4, hidden=192, heads=6),
    teacher_iters=500,
    teacher_lr=2e-3,
    student=ModelShape(layers=2, hidden=128, heads=4),
    student_iters=200,
    student_lr=3e-3,
    top_k=32,
    alpha=0.9,
    eval_interval=25,
    save_interval=50,
)
"""The teacher must be good for its targets to teach: with 300 iterations the gain is gone."""

SMOKE = Recipe(
    vocab_size=512,
    sequence=32,
    batch=4,
    corpus_bytes=200_000,
    teacher=ModelShape(layers=1, hidden=32, heads=2),
    teacher_iters=6,
    teacher_lr=1e-3,
    student=ModelShape(layers=1, hidden=32, heads=2),
    student_iters=4,
    student_lr=1e-3,
    top_k=8,
    alpha=0.5,
    eval_interval=2,
    save_interval=2,
)
"""Every stage once, in the shortest time; the losses mean nothing."""

CORPUS, TEACHER, DUMP, PLAIN, DISTILLED = "corpus", "teacher", "dump", "student-lm", "student-kd"


def build_stages(recipe: Recipe, out: Path, *, processes: int) -> dict[str, Stage]:
    """Return the stages by name, in the order they run.

    Args:
        recipe: The numbers.
        out: Folder that gets one sub-folder per stage.
        processes: Data-parallel ranks of every training run.
    """
    corpus = Stage(
        name=CORPUS,
        title="Corpus: tokenize Python's standard library",
        command=(
            *(sys.executable, "-m", "examples.offline_distillation.corpus"),
            *("--out", str(out / CORPUS)),
            *("--vocab-size", str(recipe.vocab_size)),
            *("--batch-tokens", str(recipe.batch * recipe.sequence)),
            *(() if recipe.corpus_bytes is None else ("--max-bytes", str(recipe.corpus_bytes))),
        ),
        folder=out / CORPUS,
        # The text is the library of this very version.
        depends_on=(platform.python_version(), Path(corpus_module.__file__).read_text()),
    )

    def train(name: str, title: str, needs: tuple[Stage, ...], flags: list[str]) -> Stage:
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(processes)),
        ]
        common = _common_flags(recipe, corpus.folder, processes)
        return Stage(
            name=name,
            title=title,
            command=(*launcher, "pretrain_gpt.py", *common, *flags),
            folder=out / name,
            needs=needs,
            # The example runs on the CPU also where there is a GPU, so its figures are the same.
            environment={"CUDA_VISIBLE_DEVICES": ""},
            depends_on=(version("megatron-core"), version("torch")),
        )

    teacher = train(
        TEACHER,
        f"Teacher: pretrain for {recipe.teacher_iters} iterations",
        (corpus,),
        [
            *_model_flags(recipe.teacher),
            *_schedule_flags(recipe, recipe.teacher_iters, recipe.teacher_lr),
            *_resume_flags(out / TEACHER / "checkpoints", recipe.save_interval),
            *_validation_flags(corpus.folder, recipe.teacher_iters),
            # Another sample order than the students': their text is not the text it saw last.
            *("--seed", "4321"),
        ],
    )
    dump = train(
        DUMP,
        f"Dump: record the teacher's top {recipe.top_k} for {recipe.student_iters} iterations",
        (teacher,),
        [
            *_model_flags(recipe.teacher),
            *_schedule_flags(recipe, recipe.student_iters, recipe.student_lr),
            # Its own checkpoints only say how far the dump has come. There are none at first, and
            # then the weights come from the pretrained teacher.
            *_resume_flags(out / DUMP / "checkpoints", recipe.save_interval),
            *("--pretrained-checkpoint", str(out / TEACHER / "checkpoints")),
            "--freeze-all-layers",
            *("--logits-save-dir", str(logits_folder(out))),
            *("--logits-save-top-k", str(recipe.top_k)),
            *("--eval-interval", str(recipe.student_iters), "--eval-iters", "0"),
            *("--async-save", "--use-persistent-ckpt-worker"),
        ],
    )

    def student(name: str, title: str, needs: tuple[Stage, ...], flags: list[str]) -> Stage:
        return train(
            name,
            title,
            needs,
            [
                *_model_flags(recipe.student),
                *_schedule_flags(recipe, recipe.student_iters, recipe.student_lr),
                *_resume_flags(out / name / "checkpoints", recipe.save_interval),
                *_validation_flags(corpus.folder, recipe.eval_interval),
                *flags,
            ],
        )

    plain = student(PLAIN, "Student, language-model loss only", (corpus,), [])
    distilled = student(
        DISTILLED,
        f"Student, with the teacher's cached logits (alpha {recipe.alpha})",
        (dump,),
        [
            *("--logits-load-dir", str(logits_folder(out))),
            *("--logits-load-kd-loss-alpha", str(recipe.alpha)),
        ],
    )
    return {stage.name: stage for stage in (corpus, teacher, dump, plain, distilled)}


def _validation_flags(corpus: Path, interval: int) -> list[str]:
    """Return flags that evaluate on the whole held-out set, the same for every run and point."""
    return [
        *("--valid-data-path", str(corpus / VALID_NAME), "--eval-interval", str(interval)),
        # With one set only, --full-validation fails in megatron-core 0.19.2; a list of one works.
        *("--full-validation", "--multiple-validation-sets"),
    ]


def logits_folder(out: Path) -> Path:
    """Return where the dump of this output folder puts the teacher's shards."""
    return out / DUMP / "logits"


def _common_flags(recipe: Recipe, corpus: Path, processes: int) -> list[str]:
    """Return what every training run shares: data, batch, and running on the CPU."""
    return [
        *("--train-data-path", str(corpus / TRAIN_NAME)),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", str(corpus / "tokenizer")),
        *("--num-workers", "0"),
        *("--seq-length", str(recipe.sequence)),
        *("--max-position-embeddings", str(recipe.sequence)),
        *("--micro-batch-size", str(recipe.batch // processes)),
        *("--global-batch-size", str(recipe.batch)),
        *("--log-interval", "5"),
        *(("--bf16",) if cpu_has_bf16() else ()),
        # gloo where no GPU is visible is what switches CPU mode on.
        *("--distributed-backend", "gloo"),
    ]


def cpu_has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 in hardware; where it does not, fp32 is faster."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def _model_flags(shape: ModelShape) -> list[str]:
    return [
        *("--num-layers", str(shape.layers), "--hidden-size", str(shape.hidden)),
        *("--num-attention-heads", str(shape.heads)),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        "--untie-embeddings-and-output-weights",
        *("--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ]


def _schedule_flags(recipe: Recipe, iterations: int, lr: float) -> list[str]:
    return [
        *("--train-iters", str(iterations)),
        *("--lr", str(lr), "--min-lr", str(lr / 10), "--lr-decay-style", "cosine"),
        *("--lr-warmup-iters", str(iterations // 20)),
        *("--weight-decay", "0.1", "--clip-grad", "1.0", "--adam-beta2", "0.95"),
    ]


def _resume_flags(checkpoints: Path, interval: int) -> list[str]:
    """Return flags that save, and load what an interrupted try of the same stage has saved."""
    folder = str(checkpoints)
    return ["--save", folder, "--load", folder, "--save-interval", str(interval)]
