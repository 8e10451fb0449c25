"""A headless Chromium, whose WebGPU is Dawn on SwiftShader. Chrome's DevTools Protocol through a pipe."""

from __future__ import annotations

import base64
import fcntl
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu-sandbox", "--remote-debugging-pipe"),
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-first-run", "--disable-extensions"),
)
# DevTools reads from descriptor 3 and writes to 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of one process. Every call waits for its answer."""

    def __init__(self, profile: str) -> None:
        ours, theirs = zip(*(self._pipe(ours) for ours in (1, 0)), strict=True)  # we write, we read
        name = executable()
        assert name is not None
        words = [name, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        command = [sys.executable, "-c", _START, *map(str, theirs), *words]
        self.process = subprocess.Popen(command, pass_fds=theirs, stderr=subprocess.DEVNULL)
        for end in theirs:
            os.close(end)
        self.writer, self.reader = os.fdopen(ours[0], "wb", 0), os.fdopen(ours[1], "rb")
        self.sent, self.rest = 0, b""
        self.session = ""
        (target,) = (x for x in self.send("Target.getTargets")["targetInfos"] if x["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]

    @staticmethod
    def _pipe(ours: int) -> tuple[int, int]:
        """Our end and theirs, both away from the descriptors 3 and 4."""
        ends = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
        for end in ends:
            os.close(end)
        return high[ours], high[1 - ours]

    def send(self, method: str, **params: Any) -> Any:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._received())
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _received(self) -> bytes:
        while b"\0" not in self.rest:
            more = os.read(self.reader.fileno(), 1 << 20)
            if not more:
                raise RuntimeError(f"the browser ended with {self.process.wait(10)}")
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return message

    def open(self, url: str) -> None:
        """Loads a page; returns when it stands, which is before it has done its work."""
        self.send("Page.navigate", url=url)
        while self.evaluate("location.href + document.readyState") != f"{url}complete":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def size(self, width: int, height: int, scheme: str) -> None:
        """Shows the page as a screen of so many CSS pixels does, in a light or a dark scheme."""
        scale = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.send("Emulation.setDeviceMetricsOverride", **scale)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(profile)
        try:
            yield opened
        finally:
            with suppress(RuntimeError, OSError):
                opened.send("Browser.close")
            try:
                opened.process.wait(10)
            except subprocess.TimeoutExpired:
                opened.process.kill()
                opened.process.wait()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; what a page posts is kept."""

    def do_POST(self) -> None:
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()
        self.server.has_posted.set()  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None: ...


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.posted: list[Any] = []
        self.has_posted = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A web server of a folder, for this machine alone."""
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
