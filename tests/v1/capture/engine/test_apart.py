# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.engines.apart import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = "tests/v1/capture/engine"


def test_drafts() -> None:
    # Apart, because upstream cannot start an engine after numba was imported.
    run_tests(f"{HERE}/apart/test_drafts.py")
