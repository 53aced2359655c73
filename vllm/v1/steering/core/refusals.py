# SPDX-License-Identifier: Apache-2.0
"""Requests that the engine core refuses, and how clients learn the reason.

A front end checks a request against the global vectors that it knows. They may have
changed by the time the request arrives, so the engine core checks again.
"""

from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.residual.nonfinite_streams import reason_of_error
from vllm.v1.steering.errors import SteeringValidationError

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import Request

WORKER_CALLS = {
    "set_steering_vectors": "LLM.set_steering or POST /v1/steering/set",
    "clear_steering_vectors": "LLM.clear_steering or POST /v1/steering/clear",
    "get_steering_status": "LLM.get_steering or GET /v1/steering",
    "register_steering_modules": "LLM(steering_modules=...) or "
    "POST /v1/steering/modules/register",
    "unregister_steering_modules": "POST /v1/steering/modules/unregister",
}
"""Methods of workers in an earlier public fork, and what to call instead."""

MARK = "steering is refused: "
"""Prefix of the `stop_reason` of a refused request; the message follows."""


def refuse(core: "EngineCoreProc", request: "Request", message: str) -> None:
    """Answer a request that was not scheduled.

    Args:
        core: the engine core.
        request: the request that has arrived.
        message: what is wrong, without the parameter's name.

    """
    answer = EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        stop_reason=MARK + message,
    )
    outputs = EngineCoreOutputs(
        outputs=[answer], finished_requests={request.request_id}
    )
    core.output_queue.put_nowait((request.client_index, outputs))


def refuse_worker_call(method: object) -> None:
    """Reject calls of workers' methods of an earlier public fork.

    They would change vectors of which the scheduler and the prefix cache do not know.

    Args:
        method: the argument of `collective_rpc`.

    Raises:
        SteeringValidationError: it is the name of such a method.

    """
    remedy = WORKER_CALLS.get(method) if isinstance(method, str) else None
    if remedy is not None:
        raise SteeringValidationError(
            f"collective_rpc({method!r}): workers have no such method, because the "
            f"scheduler and the prefix cache must know what steers; use {remedy}",
            parameter="method",
            value=method,
        )


def refusal_in(
    output: "RequestOutput", parameter: str
) -> SteeringValidationError | None:
    """The error of a request that the engine core has refused; None for other outputs.

    Args:
        output: the output of the request or of one of its samples.
        parameter: the request field that asked for steering, for the message.

    """
    mark, _, message = (reason_of_error(output) or "").partition(MARK)
    if mark or not message:
        return None
    return SteeringValidationError(f"{parameter}: {message}", parameter=parameter)
