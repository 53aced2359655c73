# SPDX-License-Identifier: Apache-2.0
"""Hook points inside the block: where they are in a loaded model, and their taps.

The stream's points are woven into each decoder layer. Those inside the block are at a
boundary of a module that upstream shares among architectures, so that a hook of
PyTorch's reaches them: attention's inputs and output, the router's logits, the second
projection of an MLP. A hook that is registered before the model is compiled is traced
as part of it; a point that is not enabled has none.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.encoder_only_attention import (
    EncoderOnlyAttention,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import (
    MoERunnerInterface,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.residual.tap import ResidualTap, num_streams
from vllm.model_executor.residual_weave.stream import HIDDEN_NAMES, Role, role_of
from vllm.v1.readouts.worker.head_parts import Projected, norms_of
from vllm.v1.residual.tap import (
    HOOK_NAMES,
    OPTIONAL_POINTS,
    STREAMS_POINTS,
    PointShape,
    Tap,
)


@dataclass(frozen=True, slots=True)
class InnerPoint:
    """A hook point at the boundary of a module."""

    module: nn.Module
    shape: PointShape
    argument: str | int | None
    """The argument of `forward` that is the row, by name or index among the tensors of
    the stream's width; None for what it returns."""
    ranks: int = 1
    """How many tensor-parallel ranks divide a row among them."""
    copies: int = 1
    """Of these ranks, how many consecutive ones have the same numbers."""
    router: BaseRouter | None = None
    """Of the router's choice: what makes it; `argument` is the index in what it
    returns."""
    scale: float = 1.0
    """Of the weights of experts: by what their sum is multiplied afterwards."""

    @property
    def width(self) -> int:
        """Numbers of a row that this rank has."""
        return self.shape.width * self.copies // self.ranks

    def attach(self, tap: ResidualTap) -> None:
        """Have the module's calls pass the tap."""
        if self.ranks > 1:
            tap.copies = self.copies
        if self.router is not None:
            assert isinstance(self.argument, int)
            self.router._compute_routing = _Routing(  # type: ignore[method-assign]
                tap, self.router._compute_routing, self.argument, self.scale
            )
            return
        if self.argument is None:
            self.module.register_forward_hook(_Leaving(tap, self.width))
            return
        names = list(inspect.signature(self.module.forward).parameters)
        hook = _Entering(tap, self.width, self.argument, names)
        self.module.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(eq=False)
class _Leaving:
    """A hook on what a module returns: a tensor, or a tuple that begins with it."""

    tap: ResidualTap
    width: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return _passed(self.tap, output[0], self.width), *output[1:]
        return _passed(self.tap, output, self.width)


@dataclass(eq=False)
class _Entering:
    """A hook on one argument of a module."""

    tap: ResidualTap
    width: int
    argument: str | int
    names: list[str]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self.names, args)) | kwargs
        name = self.argument
        if isinstance(name, int):
            name = [
                one
                for one, value in given.items()
                if isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.shape[-1] == self.width
            ][name]
        value = given.get(name)
        if value is None:
            return args, kwargs
        value = _passed(self.tap, value, self.width)
        if name in kwargs:
            return args, {**kwargs, name: value}
        place = self.names.index(name)
        return (*args[:place], value, *args[place + 1 :]), kwargs


@dataclass(eq=False)
class _Routing:
    """A router's function with a tap on the weights or the ids that it returns.

    Both have dtypes of their own. Rows are of the stream's, in which ids are exact; of
    weights only the change is taken over. `scale`: see `InnerPoint`; rows have it.
    """

    tap: ResidualTap
    compute: Callable[..., Any]
    index: int
    scale: float

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = list(self.compute(hidden_states, *args, **kwargs))
        values = chosen[self.index]
        scale = self.scale
        rows = (values * scale if scale != 1 else values).to(hidden_states.dtype)
        changed = self.tap(rows, None)[0]
        if values.is_floating_point():
            difference = (changed - rows).to(values.dtype)
            chosen[self.index] = values + difference / scale
        return tuple(chosen)


def _passed(tap: ResidualTap, value: torch.Tensor, width: int) -> torch.Tensor:
    """The value with which the model continues; heads may be an axis of their own."""
    rows = value if value.shape[-1] == width else value.flatten(-2)
    return tap(rows, None)[0].view(value.shape)


