# SPDX-License-Identifier: Apache-2.0
"""Admission: validates what a request asks to capture and resolves it to a plan.

After admission nothing fails because of user input.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from vllm.v1.capture.capabilities import capabilities_of
from vllm.v1.capture.errors import (
    CaptureValidationError,
    UnknownCaptureConsumerError,
    check_fields,
    check_form,
    fail,
)
from vllm.v1.capture.frontend.step_consumers import StepSpecs
from vllm.v1.capture.selectors import check_size, check_text, within_reach
from vllm.v1.capture.types import CaptureContext, CaptureSpec, contexts_of
from vllm.v1.residual.bounds import cut, listed, shown
from vllm.v1.residual.capture_plan import (
    LIVE,
    READOUTS,
    CapturePlan,
    group_taps,
    scheduling_lag,
)
from vllm.v1.residual.plain_data import fault_of, plain
from vllm.v1.residual.plugin_errors import message_of
from vllm.v1.residual.readout_plan import ReadoutPlan, ReadoutReader
from vllm.v1.residual.row_selection import parse_after, parse_taps
from vllm.v1.residual.selectors import resolve_positions
from vllm.v1.residual.sizes import row_bytes
from vllm.v1.residual.spans import Spans, merged
from vllm.v1.residual.tap import AFTER, Tap, behind, other_widths, shape_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

_KEYS_OF_SPECS = ("hooks", "positions", "layers", "tag", "request_id", "layout")


class ReadoutPlanner(Protocol):
    """Plans the readouts of requests, whose rows are staged as captured ones are."""

    def plan(
        self,
        params: "SamplingParams",
        ctx: CaptureContext,
        keep_when: Mapping[str, Any],
    ) -> ReadoutPlan | None:
        """The plan of a request's readouts; None if it has none."""

    def reader(
        self, consumer: str, raw: Any, plan: ReadoutPlan | None
    ) -> ReadoutReader:
        """What a consumer takes of them, as its spec says in `readouts`."""


