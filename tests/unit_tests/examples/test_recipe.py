# SPDX-License-Identifier: Apache-2.0
"""Tests of examples.offline_distillation.recipe."""

from pathlib import Path

import pytest

from examples.offline_distillation import recipe as recipes


def flag(command: tuple[str, ...], name: str) -> str:
    """The value of a flag that stands once in a command."""
    assert command.count(name) == 1, name
    return command[command.index(name) + 1]


@pytest.mark.parametrize("recipe", [recipes.FULL, recipes.SMOKE], ids=["full", "smoke"])
@pytest.mark.parametrize("processes", [1, 2])
def test_dump_and_students_agree_on_what_decides_the_samples(
    recipe: recipes.Recipe, processes: int
) -> None:
    stages = recipes.build_stages(recipe, Path("out"), processes=processes)
    dump, plain, distilled = (
        stages[name].command for name in (recipes.DUMP, recipes.PLAIN, recipes.DISTILLED)
    )
    for name in (
        *("--train-data-path", "--tokenizer-model", "--seq-length"),
        *("--train-iters", "--global-batch-size"),
    ):
        assert flag(dump, name) == flag(plain, name) == flag(distilled, name)
    for command in (dump, plain, distilled):
        assert "--seed" not in command
        assert flag(command, "--nproc-per-node") == str(processes)
        assert int(flag(command, "--micro-batch-size")) * processes == recipe.batch


def test_students_differ_in_the_teachers_logits_alone() -> None:
    stages = recipes.build_stages(recipes.FULL, Path("out"), processes=1)
    plain, distilled = stages[recipes.PLAIN].command, stages[recipes.DISTILLED].command
    same = tuple(word.replace(recipes.DISTILLED, recipes.PLAIN) for word in distilled)
    assert same[: len(plain)] == plain
    assert [word for word in same[len(plain) :] if word.startswith("--")] == [
        "--logits-load-dir",
        "--logits-load-kd-loss-alpha",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("flags : fpu avx2 amx_bf16", True), ("Features : fp bf16", True), ("flags : avx512f", False)],
)
def test_bf16_only_where_the_cpu_has_it(
    flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: flags)
    assert recipes.cpu_has_bf16() is expected


def test_order_of_the_stages_satisfies_their_needs() -> None:
    done: list[str] = []
    for stage in recipes.build_stages(recipes.FULL, Path("out"), processes=1).values():
        assert all(needed.name in done for needed in stage.needs)
        done.append(stage.name)
