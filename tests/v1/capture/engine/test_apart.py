# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = "tests/v1/capture/engine"


def test_drafts() -> None:
    # Separate, because upstream cannot start an engine after numba was imported.
    run_tests(f"{HERE}/apart/test_drafts.py")


@pytest.mark.multiprocess
def test_drafts_that_are_known_on_the_device_only() -> None:
    file = f"{HERE}/apart/test_drafts_ahead.py"
    run_tests("-p", "tests.support.interpreted", file, timeout=1200)


def test_the_v2_runner() -> None:
    # Under Triton's interpreter, which must be chosen before vllm is imported.
    files = [f"{HERE}/test_{name}.py" for name in ("rows_rule", "tight_memory")]
    run_tests("-p", "tests.support.interpreted", "-k", "async", *files)


@pytest.mark.soak
def test_the_v2_runners_cache_and_ends() -> None:
    files = [f"{HERE}/test_{name}.py" for name in ("prefix_cache", "ends")]
    run_tests("-p", "tests.support.interpreted", "-k", "async", *files)


def test_engine_core_in_another_process() -> None:
    run_tests(f"{HERE}/apart/test_other_process.py", VLLM_ENABLE_V1_MULTIPROCESSING="1")


def test_outputs_of_the_asynchronous_engine() -> None:
    run_tests(f"{HERE}/apart/test_async_outputs.py")
