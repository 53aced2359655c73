# SPDX-License-Identifier: Apache-2.0
"""The methods of engines pass on their arguments."""

import asyncio
from types import SimpleNamespace
from typing import Any

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


class Control:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def set(self, *arguments: Any) -> dict[str, Any]:
        self.calls.append(arguments)
        return {"said": "set"}

    def clear(self) -> dict[str, Any]:
        return {"said": "clear"}

    def get(self) -> dict[str, Any]:
        return {"said": "get"}


class AsyncControl(Control):
    async def set(self, *arguments: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().set(*arguments)

    async def clear(self) -> dict[str, Any]:  # type: ignore[override]
        return super().clear()

    async def get(self) -> dict[str, Any]:  # type: ignore[override]
        return super().get()


@pytest.mark.parametrize("replace", [False, True])
def test_an_offline_engine_is_steered(replace: bool) -> None:
    control: Any = Control()
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(steering=control))
    assert LLM.set_steering(llm, *GIVEN, replace=replace, clamps=CLAMPS) == {
        "said": "set"
    }
    assert LLM.clear_steering(llm) == {"said": "clear"}
    assert LLM.get_steering(llm) == {"said": "get"}
    assert control.calls == [(BY_FIELD, replace)]


@pytest.mark.parametrize("replace", [False, True])
def test_a_serving_engine_is_steered(replace: bool) -> None:
    control: Any = AsyncControl()
    engine: Any = SimpleNamespace(steering=control)

    async def use() -> list[dict[str, Any]]:
        return [
            await AsyncLLM.set_steering(engine, *GIVEN, replace=replace, clamps=CLAMPS),
            await AsyncLLM.clear_steering(engine),
            await AsyncLLM.get_steering(engine),
        ]

    said = [answer["said"] for answer in asyncio.run(use())]
    assert said == ["set", "clear", "get"]
    assert control.calls == [(BY_FIELD, replace)]


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_replacing_everything_needs_the_keyword(engine: Any) -> None:
    with pytest.raises(TypeError):
        engine.set_steering(SimpleNamespace(), *GIVEN, True)
