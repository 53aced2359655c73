# SPDX-License-Identifier: Apache-2.0
"""What a step's output carries besides upstream's results, errors among it.

Errors of steering in a step end the requests concerned and not the engine. Tokens that
were computed without a request's vectors must not reach its client, so the request
ends. The scheduler does so when it gets the step's output. Errors of capture, readouts
and hook functions are part of their results instead: the tokens are right.

Nothing here is for speed. Without it an error in one request's steering would end the
engine, and with it the requests of every client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.readouts.worker.pending import PendingReadouts
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.steering_actions import Acting, Action
from vllm.v1.steering.worker.doses import PendingDoses
from vllm.v1.steering.worker.fired import FiredCounts

logger = init_logger(__name__)

NOTES = "residual_notes"
"""Name of the intermediate tensor with the failed requests and the consumers' actions
of a step, pickled bytes `[n]` on the host."""


@dataclass(frozen=True, slots=True)
class Additions:
    """What a step's output carries besides upstream's results; each may be None."""

    readouts: PendingReadouts | None = None
    receipts: PendingDoses | None = None
    fired: FiredCounts | None = None
    actions: list[Action] | None = None
    failed: Mapping[str, str] | None = None
    """The requests that must end, with the reasons."""
    acting: Acting | None = None

    def __bool__(self) -> bool:
        return self != Additions()

    def put(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Wait for the copies to the host, and add the results to an output.

        An error in results of readouts becomes their error; without its receipt a
        request ends.
        """
        failed = dict(self.failed or {})
        if self.readouts is not None:
            try:
                output.readouts = self.readouts.collect()
            except Exception as error:
                logger.exception("The readouts of a step failed")
                output.readouts = self.readouts.failed(described(error))
        if self.receipts is not None:
            try:
                output.receipts = self.receipts.collect()
            except Exception as error:
                logger.exception("The receipts of a step failed")
                why = f"its receipt failed: {described(error)}"
                failed = {**dict.fromkeys(self.receipts.starts, why), **failed}
        if self.fired is not None:
            try:
                output.fired = self.fired.collect()
            except Exception:  # It is a metric.
                logger.exception("Fired conditions could not be counted")
        output.actions, output.acting = self.actions, self.acting
        output.failed = failed or None
        return output


class OutputWithAdditions(AsyncModelRunnerOutput):
    """Wraps a step's asynchronous output and adds further results to it."""

    def __init__(self, output: AsyncModelRunnerOutput, additions: Additions) -> None:
        self._output: Any = output
        self._additions = additions

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device and return the output with its additions."""
        return self._additions.put(self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """What upstream, from 0.33.0 on, keeps of a step whose output failed."""
        return self._output.get_kv_connector_output()


def attach(output: Any, additions: Additions) -> Any:
    """Add a step's further results to its output.

    Args:
        output: the return value of the runner's `sample_tokens`.
        additions: the results.

    """
    if output is None or not additions:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return OutputWithAdditions(output, additions)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        additions.put(output)
    return output
