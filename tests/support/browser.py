# SPDX-License-Identifier: Apache-2.0
"""The system's Chromium, headless; without it tests are skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def opened(width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """A tab of a new browser, with a list `errors` of what its scripts have raised."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # No sandbox: a browser that runs as root has none.
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": width, "height": 860}, color_scheme=scheme
        )
        tab.set_default_timeout(60_000)
        tab.errors = []
        tab.on("pageerror", lambda error: tab.errors.append(str(error)))
        yield tab
        browser.close()
