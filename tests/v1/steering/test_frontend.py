# SPDX-License-Identifier: Apache-2.0
"""What a front end makes of a change that the engine core did not make."""

import pytest

from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.steering.errors import (
    SteeringChangeError,
    SteeringValidationError,
    as_refused,
    fail,
)

CHANGED = SteeringChangeError("no rank has changed its steering: no memory")
REFUSED = fail("vectors: too much. Use smaller ones", "vectors", 1e39)


def remote(error: Exception) -> Exception:
    """As it comes from another process."""
    return Exception(f"Call to set_steering method failed: {error}")


@pytest.mark.parametrize("over", [lambda error: error, remote])
def test_both_kinds_are_told_apart_from_any_process(over: object) -> None:
    assert callable(over)
    refused, changed = as_refused(over(REFUSED)), as_refused(over(CHANGED))
    assert isinstance(refused, SteeringValidationError)
    assert isinstance(refused, ValueError)
    assert refused.parameter == "vectors"
    assert str(refused).startswith("vectors: too much. Use smaller ones (parameter=")
    assert str(refused).count("parameter=") == 1
    assert isinstance(changed, SteeringChangeError)
    assert str(changed) == str(CHANGED)


@pytest.mark.parametrize("error", [EngineDeadError(), TimeoutError("no answer")])
def test_other_errors_are_what_they_are(error: Exception) -> None:
    assert as_refused(error) is error