def find_inner_points(
    layers: Mapping[int, nn.Module],
    names: Collection[str],
    hidden_size: int,
    tensor_parallel: int,
    final_norm: nn.Module | None,
) -> dict[Tap, InnerPoint]:
    """The hook points inside the blocks that a model has, of those that are wanted.

    Args:
        layers: the decoder layers of this process, by index.
        names: the wanted points.
        hidden_size: width of the stream.
        tensor_parallel: number of ranks that compute a layer together.
        final_norm: the norm before the unembedding; None where it is not known, or in
            another process.

    """
    found: dict[Tap, InnerPoint] = {}
    for index, layer in layers.items():
        points = {
            **_of_attention(layer, hidden_size, tensor_parallel),
            **_of_mlp(layer),
        }
        found.update({(index, n): p for n, p in points.items() if n in names})
    users = Counter((id(point.module), name) for (_, name), point in found.items())
    # A hook is called in each layer that shares a module (Zamba 2).
    found = {
        tap: point
        for tap, point in found.items()
        if users[id(point.module), tap[1]] == 1
    }
    if "embed" in names and 0 in layers and not num_streams(layers[0]):
        entry = _parameter_of_stream(layers[0])
        if entry is not None:
            found[0, "embed"] = InnerPoint(layers[0], PointShape(hidden_size), entry)
    if "final_norm" in names and final_norm is not None and layers:
        shape = PointShape(hidden_size)
        found[max(layers), "final_norm"] = InnerPoint(final_norm, shape, None)
    return found


def projected_heads(
    points: Mapping[Tap, InnerPoint], layers: Mapping[int, nn.Module], hidden_size: int
) -> dict[int, Projected]:
    """The output projections behind the point `z`, of layers that have just one."""
    found: dict[int, Projected] = {}
    for (index, name), point in points.items():
        if name != "z":
            continue
        layer = layers[index]
        (core,) = [at for at, one in layer.named_modules() if one is point.module]
        behind = [
            one
            for one in _block_of(layer, core).modules()
            if isinstance(one, RowParallelLinear)
            and (one.input_size, one.output_size) == (point.shape.width, hidden_size)
        ]
        if len(behind) == 1:
            norms = norms_of(layer, hidden_size)
            shape = point.shape
            found[index] = Projected(behind[0], norms, shape.heads, shape.width)
    return found


def norms_with_logits(model: nn.Module) -> bool:
    """Whether the final norm is computed with the logits, of those tokens only."""
    functions = [getattr(type(one), "compute_logits", None) for one in model.modules()]
    return any("norm" in made.__code__.co_names for made in functions if made)


def why_missing(
    layers: Mapping[int, nn.Module], names: Collection[str], tensor_parallel: int
) -> dict[str, str]:
    """Why no layer has these points, as the end of a sentence, by name."""
    modules = [list(layer.modules()) for layer in layers.values()]
    cores = [
        [one for one in own if isinstance(one, (Attention, MLAAttention))]
        for own in modules
    ]
    routed = [one for own in modules for one in own if _is_routed(one)]
    if not any(cores):
        heads = "no layer has a module of softmax attention"
    elif all(len(own) != 1 for own in cores):
        heads = "no layer has exactly one attention module"
    elif any(isinstance(one, MLAAttention) for own in cores for one in own):
        heads = "queries, keys and values of MLA are latent; z is there"
    elif tensor_parallel > 1:
        heads = (
            "several projections give queries, keys and values, so that it is not "
            "known which tensor-parallel rank has which heads"
        )
    else:
        heads = "layers read the keys and values of others"
    reasons = dict.fromkeys(("attn_in", "q", "k", "v", "z", "attn_out"), heads)
    if cores and heads.startswith(("several", "layers")):
        reasons["attn_in"] = reasons["attn_out"] = (
            "attention's output is summed over ranks together with something else"
        )
    reasons["mlp_act"] = (
        "routed experts have it inside of one kernel, and beside them no layer has "
        "exactly one MLP of shared experts"
        if routed
        else "no layer has exactly one row-parallel projection outside of attention"
    )
    reasons |= dict.fromkeys(
        ("router_logits", "expert_ids", "expert_weights"), _why_no_router(routed)
    )
    reasons["final_norm"] = (
        "its final norm is not known, or is computed with the logits, of those tokens"
    )
    reasons["embed"] = "its first layer takes the stream under another name"
    of_streams = "its residual is one stream; pre_attn and post_block are there"
    reasons |= dict.fromkeys(STREAMS_POINTS, of_streams)
    woven = (
        "no place in its layers has that value alone; `python -m fork models` says why"
    )
    reasons |= {
        name: why
        for own in modules
        for one in own
        for name, why in _why_not_in(one, tensor_parallel).items()
    }
    if any(num_streams(layer) for layer in layers.values()):
        whole = (
            "its residual is several streams; streams_pre and streams_post are all of "
            "them as they enter and leave a block, `heads` some of them"
        )
        single = {*HOOK_NAMES} - {*STREAMS_POINTS, *OPTIONAL_POINTS}
        reasons |= dict.fromkeys((*single, "embed", "attn_add", "mlp_add"), whole)
    return {name: reasons.get(name, woven) for name in names}


