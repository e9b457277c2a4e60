"""A real browser, Chromium without a window, that opens one file and answers questions about it (DevTools protocol)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WHERE_TO_GET_IT = "needs a browser: chromium is not on PATH (Debian and Ubuntu: apt install chromium)"
PATIENCE_S = 90  # machines that run tests are busy

SWITCHES = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run --hide-scrollbars --remote-debugging-pipe"
)


class Browser:
    """A page in a browser; messages go through two pipes, each ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self.session: str | None = None
        self.errors: list[str] = []  # exceptions that nobody caught, and what the browser complains of
        self.requests: list[str] = []  # every address that was asked for

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and hear meanwhile what happens."""
        self._number += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self._number, "method": method, "params": arguments, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._hear(answer.get("method"), answer.get("params", {}))

    def open(self, path: Path, width: int = 1280) -> None:
        """Open a file as it lies on disk in a new tab, and wait until its figures are drawn; narrow ones are phones."""
        self.session = None
        self.errors.clear()
        self.requests.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        phone = width < 600
        size = {"width": width, "height": 900, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.documentElement?.hasAttribute('data-drawn')")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.errors)
            time.sleep(0.1)

    def prefer(self, scheme: str, media: str = "screen") -> None:
        """Light or dark, for a screen or for paper ("print")."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def drag(self, start: float, end: float, y: float) -> None:
        """Press the left button at one place, move to the right, and release it."""
        moves = [("mouseMoved", start + (end - start) * part, 0) for part in (0.3, 0.6, 1.0)]
        for kind, x, clicks in (("mousePressed", start, 1), *moves, ("mouseReleased", end, 1)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=clicks)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _hear(self, method: str | None, about: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(about["exceptionDetails"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.errors.append(about["entry"]["text"])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                self.errors.append(json.dumps(about["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in an empty folder, until the context ends."""
    assert CHROMIUM, WHERE_TO_GET_IT
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser wants its pipes as descriptors 3 and 4; a shell can arrange that without code between fork and exec.
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write} >/dev/null 2>&1'
    command = ["bash", "-c", shell, "browser", CHROMIUM, *SWITCHES.split(), f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=(to_read, from_write))
    os.close(to_read)
    os.close(from_write)
    page = Browser(to_write, from_read)
    try:
        yield page
    finally:
        with suppress(AssertionError, OSError):
            page.session = None
            page.call("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(from_read)
