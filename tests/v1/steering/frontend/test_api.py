# SPDX-License-Identifier: Apache-2.0
"""The methods of engines pass on their arguments."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM

GIVEN = ({"post_block": {0: [1.0]}}, {"pre_attn": {1: [2.0]}}, None)
CLAMPS = {"post_block": {0: [{"vector": [1.0], "max": 1.0}]}}
BY_FIELD = {
    "vectors": GIVEN[0],
    "prefill_vectors": GIVEN[1],
    "decode_vectors": None,
    "clamps": CLAMPS,
}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("owner", "mock"), [(LLM, Mock), (AsyncLLM, AsyncMock)])
def test_an_engine_is_steered(owner: Any, mock: Any, replace: bool) -> None:
    control = mock()
    inner = SimpleNamespace(steering=control)
    engine = SimpleNamespace(steering=control, llm_engine=inner)

    def told(method: Any, *arguments: Any, **named: Any) -> Any:
        found = method(engine, *arguments, **named)
        return asyncio.run(found) if inspect.isawaitable(found) else found

    answer = told(owner.set_steering, *GIVEN, replace=replace, clamps=CLAMPS)
    assert answer is control.set.return_value
    control.set.assert_called_once_with(BY_FIELD, replace)
    assert told(owner.clear_steering) is control.clear.return_value
    assert told(owner.get_steering) is control.get.return_value
    with pytest.raises(TypeError):  # Replacing everything needs the keyword.
        owner.set_steering(engine, *GIVEN, True)
