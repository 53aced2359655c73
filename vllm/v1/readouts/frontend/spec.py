# SPDX-License-Identifier: Apache-2.0
"""Parses the entries of a request's `readouts`, one function per kind."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.frontend.attention import parse_attention, parse_attribution
from vllm.v1.readouts.frontend.entry import Server, Spec
from vllm.v1.readouts.modules import ACTIVATIONS, MAX_VECTORS
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import is_float32
from vllm.v1.residual.readout_plan import (
    NEVER_AFTER,
    Kind,
    Probe,
    Readout,
    Reduce,
    RowPart,
)
from vllm.v1.residual.row_selection import CaptureContext
from vllm.v1.residual.tap import AFTER, Tap, parse_address

KINDS: tuple[str, ...] = get_args(Kind)
REDUCES: tuple[str, ...] = get_args(Reduce)
ENTRY_POINTS = "vllm.readouts"


def parse_readout(name: str, spec: Any, ctx: CaptureContext, server: Server) -> Readout:
    """Parse one entry of `readouts`.

    Args:
        name: the entry's name, under which its results are returned.
        spec: the entry as the user wrote it, as plain data.
        ctx: the request's prompt length and the model's dimensions.
        server: modules and limits of this server.

    Raises:
        ReadoutValidationError: the entry is invalid.

    """
    where = f"readouts.{name}"
    if not isinstance(spec, dict):
        raise fail(
            f'{where} must be an object, such as {{"kind": "lens"}}', where, spec
        )
    if (given := spec.get("kind")) not in KINDS:
        raise fail(
            f"{where}.kind must be one of {list(KINDS)}, not {given!r}",
            f"{where}.kind",
            given,
        )
    keys, parse = _PARSERS[spec["kind"]]
    reads_rows = spec["kind"] not in NEVER_AFTER
    allowed = {"kind", "positions", *keys, *([AFTER] if reads_rows else ())}
    if unknown := sorted(str(key) for key in spec if key not in allowed):
        raise fail(
            f"{where}: a readout of kind {spec['kind']!r} has no key {unknown[0]!r}; "
            f"its keys are {sorted(allowed)}",
            f"{where}.{unknown[0]}",
            spec.get(unknown[0]),
        )
    entry = Spec(name, spec, ctx, server)
    readout = parse(entry)
    if (info := server.modules.get(readout.module)) is not None:
        readout = replace(readout, fingerprint=info.fingerprint)
    return replace(readout, after=entry.after(readout)) if AFTER in spec else readout


def _rows(spec: Spec) -> Readout:
    reduce = spec.raw.get("reduce", "none")
    if reduce not in REDUCES:
        raise spec.fail("reduce", f"must be one of {list(REDUCES)}")
    taps, ranges = spec.hooks(), spec.ranges()
    part = spec.part(taps)
    return Readout(spec.name, "rows", taps, ranges, reduce=reduce, part=part)


def _norm(spec: Spec) -> Readout:
    taps, ranges, points = spec.hooks(), spec.ranges(), spec.ctx.hook_points
    part = spec.part(taps)
    alone = tuple(
        (layer, hook)
        for layer, hook in taps
        if hook not in points.get(layer - 1, ())
        or spec.shape((layer - 1, hook)) != spec.shape((layer, hook))
    )
    readout = Readout(spec.name, "norm", taps, ranges, part=part, alone=alone)
    _check_stages(spec, readout)
    return readout


def _check_stages(spec: Spec, readout: Readout) -> None:
    """Refuse parts of rows that pipeline stages would have to send."""
    layers = {layer for layer, _ in readout.staged}
    if readout.part and spec.ctx.pipeline_parallel_size > 1 and len(layers) > 1:
        raise spec.fail(
            "hooks",
            "stages of the pipeline send each other whole rows as wide as the stream "
            f"only, and this reads the layers {sorted(layers)} together; capture the "
            "rows, or give a readout of one layer",
        )


def _probe(spec: Spec) -> Readout:
    given = spec.raw.get("probe")
    own: Probe | None = None
    module, info = "", None
    if given is not None:
        _check_no_other(spec, given)
    written = spec.raw if given is None else given
    if not isinstance(given, str) and not (
        isinstance(written, dict) and "vectors" in written
    ):
        raise spec.fail("probe", "must be a name, or an object with vectors [k, H]")
    if isinstance(given, str):
        info = spec.module("probe", "probe", "--readout-modules")
        module = info.name
    taps = (_place(spec, info.tap if info else None),)
    part = spec.part(taps)
    if info is not None:
        _check_width(spec, "probe", info.width, part)
    else:
        own = _own_probe(spec, written, part)
    return Readout(
        spec.name, "probe", taps, spec.ranges(), module, probe=own, part=part
    )


def _check_no_other(spec: Spec, given: Any) -> None:
    """Refuse a probe's keys beside `probe`, which has them itself."""
    for key in _OWN_PROBE:
        if key in spec.raw:
            name = f"the probe {shown(given)}" if isinstance(given, str) else "probe"
            raise spec.fail(
                key,
                f"{name} has its own; leave out {key}, or give vectors and no probe",
            )


