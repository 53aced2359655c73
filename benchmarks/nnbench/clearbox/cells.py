# SPDX-License-Identifier: Apache-2.0
"""nnbench's cells on capture, steering and the engine's own head.

Shapes are those of the other systems' cells: next-token logits `[1, vocabulary]`, of
generation `[new_tokens, vocabulary]`, of the lens `[layers, 1, vocabulary]`.
"""

from typing import Any

import torch
from isb.methodologies.registry import Unsupported, cell
from isb.methodologies.steering import _resolve_token

from vllm import SamplingParams
from vllm.interop.head import decode_rows, unembedding_rows

STREAM = "post_block"


def _run(model: Any, prompt: str, layers: Any, positions: Any, **steering: Any) -> Any:
    """One request: rows `[layers, rows, hidden]`, ascending."""
    new_tokens = steering.pop("new_tokens", 1)
    hooks = {STREAM: sorted(set(layers))}
    params = SamplingParams(
        max_tokens=new_tokens,
        temperature=0.0,
        ignore_eos=True,
        capture={"inline": {"hooks": hooks, "positions": positions}},
        **steering,
    )
    (output,) = model.llm.generate([prompt], params, use_tqdm=False)
    result = output.capture_results["inline"]
    if result.status != "ok":
        raise RuntimeError(result.error)
    return torch.stack([result.payload[layer, STREAM] for layer in hooks[STREAM]])


def _logits(model: Any, prompt: str, **steering: Any) -> torch.Tensor:
    rows = _run(model, prompt, [model.n_layers - 1], "last_prompt", **steering)
    return decode_rows(model.llm, rows[0])


def _direction(model: Any, target: str) -> torch.Tensor:
    token = _resolve_token(model.tokenizer, target)
    if token not in model.directions:
        (row,) = unembedding_rows(model.llm, [token])
        model.directions[token] = torch.nn.functional.normalize(row.float(), dim=0)
    direction: torch.Tensor = model.directions[token]
    return direction


def _mean_norm(model: Any, prompt: str, layer: int) -> float:
    """Of the unsteered stream over the prompt: one request, whose norms alone come."""
    reading = {"kind": "norm", "hooks": {STREAM: [layer]}, "positions": "all_prompt"}
    params = SamplingParams(max_tokens=1, temperature=0.0, readouts={"norm": reading})
    (output,) = model.llm.generate([prompt], params, use_tqdm=False)
    return float(output.outputs[0].readouts["norm"]["norm"].mean())


def _added(
    model: Any, prompt: str, layer: int, target: str, alpha: float, scale_by: str
) -> dict[str, Any]:
    """Steering fields of the addition, at prompt and generated tokens; {} for alpha 0.

    The mean over the tokens of one forward pass is that of a single token in every
    decode step, which is `norm_match`; for the prompt it is measured first.
    """
    if scale_by not in ("mean_norm", "token_norm"):
        raise Unsupported(
            f"scale_by={scale_by!r}: mean_norm and token_norm are carried"
        )
    if alpha == 0:
        return {}
    layer = _below_the_last(model, layer)
    vector = _direction(model, target)
    own = {STREAM: {layer: {"vector": vector, "scale": alpha, "norm_match": True}}}
    if scale_by == "token_norm":
        return {"steering_vectors": own}
    scale = alpha * _mean_norm(model, prompt, layer)
    prefill = {STREAM: {layer: {"vector": vector, "scale": scale}}}
    return {"prefill_steering_vectors": prefill, "decode_steering_vectors": own}


def _below_the_last(model: Any, layer: int) -> int:
    layer %= model.n_layers
    if layer == model.n_layers - 1:
        raise ValueError(f"layer {layer} is the one that is read; choose one below")
    return layer


@cell("logit_lens", family="llama", backend="clearbox")
def logit_lens(
    be: Any, model: Any, prompts: Any, *, layers: Any = "all"
) -> torch.Tensor:
    """Each layer's last row through the final norm and the head, in one product."""
    count = model.n_layers
    wanted = list(range(count)) if layers == "all" else [i % count for i in layers]
    rows = _run(model, prompts[0], wanted, "last_prompt")[:, 0]
    order = sorted(set(wanted))
    return decode_rows(model.llm, rows)[[order.index(i) for i in wanted]][:, None]


@cell("steering", family="llama", backend="clearbox")
def steering(
    be: Any,
    model: Any,
    prompts: Any,
    *,
    layer: int = 8,
    target: str = " Rome",
    alpha: float = 6.0,
    scale_by: str = "mean_norm",
) -> torch.Tensor:
    """The target's direction is added at a layer of the prompt."""
    fields = _added(model, prompts[0], layer, target, alpha, scale_by)
    return _logits(model, prompts[0], **fields)


@cell("gen_steering", family="llama", backend="clearbox")
def gen_steering(
    be: Any,
    model: Any,
    prompts: Any,
    *,
    layer: int = 8,
    target: str = " Rome",
    alpha: float = 6.0,
    new_tokens: int = 8,
    scale_by: str = "mean_norm",
) -> torch.Tensor:
    """The same at each generated token; the rows that each was sampled from."""
    fields = _added(model, prompts[0], layer, target, alpha, scale_by)
    last = [model.n_layers - 1]
    (rows,) = _run(model, prompts[0], last, "all", new_tokens=new_tokens, **fields)
    return decode_rows(model.llm, rows[-new_tokens:])


@cell("activation_patching", family="llama", backend="clearbox")
def activation_patching(
    be: Any,
    model: Any,
    prompts: Any,
    *,
    layer: int = 6,
    patch: bool = True,
    positions: str = "all",
) -> torch.Tensor:
    """The clean run's rows in the place of the corrupt one's, at a layer."""
    clean, corrupt = prompts
    if not patch:
        return _logits(model, corrupt)
    if positions not in ("all", "last"):
        raise Unsupported(f"positions={positions!r}: all and last are carried")
    layer = _below_the_last(model, layer)
    selector = "all_prompt" if positions == "all" else "last_prompt"
    (rows,) = _run(model, clean, [layer], selector)
    entry: dict[str, Any] = {"op": "replace", "positions": selector}
    entry |= {"vectors": rows} if positions == "all" else {"vector": rows[0]}
    return _logits(model, corrupt, prefill_steering_vectors={STREAM: {layer: entry}})


@cell("ablation", family="llama", backend="clearbox")
def ablation(
    be: Any, model: Any, prompts: Any, *, layer: int = 6, target: str = "mlp"
) -> torch.Tensor:
    """The output of a layer's MLP or attention is zeros."""
    if target == "none":
        return _logits(model, prompts[0])
    if target not in ("mlp", "attn"):
        raise Unsupported(f"target={target!r}: mlp and attn are carried")
    zeros = torch.zeros(model.config.hidden_size)
    entry = {"op": "replace", "vector": zeros}
    fields = {f"{target}_out": {layer % model.n_layers: entry}}
    return _logits(model, prompts[0], prefill_steering_vectors=fields)
