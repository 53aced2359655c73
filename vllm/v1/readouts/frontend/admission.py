# SPDX-License-Identifier: Apache-2.0
"""Validates a request's readouts at admission and builds their plan."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.frontend.entry import ParseArray, Server
from vllm.v1.readouts.frontend.rules import (
    listed_rules,
    parse_keep_when,
    parse_stops,
)
from vllm.v1.readouts.frontend.spec import (
    parse_readout,
    values_per_token,
    without_functions,
)
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.residual.plain_data import MAX_NAME, fault_of, is_name, plain
from vllm.v1.residual.readout_plan import (
    Readout,
    ReadoutPlan,
    ReadoutReader,
    Refusals,
    StopWhen,
)
from vllm.v1.residual.row_selection import CaptureContext
from vllm.v1.residual.spans import overlap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

MAX_READOUTS = 64
"""Readouts, and stop conditions, per request."""
MAX_NUMBERS = 1 << 22
"""Numbers in the results of a request, of all its samples: 80 MB as text."""
NUMBER_BYTES, TOKEN_BYTES = 20, 40
"""What a number, as text, and a token's position take in the front end."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+")


def refuse(params: "SamplingParams") -> None:
    """Refuse a request that asks for readouts, where they are not enabled."""
    for name in ("readouts", "stop_when"):
        if getattr(params, name) is not None:
            raise fail(
                f"{name}: readouts are not enabled on this server; start it with "
                "--enable-readouts, or LLM(enable_readouts=True) offline",
                name,
                getattr(params, name),
            )


