# SPDX-License-Identifier: Apache-2.0
"""What the scheduler calls of capture, readouts and steering.

A scheduler has one such object, `Scheduler.residual`, and calls it at fixed points of a
step. Capture comes before readouts, and both before steering, unless a method says why
not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.capture.core.scheduler import capture_scheduling, loadable_tokens
from vllm.v1.readouts.core.scheduler import ReadoutScheduling, take_parts
from vllm.v1.request import RequestStatus
from vllm.v1.residual.changed_streams import ChangedStreams
from vllm.v1.residual.core.block_keys import Weights, refresh
from vllm.v1.residual.core.messages import RequestResults
from vllm.v1.residual.nonfinite_streams import BlockIds, NonFiniteStreams
from vllm.v1.residual.receipts import Fired
from vllm.v1.steering.core.generated_blocks import note_step, share_rest
from vllm.v1.steering.core.prefix_cache import EngineSteering, continue_session
from vllm.v1.steering.core.scheduler import steering_scheduling, take_vectors_off
from vllm.v1.steering.receipts import note_receipt, take_receipt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class NoScheduling:
    """The null object, used if no stream can be read or changed, and base class.

    Belongs to the engine core's thread.
    """

    def add_request(self, request: "Request") -> None:
        """Register a request that was added to this engine."""
        refresh(request)

    def new_step(self, running: Sequence["Request"]) -> None:
        """Begin the scheduling of a step in which these requests run."""

    def limit(self, request: "Request", computed: int, num_tokens: int) -> int:
        """How many of `num_tokens` tokens, from position `computed` on, fit the step.

        The rest is scheduled in later steps.
        """
        return num_tokens

    def limit_alone(self, request: "Request", computed: int, num_tokens: int) -> int:
        """As `limit`, if the request was alone in a step."""
        return num_tokens

    def scheduled(self, request: "Request", computed: int, num_tokens: int) -> None:
        """Count tokens of a running request that are scheduled."""

    def may_load(self, request: "Request", local: int, external: int) -> bool:
        """Whether `external` tokens after the first `local` may come from a cache."""
        return True

    def admits(self, request: "Request") -> bool:
        """Whether a waiting request can begin in this step."""
        return True

    def begin(self, request: "Request", computed: int, num_tokens: int) -> None:
        """Begin a waiting request, whose tokens are scheduled from `computed` on."""

    def complete(self, output: "SchedulerOutput") -> None:
        """Add to a step what the workers need."""

    def note_step(self, output: "ModelRunnerOutput") -> None:
        """Take from a step's output what belongs to no single request."""

    def sampled(
        self,
        request: "Request",
        output: "ModelRunnerOutput",
        num_tokens: int,
        token_ids: list[int],
    ) -> list[int]:
        """Take a request's results of a step.

        Args:
            request: before the new tokens are appended to it.
            output: the step's output.
            num_tokens: the request's tokens in the step, without draft tokens.
            token_ids: the tokens that the step sampled for it.

        Returns:
            The tokens that remain.

        """
        return token_ids

    def dropped(self, request: "Request", output: "ModelRunnerOutput") -> None:
        """Take what a preempted request does not compute again of a dropped step."""

    def stops(self, request: "Request", stopped: bool) -> bool:
        """Whether the request ends after the tokens that remained.

        Args:
            request: with these tokens.
            stopped: whether it ends for another reason, which takes precedence.

        """
        return stopped

    def take_results(self, request: "Request") -> RequestResults | None:
        """Remove and return the results that the request's next output carries."""
        return None

    def take_fired(self) -> Fired:
        """How often conditions have fired since the last call, for the metrics."""
        return []

    def take_nonfinite(self) -> tuple[dict[str, BlockIds], dict[str, str]]:
        """Return and clear the requests that ended with an error in this step.

        Returns:
            Those that NaN has ended, with their blocks; and the others, with reasons.

        """
        return {}, {}

    def free(self, request: "Request") -> None:
        """Forget a finished or aborted request, before its blocks are freed."""

    def preempt(self, request: "Request") -> None:
        """Preempt a request, before its blocks are freed."""

    def reset_cache(self) -> None:
        """Note that the prefix cache was reset."""

    def continue_session(self, session: "Request") -> None:
        """Continue a session, before the blocks of the next part are hashed."""


NO_SCHEDULING = NoScheduling()


