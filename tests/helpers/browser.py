"""Chromium without a window, over the WebDriver protocol of its chromedriver: no package but these two programs."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IS_THERE = bool(shutil.which("chromium") and shutil.which("chromedriver"))
WHY_NOT = "needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver)"


class Browser:
    """A session. `messages` has what the page writes to its console, such as a request that its policy refuses."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.url += f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read()[:2000].decode(errors='replace')}") from None

    def open(self, file: Path, fragment: str = "") -> None:
        """Opens a report and waits until it is drawn."""
        self._ask("POST", "/url", {"url": "about:blank"})
        self._ask("POST", "/url", {"url": f"file://{file.resolve()}#{fragment}"})
        deadline = time.monotonic() + 60
        while not self.run("return document.documentElement.dataset.drawn"):
            assert time.monotonic() < deadline, "the page was not drawn"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function with this body returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Presses the keys, one after the other, wherever the focus is."""
        actions = []
        for key in keys:
            actions += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def show_as(self, width: int, height: int, theme: str, is_phone: bool = False, scale: float = 1) -> None:
        """The size of the page, and the theme that the system asks for: light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self._command("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self._command("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._command("Page.captureScreenshot", {"format": "png"})["data"]))

    @property
    def messages(self) -> list[str]:
        """What the console got since the last time."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def _command(self, name: str, parameters: dict) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})


@contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                session = Browser(port)
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline, "chromedriver did not start"
                time.sleep(0.1)
        try:
            yield session
        finally:
            session._ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)
