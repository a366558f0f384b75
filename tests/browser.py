"""Chromium without a window, driven over a pipe: no port, no library.

    with Browser() as browser:
        page = browser.open(file)
        page.hover("circle")
        assert page.value("document.title") == "..."

Chromium speaks its DevTools protocol on two file descriptors (`--remote-debugging-pipe`): JSON, a zero byte after each.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

__all__ = ["CHROMIUM", "Browser", "Page"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60.0
_QUIET_SECONDS = 0.2
"""How long events that are under way may take to arrive."""


class Browser:
    """One process; `open` makes a tab. Ends with the `with` block, and what it wrote with it."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = [
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",  # it refuses to run as root otherwise
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            f"--user-data-dir={self._profile.name}",
        ]
        # It reads descriptor 3 and writes 4, so ours must have other numbers while they are copied there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        self._pid = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *options],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)),
                *((os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, 3)),
            ],
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        until = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self._in)
        os.close(self._out)
        self._selector.close()
        self._profile.cleanup()

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command; its result. Events that arrive meanwhile go to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._read(until - time.monotonic())
            if answer is None:
                raise TimeoutError(f"Chromium did not answer {method} within {_SECONDS:g} s")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Until nothing has come for so long."""
        while (event := self._read(seconds)) is not None:
            self.events.append(event)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None after so long without one."""
        until = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, file: Path, *, dark: bool = False, width: int = 1366, height: int = 768) -> Page:
        """A tab of that size and scheme with this file."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=file.resolve().as_uri())
        until = time.monotonic() + _SECONDS
        while page.value("document.readyState") != "complete" or page.value("location.href") == "about:blank":
            assert time.monotonic() < until, "the page does not become complete"
        self.listen(_QUIET_SECONDS)
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **params)

    def value(self, expression: str) -> Any:
        """Of JavaScript, as JSON has it; an exception there is one here."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def hover(self, selector: str) -> None:
        """The mouse over the middle of the first such element, scrolled into view."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center'}})")
        x, y = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({find}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tip(self) -> str | None:
        """What the page shows at the mouse; None if it shows nothing."""
        shown = self.value("(t => t.style.display === 'block' ? t.textContent : null)(document.getElementById('tip'))")
        return None if shown is None else str(shown)

    def complaints(self) -> list[str]:
        """Exceptions, errors and warnings of the console so far."""
        self._browser.listen(_QUIET_SECONDS)
        found = []
        for event in self._events():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
                found.append(json.dumps(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses of everything that was asked for so far, the page itself first."""
        self._browser.listen(_QUIET_SECONDS)
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        told = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(told["data"]))
