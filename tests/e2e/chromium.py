"""Headless Chromium, as it is installed on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=20_000)

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser without a window; it may reach loopback alone."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, f"none of {', '.join(NAMES)}: apt-get install chromium"
    arguments = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # which root cannot have
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def clean_page(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A page at ``url`` that asks nobody else, and reports no error but refused requests.

    Raises:
        AssertionError: at the end, if it did.
    """
    wrong: list[str] = []
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if _is_wrong(said.type, said.text) else None)
    origin = url.split("/", 3)[:3]
    page.on("request", lambda asked: None if asked.url.split("/", 3)[:3] == origin else wrong.append(asked.url))
    try:
        page.goto(url)
        yield page
        assert not wrong
    finally:
        context.close()


def _is_wrong(kind: str, text: str) -> bool:
    return kind in ("error", "warning") and "Failed to load resource: the server responded with a status" not in text