def _why_not_in(module: nn.Module, tensor_parallel: int) -> dict[str, str]:
    """Why a woven layer lacks points that others of its class have."""
    parts: tuple[str, ...] = getattr(module, "hook_points_partial", ())
    summed = "each tensor-parallel rank has a part of the sum"
    return {
        **dict.fromkeys(parts if tensor_parallel > 1 else (), summed),
        **getattr(module, "hook_points_lacking", {}),
    }


def _why_no_router(routed: Sequence[Any]) -> str:
    """Why the choice of experts is not read, where it is not."""
    if not routed:
        return "it has no routed experts"
    if _spreads_tokens(routed[0].moe_config):
        return "tokens are spread over ranks before experts are chosen"
    if routed[0].is_monolithic:
        return "the kernel of the experts chooses them itself"
    return (
        "the layer of experts is given their choice, chooses them together with shared "
        "ones, or has more than the model's dtype has whole numbers for"
    )


def _parameter_of_stream(layer: nn.Module) -> str | None:
    """The argument with which a layer is given the stream."""
    parameters = inspect.signature(layer.forward).parameters
    return next((name for name in HIDDEN_NAMES if name in parameters), None)


def _of_attention(
    layer: nn.Module, hidden_size: int, tensor_parallel: int
) -> dict[str, InnerPoint]:
    """The points of a layer's attention; none if it has none, or several."""
    cores = [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, (Attention, MLAAttention))
        and not isinstance(module, (CrossAttention, EncoderOnlyAttention))
    ]
    if len(cores) != 1:
        return {}
    ((name, core),) = cores
    block = _block_of(layer, name)
    points = _of_core(core, block, tensor_parallel)
    if block is not core and (tensor_parallel == 1 or _reduces(block)):
        shape = PointShape(hidden_size)
        points["attn_out"] = InnerPoint(block, shape, None)
        linear = [one for one in block.modules() if isinstance(one, LinearBase)]
        if any(one.input_size == hidden_size for one in linear):
            points["attn_in"] = InnerPoint(block, shape, 0)
    return points


def _block_of(layer: nn.Module, name: str) -> nn.Module:
    """The innermost module around a core, by its name, that projects what it returns.

    A module around that one may have norms of the stream as well (DBRX).
    """
    while "." in name:
        name = name.rpartition(".")[0]
        block = layer.get_submodule(name)
        if any(isinstance(one, LinearBase) for one in block.modules()):
            return block
    return layer.get_submodule(name)


def _of_core(
    core: Any, block: nn.Module, tensor_parallel: int
) -> dict[str, InnerPoint]:
    if isinstance(core, MLAAttention):
        # Its keys and values are latent; heads exist in what it returns only.
        heads = core.num_heads * tensor_parallel
        shape = PointShape(heads * core.v_head_dim, heads)
        return {"z": InnerPoint(core, shape, None, tensor_parallel)}
    ranks = copies = 1
    if tensor_parallel > 1:
        made = [one for one in block.modules() if isinstance(one, QKVParallelLinear)]
        if len(made) != 1:  # Nothing else says which ranks have which heads.
            return {}
        ranks, copies = made[0].tp_size, made[0].num_kv_head_replicas
    heads, kv_heads = core.num_heads * ranks, core.num_kv_heads * ranks // copies
    size, value_size = core.head_size, core.head_size_v
    queries, returned = (PointShape(heads * n, heads) for n in (size, value_size))
    points = {
        "q": InnerPoint(core, queries, "query", ranks),
        "z": InnerPoint(core, returned, None, ranks),
    }
    if core.kv_sharing_target_layer_name is None:
        keys, values = (PointShape(kv_heads * n, kv_heads) for n in (size, value_size))
        points["k"] = InnerPoint(core, keys, "key", ranks, copies)
        points["v"] = InnerPoint(core, values, "value", ranks, copies)
    return points


