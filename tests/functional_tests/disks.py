# SPDX-License-Identifier: Apache-2.0
"""A small file system that can be full, read-only or gone, as a real one can."""

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_DONE = "status "


class ScratchDisk:
    """A tmpfs in a mount namespace of its own, which needs no privileges.

    Everyone reaches it through the process that holds the namespace.

    Args:
        mount_point: An empty directory.
        size: Its size in bytes; whole pages.
    """

    def __init__(self, mount_point: Path, size: int) -> None:
        self._mount_point = shlex.quote(str(mount_point))
        self._aside = shlex.quote(f"{mount_point}-aside")
        self._size = size
        # Ends with its input, so it does not outlive a test process that is killed.
        self._holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.path = Path(f"/proc/{self._holder.pid}/root{mount_point}")
        self.aside = self.path.with_name(f"{mount_point.name}-aside")
        """Where it is while it is detached."""

    def mount(self) -> None:
        """Mount it, empty."""
        self._run(f"mount -t tmpfs -o size={self._size} none {self._mount_point}")

    def resize(self, size: int) -> None:
        """Give it another size; what it holds stays."""
        self._run(f"mount -o remount,size={size} {self._mount_point}")

    def allow_writes(self, allowed: bool) -> None:
        """Make it read-only, or writable again."""
        self._run(f"mount -o remount,{'rw' if allowed else 'ro'} {self._mount_point}")

    def detach(self) -> None:
        """Unmount it from its place, which is an empty directory then, and keep what it holds."""
        self._run(f"mkdir -p {self._aside} && mount --move {self._mount_point} {self._aside}")

    def attach(self) -> None:
        """Mount it in its place again."""
        self._run(f"mount --move {self._aside} {self._mount_point}")

    def close(self) -> None:
        """Let it go, with all it holds."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()

    def _run(self, command: str) -> None:
        """Run a command in the namespace.

        Raises:
            OSError: It failed, or there is no namespace.
        """
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.write(f'{command}; echo "{_DONE}$?"\n')
            self._holder.stdin.flush()
        said = []
        for line in self._holder.stdout:
            if line == f"{_DONE}0\n":
                return
            said.append(line.strip())
            if line.startswith(_DONE):
                break
        raise OSError(f"{command}: {' '.join(said)}")


@contextlib.contextmanager
def scratch_disk(directory: Path, size: int) -> Iterator[ScratchDisk]:
    """Mount a file system of *size* bytes; skips the test where that is not permitted."""
    mount_point = directory / "disk"
    mount_point.mkdir()
    disk = ScratchDisk(mount_point, size)
    with contextlib.closing(disk):
        try:
            disk.mount()
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        yield disk
