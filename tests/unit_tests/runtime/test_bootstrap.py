# SPDX-License-Identifier: Apache-2.0
"""The checks before the trainer is imported: interpreter, megatron-core, overlay, helpers."""

import ast
import importlib
import sys
import sysconfig
from pathlib import Path

import pytest

from runtime import bootstrap
from tests.unit_tests.runtime.subprocesses import REPOSITORY_ROOT, passes, run_python

INSTALLED = Path(sysconfig.get_path("purelib"))
IMPORT_OVERLAY = "import megatron.training"


def test_old_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 9, "final", 0))
    with pytest.raises(RuntimeError, match=r"Python 3\.11\.9 is too old.*use 3\.12 or newer"):
        bootstrap.prepare_process([])


# ---- the installed megatron-core --------------------------------------------------------------


def fake_release(directory: Path, version: str) -> Path:
    """Make a directory that, early on sys.path, is taken for an installed megatron-core."""
    metadata = directory / f"megatron_core-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    )
    return directory


@pytest.mark.parametrize("version", ["0.17.1", "0.19.1", "0.19.2rc1", "0.20.0", "1.0"])
def test_unsupported_release_is_refused(tmp_path: Path, version: str) -> None:
    paths = [fake_release(tmp_path, version), REPOSITORY_ROOT]
    result = run_python(IMPORT_OVERLAY, python_path=paths)
    assert result.returncode != 0
    assert f"ImportError: megatron-core {version} is installed" in result.stderr
    assert ">=0.19.2,<0.20" in result.stderr


@pytest.mark.parametrize("version", ["0.19.2", "0.19.2+local.1", "0.19.7", "0.19.3rc2"])
def test_supported_release_is_accepted(tmp_path: Path, version: str) -> None:
    passes(IMPORT_OVERLAY, python_path=[fake_release(tmp_path, version), REPOSITORY_ROOT])


def test_absent_megatron_core_is_named() -> None:
    # -S leaves out site-packages, so nothing but the standard library and the tree is there.
    code = f"""
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-S", "-c", "{IMPORT_OVERLAY}"]))
"""
    result = run_python(code)
    assert result.returncode != 0
    assert "ImportError: megatron-core is not installed" in result.stderr
    assert ">=0.19.2,<0.20" in result.stderr


# ---- the overlay ------------------------------------------------------------------------------


def test_distillation_is_the_trees_and_the_rest_the_wheels() -> None:
    import megatron.training as overlay
    import megatron.training.distillation as ours
    import megatron.training.global_vars as theirs

    bootstrap.check_overlay()
    package = REPOSITORY_ROOT / "megatron" / "training"
    assert Path(ours.__file__).parent == package / "distillation"
    assert Path(theirs.__file__).is_relative_to(INSTALLED)
    assert overlay.get_args is theirs.get_args


def test_overlay_exports_what_the_installed_package_exports() -> None:
    """Read the installed ``__init__`` and ask the overlay for every name it imports."""
    import megatron.training as overlay

    tree = ast.parse((INSTALLED / "megatron" / "training" / "__init__.py").read_text())
    names = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert len(names) > 10
    for name, module in names.items():
        assert name in dir(overlay)
        home = importlib.import_module(f"megatron.training.{module}")
        assert getattr(overlay, name) is getattr(home, name)


def test_overlay_has_no_other_attributes() -> None:
    import megatron.training as overlay

    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'"):
        _ = overlay.nonsense


def test_entry_script_refuses_another_distillation_package(tmp_path: Path) -> None:
    """A package of the same name before the tree, laid out as in the installed wheel."""
    other = tmp_path / "megatron" / "training" / "distillation"
    other.mkdir(parents=True)
    for package in (other, other.parent):
        (package / "__init__.py").touch()
    code = (REPOSITORY_ROOT / "pretrain_gpt.py").read_text()
    result = run_python(code, python_path=[tmp_path, REPOSITORY_ROOT])
    assert result.returncode != 0
    assert f"OverlayError: megatron.training.distillation is {other / '__init__.py'}" in (
        result.stderr
    )
    assert f"expected {REPOSITORY_ROOT}" in result.stderr
    assert f"Put {REPOSITORY_ROOT} before site-packages" in result.stderr


def test_package_without_distillation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    code = "from runtime import bootstrap; bootstrap.check_overlay()"
    result = run_python(code, python_path=[tmp_path, REPOSITORY_ROOT])
    assert "OverlayError: megatron.training.distillation is None" in result.stderr


# ---- a prepared process -----------------------------------------------------------------------


@pytest.mark.slow
def test_prepared_process() -> None:
    """One process for all of it, as importing megatron takes seconds."""
    printed = passes(
        """
import subprocess, sys
from runtime.bootstrap import prepare_process
prepare_process()
prepare_process()

import megatron.training.distillation.shard_writer
assert "megatron.training.training" not in sys.modules, "the worker would load the trainer"

def refuse(*args, **kwargs):
    raise SystemExit("make was run")
subprocess.run = subprocess.call = subprocess.check_call = refuse
from megatron.core.datasets import utils
utils.compile_helpers()

from runtime import cpu_mode
print(cpu_mode.is_active())
""",
        "--distributed-backend=gloo",
    )
    announcement, active = printed.splitlines()
    assert announcement.startswith("> CPU mode:")
    assert active == "True"


def test_tree_without_prebuilt_helpers_keeps_its_build_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.datasets import utils

    def own_build_step() -> None:
        """Stand in for Megatron's own."""

    monkeypatch.setattr(utils, "compile_helpers", own_build_step)
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    bootstrap.use_prebuilt_dataset_helpers()
    assert utils.compile_helpers is own_build_step
