# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: opens a file, tells what it complains of, and what it shows.

Chromium is spoken to by its DevTools protocol over two pipes, which needs no package.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = f"no browser: none of {', '.join(NAMES)} is on the path (apt-get install chromium)"

_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, and the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
# The browser reads from descriptor 3 and writes to 4.
_LAUNCH = (
    "import os, sys; reads, writes = map(int, sys.argv[1:3]); os.dup2(reads, 3); "
    "os.dup2(writes, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    """Return the path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a running browser."""

    def __init__(self, browser: "_Pipe") -> None:
        self._pipe = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
        return self._pipe.call(method, session=self._session, **parameters)

    def open(self, url: str) -> list[str]:
        """Load *url*; return what was complained of meanwhile, with requests that failed."""
        self._pipe.events.clear()
        self._call("Page.navigate", url=url)
        self._pipe.wait_for("Page.loadEventFired")
        self.evaluate("new Promise(done => setTimeout(done, 50))")  # what comes just afterwards
        return [said for event in self._pipe.events if (said := _complaint(event))]

    def requests(self) -> list[str]:
        """Return the URLs that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self._pipe.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def show(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Choose the size of the window and the scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        found = self._call("Page.printToPDF", printBackground=True)
        return base64.b64decode(found["data"])


@contextlib.contextmanager
def browser_page(directory: Path, *, timeout: float = 60.0) -> Iterator[Page]:
    """Start a browser whose profile lies in *directory*; each call of it may take *timeout*."""
    path = find_browser()
    assert path is not None, MISSING
    from_us, to_browser = _high_pipe()
    from_browser, to_us = _high_pipe()
    command = [path, *_FLAGS, f"--user-data-dir={directory}"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _LAUNCH, str(from_us), str(to_us), *command],
        pass_fds=(from_us, to_us),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(_Pipe(to_browser, from_browser, timeout))
    finally:
        os.close(to_browser)
        os.close(from_browser)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Pipe:
    """Sends commands and collects events."""

    def __init__(self, write: int, read: int, timeout: float) -> None:
        self._write, self._read, self._timeout = write, read, timeout
        self._last = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> Any:
        self._last += 1
        number = self._last
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._send(json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout
        while True:
            found = self._receive(method, deadline)
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def wait_for(self, method: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive(method, deadline))

    def _send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._write, data) :]

    def _receive(self, what: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready = select.select([self._read], [], [], max(left, 0))[0]
            if not ready:
                raise TimeoutError(f"the browser did not answer {what} in {self._timeout} s")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise EOFError(f"the browser ended instead of answering {what}")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _high_pipe() -> Sequence[int]:
    """Return a pipe whose descriptors are none that the launcher gives to the browser."""
    pair = os.pipe()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in pair]
    for descriptor in pair:
        os.close(descriptor)
    return high


def _complaint(event: dict[str, Any]) -> str | None:
    """Return what an event complains of, or None."""
    parameters = event.get("params", {})
    match event.get("method"):
        case "Runtime.consoleAPICalled":
            words = (str(one.get("value", one.get("description"))) for one in parameters["args"])
            return f"console.{parameters['type']}: {' '.join(words)}"
        case "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            return f"exception: {details.get('exception', {}).get('description', details['text'])}"
        case "Log.entryAdded":
            entry = parameters["entry"]
            return f"{entry['level']}: {entry['text']} {entry.get('url', '')}"
        case "Network.loadingFailed":
            return f"request failed: {parameters['errorText']}"
    return None
