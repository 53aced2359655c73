# SPDX-License-Identifier: Apache-2.0
"""Runs a sweep with an `LLM`: all its cells are requests of one batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.patching.engine import Engine, engine_of, holding, params_of, reply_of
from vllm.patching.planning import Sweep, plan_of
from vllm.patching.questions import Ask
from vllm.patching.result import Found, PatchResult
from vllm.patching.study import Done, Study
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm import LLM

OnCell = Callable[[Found], Any]
AHEAD = 4
"""Requests in flight, as a multiple of the slots."""


def run(
    llm: "LLM", sweep: Sweep, progress: bool, on_cell: OnCell | None, keep: bool
) -> PatchResult:
    """Run a sweep.

    An interrupt from the keyboard ends it early: the result has the cells that are
    done, and NaN for the others.

    Args:
        llm: the engine, which must have no other requests.
        sweep: what is asked.
        progress: whether long sweeps show a bar.
        on_cell: called with each cell as its value is known.
        keep: whether the run that was captured for the sweep stays.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    engine = _engine(llm)
    plan = plan_of(sweep, engine)
    study = Study(plan)
    with holding(engine.capture, plan, keep):
        for asks in study.rounds():
            found = dict(_answers(llm, asks))
            for reply in found.values():
                if isinstance(reply, Exception):
                    raise reply
            study.replies = [found[n] for n in range(len(asks))]
        with progress_bar(len(study.asks), progress) as bar:
            try:
                for done in study.filled:
                    _tell(on_cell, study, done)
                for number, reply in _answers(llm, study.asks):
                    bar.update(1)
                    for done in study.take(number, reply):
                        _tell(on_cell, study, done)
            except KeyboardInterrupt:
                pass  # The cells that are missing stay NaN.
    return study.result


def _engine(llm: "LLM") -> Engine:
    """What a sweep needs of an `LLM`.

    Raises:
        SteeringValidationError: it does not steer, or has requests.

    """
    inner = llm.llm_engine
    if inner.has_unfinished_requests():
        raise fail(
            "patch_sweep: the LLM has requests that were enqueued; wait for them first",
            "llm",
            "unfinished requests",
        )
    return engine_of(inner.vllm_config, llm.get_tokenizer, inner.input_processor)


def _answers(llm: "LLM", asks: Sequence[Ask]) -> Iterator[tuple[int, Any]]:
    """Send all requests, and yield the replies, or errors, as they come.

    A few times as many as there are slots are in flight: the scheduler passes over all
    that wait in every step.
    """
    engine: Any = llm.llm_engine
    at_once = AHEAD * engine.vllm_config.steering_config.max_configs
    numbers: dict[str, tuple[int, str]] = {}
    """By the id of an output, the number of the request and the engine's id."""
    started = 0
    try:
        while numbers or started < len(asks):
            part = asks[started : started + at_once - len(numbers)]
            for number, own in enumerate(_enqueued(llm, part), started):
                if isinstance(own, Exception):
                    yield number, own
                    continue
                # An output has the first part of the engine's id.
                numbers[own.partition("-")[0]] = number, own
            started += len(part)
            if not numbers:
                continue
            outputs = [one for one in engine.step() if one.finished]
            engine.capture.wait(outputs)
            for output in outputs:
                number, _ = numbers.pop(output.request_id)
                yield number, reply_of(asks[number], output)
    finally:
        if numbers:
            own_ids = [own for _, own in numbers.values()]
            engine.abort_request(own_ids, internal=True)


def _enqueued(llm: "LLM", asks: Sequence[Ask]) -> list[Any]:
    """Send requests; returns the engine's ids, or why single ones are refused."""
    if not asks:
        return []
    prompts: Any = [{"prompt_token_ids": list(ask.token_ids)} for ask in asks]
    params = [params_of(ask) for ask in asks]
    try:
        return llm.enqueue(prompts, params, use_tqdm=False)
    except VLLMValidationError as error:  # None of them was sent.
        if len(asks) == 1:
            return [error]
        return [one for ask in asks for one in _enqueued(llm, [ask])]


def progress_bar(count: int, progress: bool) -> Any:
    """A bar that appears on sweeps of more than two seconds."""
    from tqdm import tqdm

    return tqdm(total=count, desc="Cells", unit="cell", delay=2, disable=not progress)


def _tell(on_cell: OnCell | None, study: Study, done: Done) -> None:
    if on_cell is not None:
        on_cell(study.result.at(done.cell.hook, done.cell.place))
