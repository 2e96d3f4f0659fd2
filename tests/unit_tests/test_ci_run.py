# SPDX-License-Identifier: Apache-2.0
"""``.ci/run`` gets a browser where it can, and runs the checks in any case."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser import NAMES

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with the only commands that the script finds; they print what they are."""
    for name in ("bash", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    add(tmp_path, "make", 'echo "make $@"')
    add(tmp_path, "id", "echo 0")
    return tmp_path


def add(commands: Path, name: str, body: str) -> None:
    path = commands / name
    path.write_text(f"#!{commands / 'bash'}\n{body}\n")
    path.chmod(0o755)


def run(commands: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": str(commands)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_browser_that_tests_find_is_enough(commands: Path, name: str) -> None:
    add(commands, name, "exit 1")
    add(commands, "apt-get", 'echo "apt-get $@"')
    assert run(commands).stdout == "make test\n"


def test_a_missing_browser_is_installed(commands: Path) -> None:
    add(commands, "apt-get", 'echo "apt-get $@"')
    update, install, make = run(commands).stdout.splitlines()
    assert update == "apt-get -q update"
    assert install.endswith(f"--no-install-recommends {NAMES[0]}")
    assert make == "make test"


@pytest.mark.parametrize("root", [True, False])
def test_the_checks_run_where_none_can_be_installed(commands: Path, root: bool) -> None:
    if root:
        add(commands, "apt-get", "exit 100")
    else:
        add(commands, "id", "echo 1000")
    ended = run(commands)
    assert ended.stdout == "make test\n"
    assert "the tests of pages will be skipped" in ended.stderr
