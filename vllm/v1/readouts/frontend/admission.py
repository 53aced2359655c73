# SPDX-License-Identifier: Apache-2.0
"""Validates a request's readouts at admission and builds their plan."""

import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.frontend.spec import (
    ParseArray,
    Server,
    parse_readout,
    without_functions,
)
from vllm.v1.residual.bounds import counted
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import finite_number, is_integer
from vllm.v1.residual.plain_data import fault_of, plain
from vllm.v1.residual.readout_plan import Readout, ReadoutPlan, ReadoutReader, StopWhen
from vllm.v1.residual.row_selection import CaptureContext
from vllm.v1.residual.spans import overlap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

MAX_READOUTS = 64
MAX_NUMBERS = 1 << 22
"""Numbers in the results of a request, of all its samples: 80 MB as text."""
"""Readouts, and stop conditions, per request."""
MAX_NAME = 128
"""Characters of a readout's name."""
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
    """Builds a `ReadoutPlan` from a request's `readouts` and `stop_when`. Thread-safe.

    Starts with the modules of the server's configuration.
    """

    def __init__(self, vllm_config: "VllmConfig", parse_array: ParseArray) -> None:
        self._parse_array = parse_array
        config = vllm_config.readout_config
        self.enabled = config.enabled
        self._max_top_k = config.max_top_k
        self._lens_refusal = config.lens_refusal
        self._model_config = vllm_config.model_config
        self._lock = threading.Lock()
        self._modules = {
            name: ModuleInfo(**info) for name, info in config.described.items()
        }

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """A copy of the registered modules, sorted by name."""
        with self._lock:
            return dict(sorted(self._modules.items()))

    def put(self, info: ModuleInfo) -> None:
        """Add or replace a registered module."""
        with self._lock:
            self._modules[info.name] = info

    def remove(self, name: str) -> None:
        """Remove a module, if it is registered."""
        with self._lock:
            self._modules.pop(name, None)

    def plan(self, params: "SamplingParams", ctx: CaptureContext) -> ReadoutPlan | None:
        """The plan of a request's readouts; None if it has none.

        Args:
            params: `readouts` is replaced by its plain form (dicts and lists).
            ctx: the request's prompt length and the model's dimensions.

        Raises:
            ReadoutValidationError: `readouts` or `stop_when` is invalid.

        """
        if params.readouts is None and params.stop_when is None:
            return None
        if not self.enabled:
            refuse(params)
        for name in ("readouts", "stop_when"):
            _check_range(getattr(params, name), name)
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
        server = self._server()
        readouts = []
        for name, spec in raw.items():
            _check_name(name)
            readouts.append(parse_readout(name, spec, ctx, server))
        check_size(readouts, params.n or 1, ctx, server.modules)
        stops = parse_stops(params.stop_when, readouts, ctx, server.modules)
        params.readouts = without_functions(raw)
        if params.stop_when is not None:
            params.stop_when = _listed_stops(params.stop_when)
        return ReadoutPlan(tuple(readouts), stops)

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
        return _reader(consumer, raw, plan)

    def _server(self) -> Server:
        return Server(
            self.modules,
            self._model_config.get_vocab_size(),
            self._max_top_k,
            self._parse_array,
            lens_refusal=self._lens_refusal,
        )


def _reader(consumer: str, raw: Any, plan: ReadoutPlan | None) -> ReadoutReader:
    where = f"capture.{consumer}.readouts"
    having = {} if plan is None else {one.name: one for one in plan.readouts}
    names = list(having) if raw == "all" else raw
    if not isinstance(names, list) or not names:
        raise fail(
            f'{where} must be "all" or a list of names of readouts; the request has '
            f"{sorted(having)}. Add them under readouts",
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
                f"{where}: the name {name!r} becomes a part of keys and file names; "
                "use only letters, digits, '_', '-' and '.'",
                where,
                name,
            )
    return ReadoutReader(consumer, tuple(dict.fromkeys(names)))


def parse_stops(
    raw: Any,
    readouts: list[Readout],
    ctx: CaptureContext,
    modules: Mapping[str, ModuleInfo],
) -> tuple[StopWhen, ...]:
    """Parse `stop_when` and check it against the readouts that it refers to.

    Args:
        raw: one rule or a list of rules as the user wrote them, or None.
        readouts: the request's parsed readouts.
        ctx: the request's prompt length and the model's dimensions.
        modules: the registered modules, by name.

    Raises:
        ReadoutValidationError: a rule is invalid.

    """
    if raw is None:
        return ()
    stops = _listed_stops(raw)
    if not isinstance(stops, list) or not 0 < len(stops) <= MAX_READOUTS:
        raise fail(
            'stop_when must be a list such as [{"readout": "my_probe", "above": 0.9}]',
            "stop_when",
            raw,
        )
    by_name = {one.name: one for one in readouts}
    return tuple(_stop(one, by_name, ctx, modules) for one in stops)


def _listed_stops(raw: Any) -> Any:
    """The conditions as plain data; a single one becomes a list."""
    stops = plain(raw)
    return [stops] if isinstance(stops, dict) else stops