class Scheduling(NoScheduling):
    """The scheduler's parts of the features."""

    def __init__(self, scheduler: "Scheduler") -> None:
        """Start without requests; `scheduler` is complete but for this object."""
        config, blocks = scheduler.vllm_config, scheduler.kv_cache_config
        self.capture = capture_scheduling(config, scheduler.hash_block_size)
        self.readouts = ReadoutScheduling()
        self.steering = steering_scheduling(config)
        self.changed_streams = ChangedStreams(
            blocks.has_mamba_layers or blocks.has_mixed_precision_kv_cache
        )
        self.nonfinite_streams = NonFiniteStreams(
            self.changed_streams, scheduler.kv_cache_manager
        )
        self._blocks = scheduler.kv_cache_manager
        self._block_size = scheduler.hash_block_size
        self._fired: dict[str, str] = {}
        """By request, the stop reason of the readout that ends it in this step."""

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        self.capture.add_request(request)
        self.readouts.add_request(request)

    def new_step(self, running: Sequence["Request"]) -> None:
        self.capture.new_step()
        self.steering.new_step()
        if self.steering.tiers:
            self.changed_streams.begin_all(running)

    def limit(self, request: "Request", computed: int, num_tokens: int) -> int:
        if not self.capture.counts:
            return num_tokens
        return self.capture.limit(request, computed, num_tokens)

    def limit_alone(self, request: "Request", computed: int, num_tokens: int) -> int:
        return self.capture.limit_alone(request, computed, num_tokens)

    def scheduled(self, request: "Request", computed: int, num_tokens: int) -> None:
        if self.capture.store is not None:
            self.capture.store.scheduled(request.request_id, computed + num_tokens)
        if self.capture.counts:
            self.capture.scheduled(request, computed, num_tokens)

    def may_load(self, request: "Request", local: int, external: int) -> bool:
        return loadable_tokens(request, local, external) == external

    def admits(self, request: "Request") -> bool:
        return self.steering.admits(request)

    def begin(self, request: "Request", computed: int, num_tokens: int) -> None:
        self.capture.begin(request, computed)
        self.scheduled(request, computed, num_tokens)
        self.steering.begin(request)
        self.changed_streams.begin(request, self.steering.changes_all)

    def complete(self, output: "SchedulerOutput") -> None:
        take_vectors_off(output.scheduled_new_reqs)
        if not self.changed_streams.clears:
            output.new_block_ids_to_zero = None
        output.residual = (
            self.capture.take_step(),
            self.steering.take_step(),
            self.changed_streams.any_running,
        )

    def note_step(self, output: "ModelRunnerOutput") -> None:
        self.steering.note_fired(output.fired)
        self.steering.note_actions(output.actions)

    def sampled(
        self,
        request: "Request",
        output: "ModelRunnerOutput",
        num_tokens: int,
        token_ids: list[int],
    ) -> list[int]:
        request_id = request.request_id
        # Before a readout drops tokens: that at which it fires was steered.
        if output.receipts and request_id in output.receipts:
            receipt = output.receipts[request_id]
            note_receipt(request, receipt, num_tokens, token_ids)
        if output.readouts is not None and request_id in self.readouts:
            found = self.readouts.take(request, output.readouts, num_tokens, token_ids)
            token_ids = found.token_ids
            if found.fired:
                self._fired[request_id] = found.fired
        # Last: a token that was sampled from NaN must not reach the client.
        if self.nonfinite_streams.add(request, output):
            return []
        if EngineSteering.told:
            acting = output.acting.at(request_id) if output.acting else ""
            note_step(request, acting, num_tokens, len(token_ids), self._block_size)
        return token_ids

    def dropped(self, request: "Request", output: "ModelRunnerOutput") -> None:
        if output.readouts is not None and request.request_id in self.readouts:
            self.readouts.take_reduced(request, output.readouts)

    def stops(self, request: "Request", stopped: bool) -> bool:
        fired = self._fired.pop(request.request_id, None)
        if fired is not None and not stopped:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = fired
            stopped = True
        if self.nonfinite_streams.has(request):
            request.status = RequestStatus.FINISHED_ERROR
            request.resumable = False
            stopped = True
        return stopped

    def take_results(self, request: "Request") -> RequestResults | None:
        readouts, receipt = take_parts(request), take_receipt(request)
        if readouts is None and receipt is None:
            return None
        return RequestResults(readouts, receipt)

    def take_fired(self) -> Fired:
        return self.steering.take_fired()

    def take_nonfinite(self) -> tuple[dict[str, BlockIds], dict[str, str]]:
        return self.nonfinite_streams.take()

    def free(self, request: "Request") -> None:
        if request.status != RequestStatus.FINISHED_ERROR:
            share_rest(self._blocks, request)
        self.capture.free(request)
        self.readouts.forget(request)
        self.steering.release(request)
        self.changed_streams.end(request)

    def preempt(self, request: "Request") -> None:
        if self.capture.store is not None:
            self.capture.store.preempt(request.request_id)
        self.changed_streams.end(request)
        self.steering.preempted(request)

    def reset_cache(self) -> None:
        if self.capture.store is not None:
            self.capture.store.clear()

    def continue_session(self, session: "Request") -> None:
        continue_session(session)


def has_features(config: "VllmConfig") -> bool:
    """Whether an engine's requests can read or change the residual stream."""
    return bool(
        config.capture_config.enabled
        or config.steering_config.enabled
        or config.model_config.enable_prompt_embeds
    )


def open_scheduling(scheduler: "Scheduler") -> NoScheduling:
    """Create the object of a new scheduler, as the last step of its constructor."""
    Weights.begin()
    if has_features(scheduler.vllm_config):
        return Scheduling(scheduler)
    EngineSteering.begin()  # Another engine of this process may have been steered.
    return NO_SCHEDULING