def _place(spec: Spec, default: Tap | None) -> Tap:
    """The tap that `layer` and `hook` name; by default the module's own."""
    if default is not None and not spec.raw.keys() & {"layer", "hook"}:
        return default  # It was checked when the module was registered.
    hook = spec.raw.get("hook", default[1] if default else "post_block")
    is_address = isinstance(hook, str) and parse_address(hook) is not None
    if default is None and "layer" not in spec.raw and not is_address:
        raise spec.fail("layer", "is needed: the layer whose rows are read, from 0")
    layer = spec.raw.get("layer", default[0] if default else None)
    taps = spec.taps([layer], hook)
    if len(taps) > 1:
        raise spec.fail(
            "layer",
            f"must name one layer, and this names {len(taps)}; give a readout for each",
        )
    return taps[0]


def _check_width(spec: Spec, key: str, width: int, part: RowPart | None = None) -> None:
    wide = spec.ctx.hidden_size if part is None else part.read
    if width != wide:
        raise spec.fail(
            key, f"it is for rows of width {width}, and what is read here has {wide}"
        )


def _own_probe(spec: Spec, given: Any, part: RowPart | None) -> Probe:
    if given is not spec.raw and (unknown := given.keys() - {*_OWN_PROBE}):
        raise spec.fail("probe", f"has no keys {sorted(unknown)}; {sorted(_OWN_PROBE)}")
    wide = spec.ctx.hidden_size if part is None else part.read
    vectors = _matrix(spec, given["vectors"], wide)
    k = len(vectors)
    activation = given.get("activation", "none")
    if activation not in ACTIVATIONS:
        raise spec.fail("activation", f"must be one of {list(ACTIVATIONS)}")
    threshold = given.get("threshold")
    if (threshold is None) == (activation == "jumprelu"):
        raise spec.fail(
            "threshold", "is needed with the activation jumprelu, and only then"
        )
    cosine = given.get("cosine", False)
    if not isinstance(cosine, bool):
        raise spec.fail("cosine", "must be true or false")
    if cosine and not np.linalg.norm(vectors, axis=1).all():
        raise spec.fail("vectors", "a vector of zeros has no direction")
    return Probe(
        vectors.astype("<f4").tobytes(),
        _numbers(spec, "bias", given.get("bias", 0.0), k),
        activation,
        cosine,
        () if threshold is None else _numbers(spec, "threshold", threshold, k),
    )


def _matrix(spec: Spec, given: Any, wide: int) -> npt.NDArray[np.float32]:
    try:
        vectors = np.atleast_2d(spec.server.parse_array(given, spec.where("vectors")))
    except ValueError:  # Text, booleans, or lists of different lengths.
        vectors = np.zeros((0, 0), dtype=np.float32)
    if vectors.ndim != 2 or not 0 < len(vectors) <= MAX_VECTORS:
        raise spec.fail(
            "vectors", f"must be 1 to {MAX_VECTORS} lists of {wide} numbers each"
        )
    if vectors.shape[1] != wide:
        raise spec.fail(
            "vectors", f"must have the width {wide} of rows, not {vectors.shape[1]}"
        )
    if not np.isfinite(vectors).all():
        raise spec.fail("vectors", "contain NaN or infinity; remove them")
    return vectors


