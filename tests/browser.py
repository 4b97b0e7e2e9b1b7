"""A headless Chromium, spoken to over a pipe by the DevTools protocol: no packages, no ports."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for an answer, on a busy machine


def chromium() -> str | None:
    """The Chromium of this system, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in a browser of its own. What the console says, and errors that nobody caught, are in `complaints`."""

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False, phone: bool = False) -> None:
        program = chromium()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]

        def place() -> None:  # the protocol's pipes are descriptors 3 and 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=place,
            pass_fds=(3, 4),
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._number, self._buffer, self.complaints = 0, b"", []  # type: ignore[var-annotated]
        self._session: str | None = None
        self._loaded = False
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height, phone=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> Any:
        """One command, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"].get("exception", {}).get("description", "an error"))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is drawn."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Load what is at an address, and wait until it is drawn."""
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()
        self.settle()

    def wait_for(self, condition: str) -> None:
        """Wait until an expression on the page is true."""
        self.run(
            "new Promise((done) => { const look = () => {"
            f" if ({condition}) done(1); else setTimeout(look, 20); }}; look(); }})"
        )

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def run(self, script: str) -> Any:
        """The value of an expression on the page; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer.get("exceptionDetails")
        return answer["result"].get("value")

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse over an element, to a share of its width and height."""
        name = json.dumps(selector)
        self.run(f"document.querySelector({name}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"(() => {{ const b = document.querySelector({name}).getBoundingClientRect();"
                       " return [b.left, b.top, b.width, b.height]; })()")  # fmt: skip
        x, y = box[0] + across * box[2], box[1] + down * box[3]
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def press(self, *keys: str) -> None:
        """Press keys, such as ArrowLeft or Tab."""
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Escape": 27, " ": 32}
        for key in keys:
            text = {"Enter": "\r", " ": " "}.get(key, "")
            facts = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.send("Input.dispatchKeyEvent", type="keyDown", **facts, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **facts)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """Save a picture of the page, all of it or what is in view."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if clip is not None:
            options["clip"] = {**clip, "scale": 1}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", **options)["data"]))
