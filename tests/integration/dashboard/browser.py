"""A real Chromium without a network: a request that is not for the server under test fails it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
WAIT_MS = 30_000  # of one step; a busy machine needs more with a real model


class Browser:
    """Opens pages of one server, each in a context of its own, and collects their errors."""

    def __init__(self, chromium: Any, url: str, wait_ms: int = WAIT_MS) -> None:
        self._chromium = chromium
        self.url = url
        self._wait_ms = wait_ms
        self.foreign: list[str] = []
        self.broken: list[str] = []

    def open(self, view: str = "", key: str = "", **context: Any) -> Any:
        """Open the dashboard at a view, past the question for a key if one is given."""
        page = self.blank(**context)
        page.goto(f"{self.url}/ui#{view}")
        if key:
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Open").click()
        return page

    def blank(self, **context: Any) -> Any:
        """Make a page that has loaded nothing yet."""
        made = self._chromium.new_context(**context)
        made.set_default_timeout(self._wait_ms)
        page = made.new_page()
        page.on("request", self._asked)
        page.on("pageerror", lambda error: self.broken.append(str(error)))
        page.on("console", self._said)
        return page

    def check(self) -> None:
        """Fail if a page asked another host, or broke."""
        foreign, broken, self.foreign, self.broken = self.foreign, self.broken, [], []
        assert foreign == []
        assert broken == []

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"{self.url}/", "data:", "blob:")):
            self.foreign.append(request.url)

    def _said(self, message: Any) -> None:
        # A status of 401 or 404 is also an error of the console; the page deals with those.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.broken.append(message.text)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the system's Chromium; skips where there is none, or no playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    # Within a module only: while playwright's loop is there, no asyncio test can run.
    api.expect.set_options(timeout=WAIT_MS)
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", OFFLINE]
        )
        yield launched
        launched.close()
