# SPDX-License-Identifier: Apache-2.0
"""See a student learn from cached logits: one command, on the CPU, on real text.

Run from the root of the tree: ``python -m examples.offline_distillation.quickstart``. Pretrains a
small teacher, dumps its logits once, trains the same student without and with them, and writes
``comparison.png`` and ``results.json``. Run it again after an interruption: it goes on.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from examples.offline_distillation import recipe as recipes
from examples.offline_distillation.megatron_log import validation_curve
from examples.offline_distillation.progress import format_seconds
from examples.offline_distillation.report import Comparison, draw, format_table
from examples.offline_distillation.stages import Stage, StageError, run_stages

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart; return the exit status."""
    options = _parse(argv)
    recipe = recipes.SMOKE if options.smoke else recipes.FULL
    out: Path = options.out.resolve()
    if recipe.batch % options.processes:
        print(f"error: --processes must divide the batch of {recipe.batch}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A plain `kill` stops the running stage in good order too.
    signal.signal(signal.SIGTERM, _interrupt)

    started = time.monotonic()
    stages = recipes.build_stages(recipe, out, processes=options.processes)
    print(f"Everything goes into {out}; each stage's full log is log.txt in its folder.\n")
    try:
        run_stages(list(stages.values()), cwd=ROOT)
    except StageError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again: it goes on from here.", file=sys.stderr)
        return 130

    teacher = _curve(stages[recipes.TEACHER])
    comparison = Comparison(
        plain=_curve(stages[recipes.PLAIN]),
        distilled=_curve(stages[recipes.DISTILLED]),
        teacher=teacher[max(teacher)],
    )
    _write_results(comparison, stages, recipe, out)
    draw(comparison, out / "comparison.png")
    print(f"\n{format_table(comparison)}\n{_describe_cache(recipe, out)}")
    print(f"\nPicture: {out / 'comparison.png'}\nNumbers: {out / 'results.json'}")
    print(f"This run took {format_seconds(time.monotonic() - started)}.")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart", description="Distil a small student from cached logits, on the CPU."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart_out"), help="output folder (quickstart_out)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="data-parallel processes of each run (one per core, at most two)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run every stage with a few tiny iterations only"
    )
    return parser.parse_args(argv)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _curve(stage: Stage) -> dict[int, float]:
    with stage.log.open(encoding="utf-8", errors="replace") as log:
        return validation_curve(log)


def _cache_bytes(out: Path) -> int:
    return sum(file.stat().st_size for file in recipes.logits_folder(out).glob("*.tar"))


def _describe_cache(recipe: recipes.Recipe, out: Path) -> str:
    size = _cache_bytes(out)
    tokens = recipe.student_iters * recipe.batch * recipe.sequence
    return (
        f"The teacher's cache: {size / 1e6:.1f} MB for {tokens} tokens, "
        f"{size / tokens:.0f} bytes per token at K = {recipe.top_k}."
    )


def _write_results(
    comparison: Comparison, stages: dict[str, Stage], recipe: recipes.Recipe, out: Path
) -> None:
    results = comparison.to_json() | {
        "alpha": recipe.alpha,
        "top_k": recipe.top_k,
        "cache_bytes": _cache_bytes(out),
        "stage_seconds": {name: stage.seconds_if_done() for name, stage in stages.items()},
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
