# SPDX-License-Identifier: Apache-2.0
"""The results of a request in the output processor."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.readouts.frontend.collector import Collector, collector_for
from vllm.v1.readouts.frontend.collector import ended_by as ended_by
from vllm.v1.steering.receipts import Receipt, receipt_for

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.residual.core.messages import RequestResults


class NoResults:
    """The null object, `RequestState.residual` of most requests, and base class."""

    capture_id: str | None = None
    """Set if the request is captured."""
    hooks_key: str | None = None
    """Set if functions run for the request."""
    readouts: Collector | None = None
    """Set if the request has readouts."""
    receipt: Receipt | None = None
    """Set if the request asked for a receipt."""

    def collect(self, found: "RequestResults | None") -> None:
        """Add what came with an output of the engine core."""

    def complete(
        self, state: "RequestState", sample: "CompletionOutput", stop_reason: object
    ) -> None:
        """Attach the results to an output of a sample."""

    def name(self, output: Any) -> None:
        """Attach to an output by what its further results are found."""


NO_RESULTS = NoResults()


class Results(NoResults):
    """The results of one sample."""

    def __init__(
        self, readouts: Collector | None, receipt: Receipt | None, hooks_key: str | None
    ) -> None:
        self.readouts = readouts
        self.receipt = receipt
        self.hooks_key = hooks_key

    def collect(self, found: "RequestResults | None") -> None:
        if found is None:
            return
        if self.readouts is not None:
            for part in found.readouts or ():
                self.readouts.add(part)
        if self.receipt is not None and found.receipt:
            self.receipt.add(found.receipt)

    def complete(
        self, state: "RequestState", sample: "CompletionOutput", stop_reason: object
    ) -> None:
        assert state.detokenizer is not None, "a request with results generates text"
        num_tokens, finished = state.detokenizer.num_output_tokens(), sample.finished()
        fired = ended_by(stop_reason)
        if self.readouts is not None:
            is_delta = state.output_kind == RequestOutputKind.DELTA
            sample.readouts = self.readouts.results(
                num_tokens, is_delta, finished, fired
            )
        if self.receipt is not None and finished:
            # The last token is not fed to the model, unless a readout fired at it.
            fed = num_tokens if fired else max(num_tokens - 1, 0)
            sample.steering = self.receipt.as_dict(state.prompt_len + fed)

    def name(self, output: Any) -> None:
        if isinstance(output, RequestOutput):
            output.capture_id, output.hooks_key = self.capture_id, self.hooks_key


def results_of(params: "SamplingParams | None", num_prompt: int) -> NoResults:
    """The object that collects the results of a request that is sent to the engine."""
    if params is None:
        return NO_RESULTS
    hooks_key = None if params._hooks is None else params._hooks.key
    receipt = receipt_for(params, num_prompt)
    if params._capture_plan is None and receipt is None and hooks_key is None:
        return NO_RESULTS
    steering = params._steering
    changed = frozenset() if steering is None else steering.taps
    return Results(collector_for(params, changed), receipt, hooks_key)


def named(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the method that makes the outputs of a request."""

    def make_named(state: "RequestState", *args: Any, **kwargs: Any) -> Any:
        output = make(state, *args, **kwargs)
        state.residual.name(output)
        return output

    return make_named
