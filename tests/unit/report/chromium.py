"""A headless Chromium over its own pipe protocol; no library, no network, no port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def path() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One page; everything that the browser said about it is in `events`."""

    def __init__(self, profile: Path):
        self._profile, self._numbers = profile, count(1)
        self.events: list[dict[str, Any]] = []
        self._session = ""
        self._rest = b""

    def __enter__(self) -> Self:
        browser = path()
        assert browser
        into, self._out = os.pipe()
        self._in, out = os.pipe()
        script = f'exec "$0" "$@" 3<&{into} 4>&{out} {into}<&- {out}>&-'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, browser, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"),
            ],
            pass_fds=(into, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(into)
        os.close(out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, page: Path, *, scripts: bool = True) -> None:
        """Returns when the page has loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=page.as_uri())
        while not self.told("Page.loadEventFired"):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def told(self, method: str) -> list[dict[str, Any]]:
        return [e["params"] for e in self.events if e.get("method") == method]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))
