# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = "tests/v1/steering"
FILES = [f"{HERE}/test_engine.py", f"{HERE}/test_operations.py"]


def run_interpreted(which: str, *files: str) -> None:
    # With Triton's interpreter, which must be chosen before vllm is imported, and
    # without the compiler, which has no target there, although upstream's Cohere asks
    # for one.
    run_tests(
        "-p",
        "tests.support.interpreted",
        "-k",
        which,
        *files,
        timeout=1800,
        TORCHDYNAMO_DISABLE="1",
    )


@pytest.mark.soak
def test_the_v2_runner_with_every_model_and_test() -> None:
    run_interpreted("", *FILES)


@pytest.mark.soak
def test_the_v2_runners_prefix_cache() -> None:
    run_interpreted("prefix_cache", f"{HERE}/test_prefix_cache.py")


@pytest.mark.multiprocess
def test_speculation() -> None:
    # Separate, because upstream cannot start an engine after numba was imported.
    run_tests(f"{HERE}/apart/test_drafts.py")


@pytest.mark.multiprocess
def test_the_v2_runners_speculation() -> None:
    run_interpreted("speculation", f"{HERE}/apart/test_drafts.py")
