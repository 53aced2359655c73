# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
from vllm.v1.residual.core.engine import CALLS, NO_CORE, CoreFeatures
from vllm.v1.steering.errors import SteeringValidationError


@pytest.mark.parametrize("core", [EngineCore, EngineCoreProc, DPEngineCoreProc])
def test_a_core_made_without_its_constructor_has_the_null_object(core: Any) -> None:
    made = core.__new__(core)
    assert made.residual is NO_CORE
    assert all(callable(getattr(made, call.__name__)) for call in CALLS)


def test_calls_have_distinct_names_and_replace_none_of_upstreams() -> None:
    names = [call.__name__ for call in CALLS]
    assert len(set(names)) == len(names)
    assert all(getattr(EngineCore, name) in CALLS for name in names)


def test_calls_of_another_fork_are_refused_with_all_features_off_too() -> None:
    core: Any = SimpleNamespace()
    NO_CORE.note_worker_call(core, "get_model")
    NO_CORE.note_worker_call(core, lambda worker: None)
    with pytest.raises(SteeringValidationError, match=r"LLM\.set_steering"):
        NO_CORE.note_worker_call(core, "set_steering_vectors")


def test_ends_of_captures_arrive_while_the_engine_stops() -> None:
    assert CoreFeatures().accepts_when_stopping("end_captures")
    assert not CoreFeatures().accepts_when_stopping("set_steering")


def test_a_core_that_stops_before_it_has_a_scheduler_has_nothing_to_send() -> None:
    CoreFeatures().close(SimpleNamespace())
