# SPDX-License-Identifier: Apache-2.0
"""Parses readouts of attention, and of what parts of a model add to logits.

What a worker could only fail at in a step is refused here: a layer whose keys cannot be
read, a head or a point that is not there.
"""

from vllm.v1.readouts.frontend.entry import Spec
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.readout_plan import ATTN_REST, REST, Readout
from vllm.v1.residual.tap import Tap

TOP_KEYS = 8


def parse_attention(spec: Spec) -> Readout:
    """The readout of an entry of kind `attention`."""
    _check_has_queries(spec)
    taps = spec.inner("q")
    for layer, _ in taps:
        if why := spec.server.refusals.attention.get(layer):
            raise spec.fail(
                "layers", f"patterns of layer {layer} are not computed: {why}"
            )
    full = spec.raw.get("full", False)
    if not isinstance(full, bool):
        raise spec.fail("full", "must be true or false")
    if full and len(taps) > 1:
        raise spec.fail(
            "layers",
            f"with full a readout has one layer, and this names {len(taps)}; give a "
            "readout for each, or top_k in place of full",
        )
    ctx = spec.ctx
    rows = ctx.num_prompt_tokens + max((ctx.max_tokens or 1) - 1, 0)
    keys = spec.integers("keys", rows, "positions")
    chosen = [key for key in ("top_k", "keys", "full") if spec.raw.get(key)]
    if len(chosen) > 1:
        raise spec.fail(chosen[1], f"give it or {chosen[0]}, not both")
    top_k = 0
    if not keys and not full:
        top_k = spec.integer("top_k", TOP_KEYS, 1, spec.server.max_top_k)
    return Readout(
        spec.name,
        "attention",
        taps,
        spec.ranges(),
        top_k=top_k,
        heads=_heads_of(spec, taps),
        keys=keys,
        full=full,
    )


def parse_attribution(spec: Spec) -> Readout:
    """The readout of an entry of kind `attribution`."""
    if why := spec.server.refusals.attribution:
        raise spec.fail("kind", f"attribution is not computed: {why}")
    tokens = spec.integers("tokens", spec.server.vocab_size, "token ids")
    if not tokens:
        raise spec.fail("tokens", "is needed: the token ids whose logits are explained")
    layers = [layer for layer, _ in spec.inner("post_block")]
    for layer in layers:
        lacking = {"pre_attn", "post_attn"} - {*spec.ctx.hook_points[layer]}
        if lacking:
            raise spec.fail(
                "layers", f"layer {layer} has no {min(lacking)}; leave it out"
            )
    heads = _components(spec, layers) if spec.raw.get("heads") is not None else ()
    of_heads = [f"head_{head}" for head in heads]
    of_attention = [*of_heads, ATTN_REST] if heads else ["attn_add"]
    added = ((n, name) for n in layers for name in (*of_attention, "mlp_add"))
    end = spec.ctx.num_hidden_layers - 1
    return Readout(
        spec.name,
        "attribution",
        ((0, "embed"), *added, (end, REST)),
        spec.ranges(),
        tokens=tokens,
        heads=heads,
    )


def _components(spec: Spec, layers: list[int]) -> tuple[int, ...]:
    """The heads that are components of an attribution, at all its layers."""
    refusals = spec.server.refusals
    if refusals.heads:
        raise spec.fail("heads", f"they are not components here: {refusals.heads}")
    taps = {point: spec.inner(point) for point in ("attn_add", "z")}
    having = {point: {layer for layer, _ in own} for point, own in taps.items()}
    for layer in layers:
        lacking = [point for point, own in having.items() if layer not in own]
        if lacking or layer not in refusals.projections:
            what = lacking[0] if lacking else "single output projection behind its z"
            raise spec.fail("layers", f"layer {layer} has no {what}; leave it out")
    heads = _heads_of(spec, taps["z"])
    if len(set(heads)) < len(heads):
        raise spec.fail("heads", "a head is named twice, whose part would count twice")
    return heads


def _check_has_queries(spec: Spec) -> None:
    """Say why an engine that was started with the point `q` has none."""
    ctx = spec.ctx
    having = any("q" in points for points in ctx.hook_points.values())
    if having or "q" not in spec.server.optional_points:
        return
    raise spec.fail(
        "kind",
        "patterns are not computed: this model has no layer with one attention whose "
        "keys are kept as such; those of MLA are latent",
    )


def _heads_of(spec: Spec, taps: tuple[Tap, ...]) -> tuple[int, ...]:
    """The heads that the key `heads` names, which all layers must have."""
    given = spec.raw.get("heads", "all")
    counts = {spec.shape(tap).heads for tap in taps}
    if given == "all" and len(counts) > 1:
        raise spec.fail(
            "heads",
            f"the layers have {sorted(counts)} heads; list the heads, or give a "
            "readout for layers of each kind",
        )
    count = min(counts)
    if given == "all":
        return tuple(range(count))
    if not isinstance(given, list) or not given or len(given) > count:
        raise spec.fail("heads", f'must be "all" or a list of heads, 0 to {count - 1}')
    for head in given:
        if not is_integer(head, 0, count):
            raise spec.fail("heads", f"heads are 0 to {count - 1}, not {head!r}")
    return tuple(map(int, given))
