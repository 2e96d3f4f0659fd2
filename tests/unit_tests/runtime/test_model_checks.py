# SPDX-License-Identifier: Apache-2.0
"""What a hybrid model needs, and a ``--spec`` that Megatron would pass over."""

import argparse
import ast
import importlib.util
import shlex
from pathlib import Path

import pytest

from runtime import cpu_mode
from runtime.model_checks import check_hybrid_model, check_spec
from tests.unit_tests.runtime.subprocesses import REPOSITORY_ROOT, passes

SPEC = ["module.of.specs", "stack"]


def hybrid(pattern: str | None, spec: list[str] | None = None) -> argparse.Namespace:
    return argparse.Namespace(hybrid_layer_pattern=pattern, spec=spec)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that can be found; a test changes them."""
    names: set[str] = set()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in names else None
    )
    return names


def test_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs --hybrid-layer-pattern.*run pretrain_gpt\.py"):
        check_hybrid_model(hybrid(None))


@pytest.mark.parametrize(
    ("pattern", "spec", "present", "missing", "packages"),
    [
        (
            "M*-M",
            None,
            [],
            "transformer_engine, mamba_ssm, einops",
            "'transformer-engine[pytorch]' 'mamba-ssm[causal-conv1d]' einops",
        ),
        ("*-/M", None, ["transformer_engine"], "mamba_ssm, einops", None),
        ("*-*-", None, ["mamba_ssm", "einops"], "transformer_engine", None),
        ("M-", SPEC, ["einops"], "mamba_ssm", "'mamba-ssm[causal-conv1d]'"),
    ],
)
def test_missing_packages_are_named(
    installed: set[str],
    pattern: str,
    spec: list[str] | None,
    present: list[str],
    missing: str,
    packages: str | None,
) -> None:
    installed.update(present)
    with pytest.raises(ImportError) as caught:
        check_hybrid_model(hybrid(pattern, spec))
    message = str(caught.value)
    assert message.startswith(f"--hybrid-layer-pattern {pattern} needs ")
    assert f"not installed: {missing}. Install what is missing: pip install " in message
    if packages is not None:
        assert message.endswith(f"--no-build-isolation {packages}")


@pytest.mark.parametrize(
    ("pattern", "spec", "present"),
    [
        ("M*-M", None, ["transformer_engine", "mamba_ssm", "einops"]),
        ("*-", None, ["transformer_engine"]),
        ("M-", SPEC, ["mamba_ssm", "einops"]),
        ("*-", SPEC, []),
    ],
)
def test_model_whose_parts_are_here_is_accepted(
    installed: set[str], pattern: str, spec: list[str] | None, present: list[str]
) -> None:
    installed.update(present)
    check_hybrid_model(hybrid(pattern, spec))


def test_cpu_mode_is_refused_whatever_is_installed(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.update(["transformer_engine", "mamba_ssm", "einops"])
    monkeypatch.setattr(cpu_mode, "is_active", lambda: True)
    for pattern, spec in (("M*-", None), ("*-", None), ("M-", SPEC)):
        with pytest.raises(ValueError, match="run on GPUs, and this is CPU mode") as caught:
            check_hybrid_model(hybrid(pattern, spec))
        assert "without --distributed-backend gloo" in str(caught.value)
    # Nothing of it needs a GPU as far as can be told.
    check_hybrid_model(hybrid("*-", SPEC))


# ---- --spec -----------------------------------------------------------------------------------


def test_spec_that_cannot_be_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specs_of_a_test.py").write_text("import a_module_that_is_not_here\nstack = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"No module named 'nowhere'.*PYTHONPATH"):
        check_spec(["nowhere.specs", "stack"])
    with pytest.raises(ValueError, match=r"specs_of_a_test cannot be imported.*a_module_that"):
        check_spec(["specs_of_a_test", "stack"])


def test_spec_without_its_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_specs_of_a_test.py").write_text("stack = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_spec(["other_specs_of_a_test", "stack"])
    with pytest.raises(ValueError, match=r"other_specs_of_a_test\.py has no name stuck"):
        check_spec(["other_specs_of_a_test", "stuck"])


@pytest.mark.parametrize("spec", [None, [], ["local"]])
def test_other_forms_of_spec_are_left_to_megatron(spec: list[str] | None) -> None:
    check_spec(spec)


# ---- the entry script -------------------------------------------------------------------------


@pytest.mark.slow
def test_real_script_says_what_a_hybrid_model_needs_and_has_no_stand_in(tmp_path: Path) -> None:
    script, cache = REPOSITORY_ROOT / "pretrain_hybrid.py", tmp_path / "cache"
    printed = passes(
        f"""
import runpy, sys
sys.argv[0] = "{script}"
try:
    runpy.run_path("{script}", run_name="__main__")
except ValueError as error:
    print("refused:", error)
    assert not any(name.split(".")[0] in ("mamba_ssm", "tests") for name in sys.modules)
""",
        *shlex.split(
            "--distributed-backend gloo --hybrid-layer-pattern M*-M --hidden-size 32 "
            "--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
            "--tokenizer-type NullTokenizer --vocab-size 95 --mock-data --train-iters 1 "
            "--micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --async-save "
            f"--use-persistent-ckpt-worker --save-interval 1 --save {tmp_path / 'save'} "
            f"--logits-save-dir {cache}"
        ),
    )
    assert "refused: --hybrid-layer-pattern M*-M needs transformer_engine, mamba_ssm" in printed
    assert "this is CPU mode" in printed
    assert "building" not in printed
    assert not cache.exists()


def test_nothing_outside_of_tests_imports_from_them() -> None:
    files = [
        path
        for place in ("megatron", "runtime", "examples", "tools")
        for path in (REPOSITORY_ROOT / place).rglob("*.py")
    ]
    files += sorted(REPOSITORY_ROOT.glob("*.py"))
    assert REPOSITORY_ROOT / "pretrain_hybrid.py" in files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "tests" for name in names), path
