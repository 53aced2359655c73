# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: upstream's tests that download a model are skipped, with the reason.

Tests that are coroutines run in a loop of their own. The process that runs them has
`HF_HUB_OFFLINE=1`, and the fixtures of upstream's `conftest.py` are not loaded, because
it imports what is not installed here.
"""

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

import pytest

DOWNLOADS = (
    "offline mode is enabled",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "couldn't connect to 'https://",
    "is not a local folder and is not a valid model identifier",
    "is not cached locally",
    "Invalid repository ID or local directory specified",
)
"""What errors say if a model or tokenizer would have to be downloaded."""
FIXTURE = "fixture '"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine: upstream's plugin for them is not installed here."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**pyfuncitem.funcargs))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the failure of a test that needs a download into a skip."""
    report = yield
    text = str(report.longrepr) if report.failed else ""
    for said in (*DOWNLOADS, FIXTURE):
        if said in text and (said != FIXTURE or "not found" in text):
            reason = "needs a download" if said != FIXTURE else "needs a fixture"
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, reason)
            break
    return report
