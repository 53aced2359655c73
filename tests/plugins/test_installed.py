# SPDX-License-Identifier: Apache-2.0
"""Packages with consumers: installed and tested."""

from pathlib import Path

import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_packages_work_where_they_are_installed(installed: Path) -> None:
    names = [path.name for path in installed.glob("*.dist-info")]
    assert len(names) == 4, names
    run_tests("examples/capture_consumers", PYTHONPATH=str(installed))
