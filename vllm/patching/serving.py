# SPDX-License-Identifier: Apache-2.0
"""Runs a sweep with a serving engine, beside other requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.exceptions import VLLMValidationError
from vllm.patching.engine import engine_of, holding, params_of, reply_of
from vllm.patching.planning import Sweep, plan_of
from vllm.patching.questions import Ask, Reply
from vllm.patching.study import Done, Study
from vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@asynccontextmanager
async def opened(engine: "AsyncLLM", sweep: Sweep, keep: bool) -> AsyncIterator[Study]:
    """Plan a sweep, and run what comes before its grid.

    Args:
        engine: the serving engine.
        sweep: what is asked.
        keep: whether the run that is captured for the sweep stays.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    processor = engine.input_processor
    found = engine_of(engine.vllm_config, engine.get_tokenizer, processor)
    plan = await asyncio.to_thread(plan_of, sweep, found)
    study = Study(plan)
    with holding(found.capture, plan, keep):
        for asks in study.rounds():
            replies = (_answer(engine, ask) for ask in asks)
            study.replies = await asyncio.gather(*replies)
        yield study


async def cells(engine: "AsyncLLM", study: Study) -> AsyncGenerator[Done, None]:
    """Run the grid; yields each cell once its value is known.

    So many requests are in flight that no slot of steering is empty, and not more, as
    other steered requests wait behind them. They end if the iteration does.
    """
    at_once = 2 * engine.vllm_config.steering_config.max_configs
    tasks: dict[asyncio.Task[Reply], int] = {}
    started = 0
    try:
        for done in study.filled:
            yield done
        while tasks or started < len(study.asks):
            while started < len(study.asks) and len(tasks) < at_once:
                task = asyncio.create_task(_answer(engine, study.asks[started]))
                tasks[task] = started
                started += 1
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                for done in study.take(tasks.pop(task), _reply_of(task)):
                    yield done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reply_of(task: "asyncio.Task[Reply]") -> Reply | Exception:
    """A request's reply, or why it alone has none."""
    error = task.exception()
    if isinstance(error, (VLLMValidationError, RuntimeError)):
        return error
    return task.result()


async def _answer(engine: "AsyncLLM", ask: Ask) -> Reply:
    params = params_of(ask)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    prompt: Any = {"prompt_token_ids": list(ask.token_ids)}
    outputs = engine.generate(prompt, params, f"patch-{uuid4().hex}")
    last = [output async for output in outputs][-1]
    return reply_of(ask, last)