def _of_mlp(layer: nn.Module) -> dict[str, InnerPoint]:
    """The points of a layer's MLP or experts."""
    routed: list[Any] = [one for one in layer.modules() if _is_routed(one)]
    if len(routed) > 1 or any(_spreads_tokens(one.moe_config) for one in routed):
        return {}  # Experts then compute other tokens than those of the step.
    points = _of_experts(routed[0]) if routed else {}
    inside = {id(part) for part in layer.modules() if _holds_attention(part)}
    # Beside routed experts it is the MLP of the shared ones. Mixers without attention,
    # and what writes to several streams, have such projections too.
    chooses = bool(routed) or num_streams(layer) > 0
    downs = [
        module
        for name, child in layer.named_children()
        if id(child) not in inside and (not chooses or _is_mlp(name, child))
        for module in child.modules()
        if isinstance(module, RowParallelLinear)
    ]
    if len(downs) == 1:
        (down,) = downs
        ranks = down.tp_size if down.input_is_parallel else 1
        # Adapters compute a layer that they wrap without calling it.
        called = next(
            (one for one in layer.modules() if getattr(one, "base_layer", 0) is down),
            down,
        )
        points["mlp_act"] = InnerPoint(called, PointShape(down.input_size), 0, ranks)
    return points


def _of_experts(runner: Any) -> dict[str, InnerPoint]:
    """The points of upstream's layer of routed experts."""
    config, router = runner.moe_config, runner.router
    shape = PointShape(config.num_logical_experts)
    points: dict[str, InnerPoint] = {}
    if (gate := getattr(runner, "gate", None)) is None:
        # The Transformers backend gives it the choice only.
        if "router_logits" in inspect.signature(runner.forward).parameters:
            points["router_logits"] = InnerPoint(runner, shape, "router_logits")
    elif getattr(runner, "shared_expert_gate", None) is None:
        points["router_logits"] = InnerPoint(gate, shape, None)
    exact = 2 / torch.finfo(config.in_dtype).eps
    chooses = isinstance(router, BaseRouter) and not runner.is_monolithic
    if chooses and config.num_experts <= exact:
        shape = PointShape(router.top_k)
        factor = float(runner.routed_scaling_factor)
        for index, name in enumerate(("expert_weights", "expert_ids")):
            scale = factor if name == "expert_weights" else 1.0
            points[name] = InnerPoint(runner, shape, index, router=router, scale=scale)
    return points


def _spreads_tokens(config: Any) -> bool:
    """Whether ranks exchange tokens before experts are chosen."""
    return bool(config.dp_size > 1 or config.is_sequence_parallel)


def _is_mlp(name: str, child: nn.Module) -> bool:
    """Whether a layer's child is its MLP, by its name or as it has routed experts."""
    return role_of(name) is Role.MLP or any(map(_is_routed, child.modules()))


def _is_routed(module: nn.Module) -> bool:
    """Whether this is upstream's layer of routed experts."""
    return isinstance(module, MoERunnerInterface)


def _holds_attention(module: nn.Module) -> bool:
    return any(isinstance(one, (Attention, MLAAttention)) for one in module.modules())


def _reduces(block: nn.Module) -> bool:
    """Whether all its output projections are summed over ranks before they return."""
    downs = [one for one in block.modules() if isinstance(one, RowParallelLinear)]
    return bool(downs) and all(one.reduce_results for one in downs)


def shapes_of(
    points: Mapping[Tap, InnerPoint], streams: Mapping[int, int], hidden_size: int
) -> dict[int, dict[str, tuple[int, int]]]:
    """The shapes of the points that differ from the stream's, by layer and name.

    Args:
        points: those inside the blocks.
        streams: the number of streams, of layers that have several, by index.
        hidden_size: width of a stream.

    """
    shapes: dict[int, dict[str, tuple[int, int]]] = {
        layer: dict.fromkeys(STREAMS_POINTS, PointShape(count * hidden_size, count))
        for layer, count in streams.items()
    }
    for (layer, name), point in points.items():
        shape = point.shape
        if shape != PointShape(hidden_size):
            shapes.setdefault(layer, {})[name] = shape.width, shape.heads
    return shapes