class ReadoutAdmission:
    """Builds `ReadoutPlan`s from requests' `readouts` and `stop_when`. Thread-safe."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        known: KnownModules,
        parse_array: ParseArray,
    ) -> None:
        config = vllm_config.readout_config
        self.enabled = config.enabled
        self._known = known
        self._server = Server(
            {},  # Those that are registered when a request comes.
            vllm_config.model_config.get_vocab_size(),
            config.max_top_k,
            parse_array,
            Refusals(**config.refusals),
            vllm_config.capture_config.optional_points,
        )

    def plan(
        self,
        params: "SamplingParams",
        ctx: CaptureContext,
        keep_when: Mapping[str, Any],
    ) -> ReadoutPlan | None:
        """The plan of a request's readouts; None if it has none.

        Args:
            params: `readouts` is replaced by its plain form (dicts and lists).
            ctx: the request's prompt length and the model's dimensions.
            keep_when: by consumer, on which readout it depends that rows are kept.

        Raises:
            ReadoutValidationError: `readouts`, `stop_when` or `keep_when` is invalid.

        """
        if params.readouts is None and keep_when:
            raise fail(
                "keep_when compares a readout, and this request has none; send it in "
                "readouts",
                f"capture.{min(keep_when)}.keep_when",
                keep_when[min(keep_when)],
            )
        if params.readouts is None and params.stop_when is None:
            return None
        if not self.enabled:
            refuse(params)
        for name in ("readouts", "stop_when"):  # They are sent to other processes.
            if (fault := fault_of(given := getattr(params, name))) is not None:
                raise fail(f"{name} {fault}", name, given)
        if params.readouts is None:
            raise fail(
                "stop_when compares readouts, and this request has none; send them in "
                "readouts",
                "stop_when",
                params.stop_when,
            )
        raw = plain(params.readouts)
        if not isinstance(raw, dict) or not 0 < len(raw) <= MAX_READOUTS:
            raise fail(
                f"readouts must map 1 to {MAX_READOUTS} names to specs, for example "
                '{"norms": {"kind": "norm", "hooks": {"post_block": "all"}}}',
                "readouts",
                raw,
            )
        server = replace(self._server, modules=self._known.all)
        readouts = []
        for name, spec in raw.items():
            if not is_name(name):
                raise fail(
                    f"readouts: a name must be printable text of 1 to {MAX_NAME} "
                    "characters, without blanks around it",
                    "readouts",
                    name,
                )
            readouts.append(parse_readout(name, spec, ctx, server))
        size = check_size(readouts, params.n or 1, ctx, server.modules)
        stops: tuple[StopWhen, ...] = ()
        if params.stop_when is not None:
            params.stop_when = listed_rules(params.stop_when)
            stops = parse_stops(params.stop_when, readouts, ctx, server.modules)
        params.readouts = without_functions(raw)
        by_name = {one.name: one for one in readouts}
        keeps = [
            parse_keep_when(instance, raw, by_name, server.modules)
            for instance, raw in sorted(keep_when.items())
        ]
        return ReadoutPlan(
            tuple(readouts), stops, keep_when=tuple(keeps), result_bytes=size
        )

    def reader(
        self, consumer: str, raw: Any, plan: ReadoutPlan | None
    ) -> ReadoutReader:
        """What a consumer takes of a request's readouts.

        Args:
            consumer: the instance's name.
            raw: `readouts` of its spec: a list of names, or `"all"`.
            plan: the request's readouts; None if it has none.

        Raises:
            ReadoutValidationError: a name is unknown, or cannot be part of a file name.

        """
        where = f"capture.{consumer}.readouts"
        having = {} if plan is None else {one.name: one for one in plan.readouts}
        names = list(having) if raw == "all" else raw
        if not isinstance(names, list) or not names:
            raise fail(
                f'{where} must be "all" or a list of names of readouts; the request '
                f"has {sorted(having)}. Add them under readouts",
                where,
                raw,
            )
        for name in names:
            if not isinstance(name, str) or name not in having:
                raise fail(
                    f"{where}: the request has no readout {name!r}; it has "
                    f"{sorted(having)}. Add it under readouts",
                    where,
                    name,
                )
            if not _PLAIN_NAME.fullmatch(name):
                raise fail(
                    f"{where}: the name {name!r} becomes a part of keys and file "
                    "names; use only letters, digits, '_', '-' and '.'",
                    where,
                    name,
                )
        return ReadoutReader(consumer, tuple(dict.fromkeys(names)))


def check_size(
    readouts: Sequence[Readout],
    num_samples: int,
    ctx: CaptureContext,
    modules: Mapping[str, ModuleInfo],
) -> int:
    """Refuse results that would take a server long to write.

    Returns:
        The most bytes that they take in the front end.

    Raises:
        ReadoutValidationError: there are more than `MAX_NUMBERS` numbers.

    """
    stop = ctx.num_prompt_tokens + (ctx.max_tokens or 1)
    total, size = 0, 0
    for one in readouts:
        tokens = sum(last - first for first, last in overlap(one.ranges, 0, stop))
        times = tokens if one.reduce == "none" else 1
        total += num_samples * times * _numbers_of(one, ctx, modules)
        size += num_samples * tokens * TOKEN_BYTES
    size += total * NUMBER_BYTES
    if total > MAX_NUMBERS:
        raise fail(
            f"readouts: their results have up to {total} numbers ({stop} tokens); a "
            f"request may have {MAX_NUMBERS}: read fewer positions, layers, heads or "
            "values, give a lower max_tokens or n, or capture rows",
            "readouts",
            total,
        )
    return size


def _numbers_of(
    readout: Readout, ctx: CaptureContext, modules: Mapping[str, ModuleInfo]
) -> int:
    """The largest number of a token's results."""
    context = ctx.num_prompt_tokens + (ctx.max_tokens or 1) - 1
    taps = len(readout.taps)
    if readout.kind == "rows":
        width = ctx.hidden_size if readout.part is None else readout.part.read
        return taps * width // 4  # They are sent as base64.
    if readout.kind == "lens":
        return taps * (2 * readout.top_k + len(readout.tokens))
    if readout.kind == "norm":
        return 2 * taps
    if readout.kind == "attribution":
        return taps * len(readout.tokens)
    if readout.kind == "attention":
        keys = context if readout.full else len(readout.keys) or 2 * readout.top_k
        return taps * len(readout.heads) * keys
    if readout.kind == "sae":
        return len(readout.features) or 2 * readout.top_k
    return values_per_token(readout, modules) or 1