def _numbers(spec: Spec, key: str, given: Any, count: int) -> tuple[float, ...]:
    listed = given if isinstance(given, list) else [given]
    fits = not isinstance(given, list) or len(given) == count
    if not fits or not all(map(is_float32, listed)):
        raise spec.fail(
            key, f"must be a finite number of float32, or a list of {count}"
        )
    return tuple(map(float, listed)) * (count // len(listed))


def _lens(spec: Spec) -> Readout:
    if spec.server.refusals.lens:
        raise spec.fail("kind", spec.server.refusals.lens)
    hook = spec.raw.get("hook", "post_block")
    taps = spec.taps(spec.raw.get("layers", "all"), hook)
    if (part := spec.part(taps)) is not None:
        raise spec.fail(
            "hook",
            f"the unembedding reads rows as wide as the stream ({spec.ctx.hidden_size} "
            f"numbers), and those of {taps[0][1]} have {part.width}; read a point of "
            "the stream, or attn_out, attn_add, mlp_out, mlp_add",
        )
    tokens = spec.integers("tokens", spec.server.vocab_size, "token ids")
    top_k = spec.integer("top_k", 0 if tokens else 5, 0, spec.server.max_top_k)
    if not top_k and not tokens:
        raise spec.fail("top_k", "must be at least 1 where no tokens are named")
    module = ""
    if spec.raw.get("translator") is not None:
        info = spec.module("translator", "translator", "--readout-modules")
        _check_width(spec, "translator", info.width)
        if lacking := sorted({layer for layer, _ in taps} - set(info.layers)):
            raise spec.fail(
                "translator",
                f"{info.name!r} has no map for the layers {lacking}; it has "
                f"{list(info.layers)}. Leave them out of layers",
            )
        module = info.name
    return Readout(
        spec.name, "lens", taps, spec.ranges(), module, top_k=top_k, tokens=tokens
    )


def _sae(spec: Spec) -> Readout:
    info = spec.module("sae", "sae", "--sae")
    taps = (_place(spec, info.tap),)
    part = spec.part(taps)
    _check_width(spec, "sae", info.width, part)
    features = spec.integers("features", info.size, "features")
    most = min(spec.server.max_top_k, info.size)
    top_k = 0 if features else spec.integer("top_k", min(32, most), 1, most)
    if features and "top_k" in spec.raw:
        raise spec.fail("top_k", "give it or features, not both")
    return Readout(
        spec.name,
        "sae",
        taps,
        spec.ranges(),
        info.name,
        top_k=top_k,
        features=features,
        part=part,
    )


def custom_names() -> list[str]:
    """Names of the installed custom readouts (entry points `vllm.readouts`), sorted."""
    return sorted(ep.name for ep in importlib.metadata.entry_points(group=ENTRY_POINTS))


def _custom(spec: Spec) -> Readout:
    name, code = "", b""
    if "fn" in spec.raw:
        code = _code(spec)
    else:
        name = _entry_point(spec)
    given = spec.raw.get("params")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise spec.fail("params", "must be an object")
    try:
        params = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise spec.fail("params", f"must be JSON: {error}") from None
    taps, ranges = spec.hooks(), spec.ranges()
    part = spec.part(taps)
    readout = Readout(
        spec.name, "custom", taps, ranges, name, params=params, code=code, part=part
    )
    _check_stages(spec, readout)
    return readout


def _entry_point(spec: Spec) -> str:
    name, having = spec.raw.get("name"), custom_names()
    if name not in having:
        raise spec.fail(
            "name",
            f"no readout {name!r} is installed; there are {having}. Install a package "
            f"with an entry point {name!r} in the group {ENTRY_POINTS}",
        )
    return str(name)


def _code(spec: Spec) -> bytes:
    """A function that the caller of this process has given, pickled."""
    function = spec.raw["fn"]
    if "name" in spec.raw:
        raise spec.fail("fn", "give it or name, not both")
    if not callable(function):  # As everything that comes over HTTP.
        raise spec.fail(
            "fn",
            "must be a Python function, which only the process of the engine can "
            f"give; over HTTP name one of {custom_names()}",
        )
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(function)
    except Exception as error:  # Whatever the objects that it refers to raise.
        raise spec.fail(
            "fn",
            f"cannot be sent to the worker: {error}; it is pickled with all that it "
            "refers to, so leave out locks, files and engines",
        ) from None
    return pickled


def without_functions(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Specs as they may be sent to other processes: a function is its name."""
    return {
        name: {**spec, "fn": getattr(spec["fn"], "__name__", "fn")}
        if "fn" in spec
        else spec
        for name, spec in raw.items()
    }


def values_per_token(readout: Readout, modules: Mapping[str, ModuleInfo]) -> int | None:
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


_OWN_PROBE = ("vectors", "bias", "activation", "cosine", "threshold")

_PARSERS: dict[str, tuple[tuple[str, ...], Callable[[Spec], Readout]]] = {
    "rows": (("hooks", "heads", "reduce"), _rows),
    "probe": (("probe", "layer", "hook", "heads", *_OWN_PROBE), _probe),
    "lens": (("layers", "hook", "top_k", "tokens", "translator"), _lens),
    "sae": (("sae", "layer", "hook", "heads", "top_k", "features"), _sae),
    "norm": (("hooks", "heads"), _norm),
    "attention": (("layers", "heads", "top_k", "keys", "full"), parse_attention),
    "attribution": (("layers", "heads", "tokens"), parse_attribution),
    "custom": (("name", "fn", "hooks", "heads", "params"), _custom),
}
"""By kind: its keys besides `kind` and `positions`, and its parser."""