class Admission:
    """Turns the specs of requests and consumers into plans."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        consumers: Mapping[str, Any],
        readouts: ReadoutPlanner,
    ) -> None:
        """Read and check the global specs.

        Args:
            vllm_config: the engine's configuration, with the loaded model's hook
                points.
            consumers: an instance of each consumer, by instance name.
            readouts: plans the requests' readouts.

        Raises:
            CaptureValidationError: a global spec is invalid for this model.

        """
        self.consumers = dict(consumers)
        self.capabilities = capabilities_of(consumers)
        self._vllm_config = vllm_config
        self._hook_points = vllm_config.capture_config.hook_points or {}
        self.context = contexts_of(vllm_config)
        """The facts about a request that consumers validate its spec with."""
        self._rows_per_step = vllm_config.capture_config.rows_per_step(
            row_bytes(vllm_config.model_config)
        )
        self._lag = scheduling_lag(vllm_config)
        self._global_specs = self._read_global_specs()
        self.readouts = readouts
        self._steps = StepSpecs(vllm_config)
        self._steps.check(self.context("start-up", 1))

    @property
    def captures_everything(self) -> list[str]:
        """Names of the instances that capture every request, sorted."""
        return sorted(self._global_specs)

    def _read_global_specs(self) -> dict[str, CaptureSpec]:
        specs = {}
        for name, can in self.capabilities.items():
            spec = can.global_spec() if can.global_spec is not None else None
            if spec is not None:
                # Layers and hooks do not depend on the request, so mistakes in them
                # are found at start-up.
                taps = self._taps(spec, self.context("start-up", 1), name)
                self._check_taps(len(taps))
                specs[name] = spec
        return specs

    def plan(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        reply_to: str,
        streaming: Collection[str] = (),
    ) -> CapturePlan | None:
        """Validate a request and resolve it to a plan.

        Replaces `params.capture` by its plain form, which can be serialized.

        Args:
            request_id: the client's id of the request.
            params: its sampling parameters.
            num_prompt_tokens: of the request.
            reply_to: ZMQ address at which the front end takes the results.
            streaming: instances whose rows also go to the front end after each step.

        Returns:
            The plan; None if nothing is captured.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        check_fields(params)
        asks = params.capture, params.readouts, params.stop_when
        if not (self._global_specs or self._steps) and all(one is None for one in asks):
            return None
        ctx = self.context(
            request_id,
            num_prompt_tokens,
            max_tokens=params.max_tokens,
            num_samples=params.n,
        )
        keep_when: dict[str, Any] = {}
        after: dict[str, Any] = {}
        if params.capture is not None:
            params.capture = self._plain_capture(params.capture)
            keep_when = _taken("keep_when", params.capture)
            after = _taken(AFTER, params.capture)
            _check_streams(keep_when, streaming)
        specs = self._specs(params.capture or {}, ctx)
        wanted = {name: self._taps(spec, ctx, name) for name, spec in specs.items()}
        behind_taps = self._read_after(after, wanted, ctx)
        heads = {
            (name, tap): (
                spec.heads,
                shape_of(ctx.point_shapes, tap, ctx.hidden_size).head_size,
            )
            for name, spec in specs.items()
            if spec.heads
            for tap in wanted[name]
        }
        readouts = self.readouts.plan(params, ctx, keep_when)
        readers = self._readers(params.capture or {}, readouts)
        if self._steps:
            readouts = self._steps.added(readouts, ctx)
        if readouts is not None:
            readouts = replace(readouts, readers=readers)
            wanted[READOUTS] = readouts.staged
        if not wanted:
            return None
        live: dict[Tap, Spans] = {}
        streamed = wanted.keys() & set(streaming)
        if streamed & behind_taps:
            if mixed := sorted(streamed - behind_taps):
                raise fail(
                    f"capture.{mixed[0]}: streamed rows are all behind interventions, "
                    "or none is; give all consumers the same after, or set "
                    "capture_stream=False",
                    f"capture.{mixed[0]}.{AFTER}",
                    False,
                )
            behind_taps.add(LIVE)
        for name in streamed:
            for tap, ranges in wanted[name].items():
                live[tap] = merged((*ranges, *live.get(tap, ())))
        if live:
            wanted[LIVE] = live
        taps = {tap for of_reader in wanted.values() for tap in of_reader}
        plan = CapturePlan(
            client_request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            groups=group_taps(
                wanted,
                num_prompt_tokens,
                self._lag,
                other_widths(ctx.point_shapes, taps, ctx.hidden_size),
                behind_taps,
                heads,
            ),
            reply_to=reply_to,
            num_samples=params.n,
            readouts=readouts,
        )
        self._check_budget(plan)
        return plan

    def _readers(
        self, capture: Mapping[str, Any], plan: ReadoutPlan | None
    ) -> tuple[ReadoutReader, ...]:
        """The consumers that take results of readouts."""
        return tuple(
            self.readouts.reader(name, spec["readouts"], plan)
            for name, spec in sorted(capture.items())
            if self.capabilities[name].takes_readouts
            and isinstance(spec, dict)
            and spec.get("readouts") is not None
        )

    def describe(self) -> dict[str, Any]:
        """Consumers, limits and hook points, as JSON-like data."""
        config = self._vllm_config.capture_config
        return {
            "consumers": [
                {
                    "name": name,
                    "location": consumer.location,
                    "takes_requests": self.capabilities[name].takes_requests,
                    "captures_every_request": name in self._global_specs,
                }
                for name, consumer in sorted(self.consumers.items())
            ],
            "limits": {
                "rows_per_step": self._rows_per_step,
                "staging_bytes": config.staging_bytes,
                "host_memory_bytes": config.host_memory_bytes,
                "dispatch_queue_size": config.dispatch_queue_size,
                "dispatch_queue_bytes": config.dispatch_queue_bytes,
                "overload_policy": config.overload_policy,
                "spill_max_bytes": config.spill_max_bytes,
                "activation_store_bytes": config.store_bytes,
                "activation_store_disk_bytes": config.store_disk_bytes,
                "max_inflight_bytes": {
                    name: can.max_inflight_bytes
                    for name, can in self.capabilities.items()
                    if can.max_inflight_bytes is not None
                },
            },
            "hook_points": {
                str(layer): list(points)
                for layer, points in sorted(self._hook_points.items())
            },
            "other_widths": {
                f"{hook}.{layer}": width
                for layer, of_layer in sorted(config.point_shapes.items())
                for hook, (width, _) in sorted(of_layer.items())
                if width != self._vllm_config.model_config.get_hidden_size()
            },
            "staging": config.staging,
        }

    def _plain_capture(self, raw: Any) -> dict[str, Any]:
        check_size(raw, "capture")
        # What cannot be sent to the engine's process, such as huge integers.
        if (fault := fault_of(raw)) is not None:
            raise fail(f"capture {fault}", "capture", raw)
        capture = plain(raw)
        check_form(capture)
        check_text(capture, "capture")
        for name in capture:
            can = self.capabilities.get(name)
            if can is None:
                having = sorted(self.consumers)
                if name in _KEYS_OF_SPECS:
                    first = having[0] if having else "filesystem"
                    raise UnknownCaptureConsumerError(
                        f"capture: {name!r} is a key of one consumer's spec; give the "
                        f"consumer's name: {{{first!r}: {{{name!r}: ...}}}}; this "
                        f"server has {listed(having)}",
                        parameter=f"capture.{name}",
                        value=name,
                    )
                raise UnknownCaptureConsumerError(
                    f"capture: this server has no consumer {shown(name)}; it has "
                    f"{listed(having)}. Start it with --capture-consumers NAME to add "
                    "one",
                    parameter="capture",
                    value=name,
                )
            if not can.takes_requests:
                raise CaptureValidationError(
                    f"capture.{name}: this consumer accepts no requests; its "
                    "configuration determines what it captures. Leave it out",
                    parameter=f"capture.{name}",
                    value=capture[name],
                )
        return capture

    def _read_after(
        self,
        after: Mapping[str, Any],
        wanted: dict[str, dict[Tap, Spans]],
        ctx: CaptureContext,
    ) -> set[str]:
        """The instances that read behind interventions; `wanted` gets their taps."""
        enabled = AFTER in self._vllm_config.capture_config.optional_points
        found = set()
        for name, raw in after.items():
            where = f"capture.{name}.{AFTER}"

            def failing(message: str, _: str, value: Any, where: str = where) -> Any:
                return fail(f"{where}: {message}", where, value)

            if parse_after(raw, wanted[name], ctx, enabled, failing):
                found.add(name)
                last = ctx.num_hidden_layers - 1
                wanted[name] = {behind(t, last): r for t, r in wanted[name].items()}
        return found

    def _specs(
        self, capture: Mapping[str, Any], ctx: CaptureContext
    ) -> dict[str, CaptureSpec]:
        specs = {
            name: spec
            for name, one in self._global_specs.items()
            if name not in capture and (spec := within_reach(one, ctx)) is not None
        }
        for name, raw in capture.items():
            try:
                specs[name] = self.consumers[name].validate_client_spec(raw, ctx)
            except (CaptureValidationError, KeyboardInterrupt):
                raise
            except BaseException as error:
                # Whatever a plug-in raises refuses the request, even `SystemExit`.
                raise CaptureValidationError(
                    f"capture.{name}: {cut(message_of(error))}",
                    parameter=f"capture.{name}",
                    value=shown(raw),
                ) from error
        return specs

    def _taps(
        self, spec: CaptureSpec, ctx: CaptureContext, name: str
    ) -> dict[Tap, Spans]:
        """The taps of a spec with their positions; checks what a plug-in returned."""
        if not isinstance(spec, CaptureSpec):
            raise fail(
                f"capture.{name}: the consumer returned {type(spec).__name__}, not a "
                "CaptureSpec; this is an error in the consumer, not in the request",
                f"capture.{name}",
                spec,
            )
        hooks = plain(spec.hooks)
        if isinstance(hooks, dict):  # A plug-in may want nothing of a request.
            hooks = {hook: layers for hook, layers in hooks.items() if layers != []}
        where = f"capture.{name}"
        taps = parse_taps(hooks, ctx, f"{where}.hooks", fail) if hooks != {} else ()
        positions = plain(spec.positions)
        ranges = resolve_positions(positions, ctx, f"{where}.positions", fail)
        return dict.fromkeys(taps, ranges)

    def _check_taps(self, per_token: int) -> None:
        if per_token > self._rows_per_step:
            raise fail(
                f"capture: {per_token} hook points at one token exceed the "
                f"{self._rows_per_step} rows that one step may capture; capture "
                "fewer layers, or start the server with a larger "
                "--capture-staging-bytes",
                "capture",
                per_token,
            )

    def _check_budget(self, plan: CapturePlan) -> None:
        """Refuse a request whose rows can never fit one step."""
        self._check_taps(plan.num_taps)
        config = self._vllm_config.scheduler_config
        rows = plan.rows_in(0, plan.num_prompt_tokens)
        if not config.enable_chunked_prefill and rows > self._rows_per_step:
            raise fail(
                f"capture: without chunked prefill the {rows} rows of this prompt "
                f"must fit one step, which may capture {self._rows_per_step}; "
                "capture fewer positions, or start the server with a larger "
                "--capture-staging-bytes or with chunked prefill",
                "capture",
                rows,
            )


def _taken(key: str, capture: dict[str, Any]) -> dict[str, Any]:
    """Remove a key from the specs, which consumers do not read; its values, by name."""
    found = {}
    for name, spec in capture.items():
        if isinstance(spec, dict) and key in spec:
            capture[name] = {k: v for k, v in spec.items() if k != key}
            found[name] = spec[key]
    return found


def _check_streams(keep_when: Mapping[str, Any], streaming: Collection[str]) -> None:
    if streamed := sorted(keep_when.keys() & set(streaming)):
        raise fail(
            f"capture.{streamed[0]}.keep_when is decided at the request's end, so "
            "its rows cannot be streamed; set capture_stream=False",
            f"capture.{streamed[0]}.keep_when",
            keep_when[streamed[0]],
        )
