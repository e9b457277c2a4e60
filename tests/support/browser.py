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
    "--headless=new",
    "--no-sandbox",  # which root may not use
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """A page in a browser; messages go through two pipes, each ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []  # exceptions that nobody caught, and what the browser complains of
        self.requests: list[str] = []  # every address that was asked for

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and hear meanwhile what happens."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._hear(answer)

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Open a file as it lies on disk in a new tab, and wait until its figures are drawn."""
        self._session = None
        self.errors.clear()
        self.requests.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.documentElement?.hasAttribute('data-drawn')")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.errors)
            time.sleep(0.1)

    def prefer(self, scheme: str, media: str = "screen") -> None:
        """Light or dark, for a screen or for paper ("print")."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the left button."""
        pressed = 0 if kind == "mouseMoved" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=pressed, clickCount=pressed)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one place, move, and release at another one."""
        self.mouse("mousePressed", *start)
        for step in (0.3, 0.6, 1.0):
            at = [a + (b - a) * step for a, b in zip(start, end, strict=True)]
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1], button="left", buttons=1)
        self.mouse("mouseReleased", *end)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        arguments = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(arguments["exceptionDetails"]))
            case "Log.entryAdded" if arguments["entry"]["level"] in ("error", "warning"):
                self.errors.append(arguments["entry"]["text"])
            case "Runtime.consoleAPICalled" if arguments["type"] in ("error", "warning"):
                self.errors.append(json.dumps(arguments["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(arguments["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in an empty folder, until the context ends."""
    assert CHROMIUM, WHERE_TO_GET_IT
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser wants its pipes as descriptors 3 and 4; a shell can arrange that without code between fork and exec.
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    command = ["bash", "-c", shell, "browser", CHROMIUM, *SWITCHES, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(from_write)
    page = Browser(to_write, from_read)
    try:
        yield page
    finally:
        with suppress(AssertionError, OSError):
            page._session = None
            page.call("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(from_read)