def _stop(
    raw: Any,
    readouts: Mapping[str, Readout],
    ctx: CaptureContext,
    modules: Mapping[str, ModuleInfo],
) -> StopWhen:
    known = {"readout", "index", "above", "below"}
    if not isinstance(raw, dict) or raw.keys() - known:
        raise fail(
            f"stop_when: the keys of an entry are {sorted(known)}", "stop_when", raw
        )
    readout = readouts.get(str(raw.get("readout")))
    if readout is None:
        raise fail(
            f"stop_when: the request has no readout {raw.get('readout')!r}; it has "
            f"{sorted(readouts)}. Add it under readouts",
            "stop_when.readout",
            raw.get("readout"),
        )
    bounds = [_bound(raw, key) for key in ("above", "below")]
    if bounds == [None, None]:
        raise fail(
            "stop_when: each entry must have above, below or both", "stop_when", raw
        )
    index = raw["index"] if "index" in raw else _only_index(readout)
    if not is_integer(index, 0):
        raise fail("stop_when.index must count from 0", "stop_when.index", index)
    _check_index(readout, index, modules)
    if all(stop <= ctx.num_prompt_tokens for _, stop in readout.ranges):
        raise fail(
            f"stop_when: {readout.name!r} reads no generated token, so it would never "
            'end the request; give it positions "all_generated"',
            "stop_when.readout",
            readout.name,
        )
    return StopWhen(readout.name, bounds[0], bounds[1], int(index))


def _only_index(readout: Readout) -> int:
    """The index of a rule that has none: the only feature, or the first value.

    Raises:
        ReadoutValidationError: the readout is of several features of an SAE.

    """
    if readout.kind != "sae":
        return 0
    if len(readout.features) != 1:
        raise fail(
            f"stop_when.index: name the feature of {readout.name!r} that is compared",
            "stop_when.index",
            None,
        )
    return readout.features[0]


def _bound(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    return None if value is None else finite_number(value, f"stop_when.{key}", fail)


def _check_index(
    readout: Readout, index: int, modules: Mapping[str, ModuleInfo]
) -> None:
    """Reject an index that is out of range, where the number of values is known."""
    if readout.kind == "rows" or (readout.kind == "lens" and not readout.tokens):
        raise fail(
            f"stop_when: {readout.name!r} of kind {readout.kind!r} has no values to "
            "compare; use a probe, an sae, a norm, or a lens with tokens",
            "stop_when.readout",
            readout.name,
        )
    if readout.features and index not in readout.features:
        raise fail(
            f"stop_when.index: {readout.name!r} reads the features "
            f"{list(readout.features)}; name one of them",
            "stop_when.index",
            index,
        )
    most = _values_of(readout, modules)
    if most is not None and index >= most:
        raise fail(
            f"stop_when.index: {readout.name!r} has "
            f"{counted(most, 'value')}, 0 to {most - 1}",
            "stop_when.index",
            index,
        )
    if readout.kind == "sae" and not readout.features:
        active = modules[readout.module].active if readout.module in modules else None
        if active is None or active > readout.top_k:
            raise fail(
                f"stop_when.index: the feature {index} of {readout.name!r} may be "
                f"active and not among its {readout.top_k} largest; give the readout "
                f'"features": [{index}] instead of top_k',
                "stop_when.index",
                index,
            )


def check_size(
    readouts: Sequence[Readout],
    num_samples: int,
    ctx: CaptureContext,
    modules: Mapping[str, ModuleInfo],
) -> None:
    """Refuse results that would take a server long to write.

    Raises:
        ReadoutValidationError: there are more than `MAX_NUMBERS` numbers.

    """
    stop = ctx.num_prompt_tokens + (ctx.max_tokens or 1)
    total = 0
    for one in readouts:
        tokens = sum(last - first for first, last in overlap(one.ranges, 0, stop))
        times = tokens if one.reduce == "none" else 1
        total += num_samples * times * _numbers_of(one, ctx, modules)
    if total > MAX_NUMBERS:
        raise fail(
            f"readouts: their results have up to {total} numbers ({stop} tokens); a "
            f"request may have {MAX_NUMBERS}: read fewer positions, layers or values, "
            "give a lower max_tokens or n, or capture rows",
            "readouts",
            total,
        )


def _numbers_of(
    readout: Readout, ctx: CaptureContext, modules: Mapping[str, ModuleInfo]
) -> int:
    """The numbers of a token's results."""
    taps = len(readout.taps)
    if readout.kind == "rows":
        return taps * ctx.hidden_size // 4  # They are sent as base64.
    if readout.kind == "lens":
        return taps * (2 * readout.top_k + len(readout.tokens))
    if readout.kind == "norm":
        return 2 * taps
    if readout.kind == "sae":
        return len(readout.features) or 2 * readout.top_k
    return _values_of(readout, modules) or 1


def _values_of(readout: Readout, modules: Mapping[str, ModuleInfo]) -> int | None:
    """The number of values per token; None for a custom readout."""
    if readout.kind in ("probe", "sae") and readout.module in modules:
        return modules[readout.module].size
    if readout.probe is not None:
        return len(readout.probe.bias)
    if readout.kind == "norm":
        return len(readout.taps)
    if readout.kind == "lens":
        return len(readout.taps) * len(readout.tokens)
    return None


def _check_range(raw: Any, name: str) -> None:
    """Reject what cannot be sent to the engine's process, such as huge integers."""
    if (fault := fault_of(raw)) is not None:
        raise fail(f"{name} {fault}", name, raw)


def _check_name(name: Any) -> None:
    good = isinstance(name, str) and name.isprintable() and name.strip() == name
    if not good or not 0 < len(name) <= MAX_NAME:
        raise fail(
            f"readouts: a name must be printable text of 1 to {MAX_NAME} characters, "
            "without blanks around it",
            "readouts",
            name,
        )
