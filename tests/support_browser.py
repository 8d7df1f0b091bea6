"""Chromium for tests: one process per session, and a connection of Playwright's to it in each test's own event loop.

    chromium (session)  the process, with a profile of its own, told by its DevTools port
    browser  (test)     Playwright connected to it; each test makes its own contexts, which end with the connection
    page     (test)     a page in a context of its own; its console errors and uncaught exceptions fail the test

A test module takes them by `from support_browser import ...` in its folder's conftest. Where Chromium or Playwright is
not installed such tests are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

START_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def chromium_path() -> str | None:
    """The installed Chromium, or None."""
    return next((found for name in _NAMES if (found := shutil.which(name)) is not None), None)


def require_chromium() -> str:
    """The installed Chromium; skips the test where it, or Playwright, is missing."""
    pytest.importorskip("playwright.async_api", reason="the Python package playwright is not installed")
    path = chromium_path()
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(_NAMES)} is on PATH")
    return path


@contextlib.contextmanager
def running_chromium(path: str) -> Iterator[str]:
    """A Chromium of one's own; its DevTools address."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            told = Path(profile) / "DevToolsActivePort"
            deadline_s = time.monotonic() + START_S
            while not (lines := told.read_text().splitlines() if told.exists() else []):
                assert process.poll() is None, f"{path} ended with {process.returncode}"
                assert time.monotonic() < deadline_s, f"{path} told no DevTools port within {START_S:g} s"
                time.sleep(0.02)
            yield f"http://127.0.0.1:{lines[0]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """One Chromium for all browser tests; its DevTools address."""
    with running_chromium(require_chromium()) as address:
        yield address


@pytest.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """The session's Chromium, driven from this test's event loop."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        connected = await playwright.chromium.connect_over_cdp(chromium)
        try:
            yield connected
        finally:
            for context in connected.contexts[1:]:  # the first is Chromium's own
                await context.close()
            await connected.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A blank page in a context of its own. An exception that nobody caught in it fails the test."""
    context = await browser.new_context()
    opened = await context.new_page()
    uncaught: list[str] = []
    opened.on("pageerror", lambda error: uncaught.append(str(error)))
    try:
        yield opened
    finally:
        await context.close()
    assert not uncaught, uncaught
