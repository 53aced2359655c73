# SPDX-License-Identifier: Apache-2.0
"""Runs an engine over several processes, and saves its captures and outputs.

    python -m tests.multiprocess.observe ORDER.json

A separate process, because an engine leaves a process group behind, and because the
runner must be chosen before vllm is imported.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multiprocess.apart import ON_CPU, carry_out, runner
from tests.multiprocess.experts import complete_on_cpu

COMPLETE = "CLEARBOX_TEST_EXPERTS"
"""The variable that tells all processes to let ranks divide experts on a CPU."""

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Set here, because workers import this module again before they import vllm.
    import tests.support.interpreted  # noqa: F401

if os.environ.get(COMPLETE) == "1":
    complete_on_cpu()

HOOKS = ("pre_attn", "post_attn", "post_block")
EVERYWHERE = dict.fromkeys(HOOKS, "all")
LAYOUTS = ("per_file", "packed", "sharded")
NEW_TOKENS = 6
PROMPT_LENGTHS = (5, 40, 21)
"""Some prompts are computed in several steps, together with others."""


@dataclass(frozen=True, slots=True)
class Order:
    """The configuration of a run."""

    model: str
    root: str
    """Folder in which consumers write."""
    found: str
    """File for the results."""
    tensor: int = 1
    pipeline: int = 1
    plugins: str = ""
    """Folder of the package with `PILOT`, if it runs within the steps."""
    experts: bool = False
    """Whether the ranks divide whole experts."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables.

        They also turn off Dynamo: the interpreter has no compile target, which
        upstream's Cohere requires.
        """
        return ON_CPU | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": runner(self.pipeline),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [self.plugins, os.environ.get("PYTHONPATH")])
            ),
            **({COMPLETE: "1"} if self.experts else {}),
        }


def steering(layer: int, hook: str) -> dict[str, Any]:
    """Vectors of all three tiers at one hook point."""
    tiers = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
    return {tier: {hook: {layer: vector(i, layer)}} for i, tier in enumerate(tiers)}


def vector(seed: int, layer: int) -> list[float]:
    """A random vector."""
    import torch

    generator = torch.Generator().manual_seed(100 * layer + seed)
    found: list[float] = torch.randn(64, generator=generator).tolist()
    return found


STEERED = [(0, "pre_attn"), (1, "post_attn"), (2, "post_block"), (3, "post_attn")]
"""The tap of each steered request, on either stage."""


CONDITIONS: list[list[dict[str, Any]]] = [
    [{"scope": "token"}, {"scope": "token", "sharpness": 8.0}],
    [{"scope": "rest"}],
    [{"scope": "prompt"}, {"scope": "prompt", "reduce": "mean"}],
]
"""How probes of the first stage decide entries of the last, by request."""
SAE = "across"
"""A transcoder that reads in layer 0 and writes in layer 3."""


def gated() -> list[dict[str, Any]]:
    """Requests with entries of the last layer for each outcome of conditions.

    Entries with probes of their own stage, and with positions, are added. In the last
    requests generated tokens decide, and a transcoder reads.
    """

    def entry(seed: int, layer: int, threshold: Any, **fields: Any) -> dict[str, Any]:
        when = {"probe": vector(9, 0), "cosine": True, "layer": layer, **threshold}
        when |= {"hook": "post_block"} | fields.pop("when", {})
        return {"vector": vector(seed, 1), "when": when, **fields}

    above, below = {"above": 0.1}, {"below": 0.1}
    sides = [
        [entry(n, 0, (above, below)[n % 2], when=one) for one in found for n in (1, 2)]
        for found in CONDITIONS
    ]
    span = {"positions": {"ranges": [[2, 8]]}, "op": "project_out", "scale": 4.0}
    near = {
        1: [entry(3, 0, above)],
        2: [entry(4, 1, above, **span)],
        3: [entry(5, 2, above, when={"scope": "rest"})],
    }
    made: list[dict[str, Any]] = [
        {"post_block": {**near, 3: [*near[3], *both]}} for both in sides
    ]
    made.append({"post_block": near})
    found = [{"steering_vectors": one} for one in made]
    found[-1]["decode_steering_vectors"] = {"post_block": {3: sides[1]}}
    features = [
        {"op": "feature", "sae": SAE, "feature": n, "value": -3.0, "mode": "scale"}
        for n in range(8)
    ]
    found.append({"steering_vectors": {"post_block": {3: features}}})
    return found


def operated() -> list[dict[str, Any]]:
    """A request for each operation, at the first layer and at the last.

    Scores of the last one's feature are its own SAE's, in layer 1.
    """
    one, other = vector(1, 0), vector(2, 0)
    pair = [one, other]
    alone: list[dict[str, Any]] = [
        {"op": "add", "vector": one, "scale": 0.5, "norm_match": True},
        {"op": "project_out", "vector": one, "scale": 0.5},
        {"op": "clamp", "vector": one, "min": 3.0, "max": 4.0},
        {"op": "swap", "vector": one, "target": other},
        {"op": "rotate", "plane": pair, "degrees": 120},
        {"op": "replace", "vector": one, "alpha": 0.5, "positions": [1, 3]},
        {"op": "low_rank", "read": pair, "write": pair, "activation": "relu"},
    ]
    found = [
        {"steering_vectors": {"pre_attn": {0: [entry]}, "post_attn": {3: [entry]}}}
        for entry in alone
    ]
    feature = {"op": "feature", "sae": "jump", "feature": 3, "value": 9.0}
    found.append({"steering_vectors": {"post_block": {1: [feature]}}})
    clamp = {"post_block": {2: {"vector": one, "min": 3.0, "max": 4.0}}}
    found.append({"decode_steering_clamps": clamp})
    named = {"name": NAMED, "scale": 0.5}
    found.append({"steering_name": [NAMED, named]})
    return found


NAMED = "named"
"""Vectors at both ends of the model, registered under a name."""


def save_named(folder: Path) -> Path:
    """Save `NAMED`."""
    file = folder / f"{NAMED}.json"
    vectors = {"post_block": {0: vector(7, 0)}, "pre_attn": {3: vector(7, 3)}}
    file.write_text(json.dumps({"vectors": vectors}))
    return file


def keep(ctx: Any, h: Any) -> None:
    """A hook function that keeps the rows of its layer."""
    ctx.saved.setdefault(ctx.layer_idx, []).append(h.clone())


def turn(ctx: Any, h: Any) -> Any:
    """A hook function that changes the stream."""
    return h.roll(1, dims=-1) * (1 + ctx.layer_idx)


def greedy(max_tokens: int = NEW_TOKENS, **fields: Any) -> Any:
    """Parameters of a request that takes the likeliest tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        **fields,
    )


def _hooked(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """What hook functions of a request, in layers of all stages, do and keep."""
    from vllm.interop.vllm_lens import Hook

    hooks = [Hook(turn, [0, 3]), Hook(keep, [0, 2, 3]), Hook(keep, [1], pre=True)]
    hooks.append(Hook(turn, [2], pre=True))
    asked = {"apply_hooks": hooks}
    params = [greedy(logprobs=-1, extra_args=args) for args in (asked, None)]
    hooked, plain = engine.run(prompts, params)
    assert plain.hook_results is None
    return {
        "results": hooked.hook_results,
        "tokens": [list(one.outputs[0].token_ids) for one in (hooked, plain)],
    }


def _registered(engine: Any, prompt: list[int], options: dict[str, Any]) -> Any:
    """The readout of a module that is registered while the engine runs."""
    engine.llm.register_readout_module("later", options["readout_modules"]["direction"])
    spec = {"kind": "probe", "probe": "later", "positions": "all"}
    found = _read(engine, prompt, {"later": spec})
    engine.llm.unregister_readout_module("later")
    gone = _read(engine, prompt, {"later": spec})
    return {"read": found, "gone": gone}


def save_transcoder(folder: Path) -> Path:
    """Save `SAE`; returns its folder."""
    from tests.v1.residual.sae import _layouts

    names = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold", "W_skip")
    places = {"hook_name": "blocks.0.hook_resid_post"}
    places["hook_name_out"] = "blocks.3.hook_resid_post"
    _layouts.saelens(
        folder,
        _layouts.chosen(_layouts.parts(3, 64, 32), *names),
        architecture="jumprelu_skip_transcoder",
        d_in=64,
        d_out=64,
        metadata=places,
        normalize_activations="layer_norm",
    )
    return folder


PILOT = """
import numpy as np

from vllm.v1.capture import CaptureSpec, SteeringController
from vllm.v1.worker.steering_action_queue import (
    RequestSteeringOverride,
    SteeringVectorUpdate,
)


class Pilot(SteeringController):
    def global_capture_spec(self):
        return CaptureSpec(hooks={"post_block": [1]}, positions="all")

    def on_step(self, view):
        names = {one.conversation_id for one in view.requests}
        if "raise" in names:
            raise RuntimeError("it is meant to")
        if "all" in names or "none" in names:
            vector = np.full(64, 0.5 * ("all" in names), np.float32)
            no_vector = SteeringVectorUpdate({"post_block": {0: lambda: 1}})
            vectors = {"post_block": {0: vector, 3: -vector}}
            return [no_vector, SteeringVectorUpdate(vectors)]
        return super().on_step(view)

    def decide(self, request_view, residual):
        row = residual[-1]
        vectors = {"post_block": {0: 4 * row / row.norm(), 3: row}}
        return RequestSteeringOverride(request_view.req_id, vectors)
"""
"""A consumer whose actions are made of the rows, which only one rank has."""

ACTED = (None, "latched", "latched", "raise", "all", None, "none")
"""The conversations of requests to it, one after another."""


def scaled(rows: Any, context: Any) -> Any:
    """A custom readout of two hook points."""
    rows = rows.float()
    return (rows[:, 0] * rows[:, -1]).sum(-1) + rows.new_tensor(context.positions)


READOUTS: dict[str, Any] = {
    "lens": {"kind": "lens", "layers": [2, 3], "top_k": 3, "tokens": [5]},
    "whole": {"kind": "lens", "top_k": 3, "tokens": [5], "positions": "all"},
    "first": {"kind": "lens", "layers": [0], "top_k": 0, "tokens": [5, 9]},
    "norm": {"kind": "norm", "hooks": {"post_block": [3]}, "positions": "all"},
    "mean": {
        "kind": "rows",
        "hooks": {"post_attn": [2]},
        "positions": "all_prompt",
        "reduce": "mean",
    },
    "tuned": {"kind": "lens", "layers": [0, 1, 2], "top_k": 2, "translator": "tuned"},
    "early": {"kind": "norm", "hooks": {"post_block": [0]}},
    "norms": {
        "kind": "norm",
        "hooks": {"post_block": "all", "pre_attn": [0, 2]},
        "positions": "all",
    },
    "probe": {"kind": "probe", "probe": "direction", "positions": "all"},
    "sae": {"kind": "sae", "sae": "jump", "features": [3, 50, 199]},
    "top": {"kind": "sae", "sae": "topk", "top_k": 4, "positions": "last_prompt"},
    "rows": {"kind": "rows", "hooks": {"post_block": [0, 3], "pre_attn": [1]}},
    "most": {
        "kind": "rows",
        "hooks": {"post_attn": [3], "post_block": [1, 2]},
        "positions": "all",
        "reduce": "max",
    },
    "both": {"kind": "custom", "fn": scaled, "hooks": {"post_block": [0, 3]}},
    "patterns": {"kind": "attention", "positions": "all", "keys": [0, 3, 20]},
    "largest": {"kind": "attention", "positions": "all", "top_k": 4},
    "pattern": {"kind": "attention", "layers": [3], "heads": [1], "full": True},
    "first_two": {"kind": "custom", "fn": scaled, "hooks": {"post_attn": [0, 1]}},
}
"""Readouts of each stage's layers, and of several stages'."""


def told(*taps: tuple[int, str]) -> dict[str, Any]:
    """Steering at these hook points, with a receipt.

    What acts at the last is under a condition of its layer, and an addition there under
    one of layer 0.
    """
    entries = []
    for layer, hook in taps:
        given = steering(layer, hook)["steering_vectors"][hook][layer]
        entries.append((layer, hook, {"vector": given, "op": "project_out"}))
    layer, hook, last = entries[-1]
    probe = {"probe": last["vector"], "layer": layer, "hook": "pre_attn", "above": 0.0}
    last["when"] = probe
    far = {"probe": vector(9, 0), "layer": 0, "hook": "post_block", "below": 0.0}
    entries.append((layer, hook, {"vector": vector(5, 1), "when": far}))
    vectors: dict[str, Any] = {}
    for layer, hook, entry in entries:
        vectors.setdefault(hook, {}).setdefault(layer, []).append(entry)
    return {"steering_vectors": vectors, "steering_receipt": True}


def feature_options(root: Path) -> dict[str, Any]:
    """The options of an engine with all features; modules are written below `root`."""
    from tests.v1.readouts._reading import write_modules

    modules = root / "modules"
    modules.mkdir(parents=True)
    options = write_modules(modules).options
    options["sae"][SAE] = str(save_transcoder(modules / SAE))
    options["steering_modules"] = {NAMED: str(save_named(modules))}
    return options | {
        "vllm_lens_api": True,
        "enable_readouts": True,
        "hook_points": ["q"],
    }


def observe(order: Order) -> dict[str, Any]:
    """Collect rows, log-probabilities, results and files of an engine's requests."""
    from tests.support.captured import CapturedEngine, prompt

    storage = [
        f"filesystem:root={order.root}/files",
        f"arrow:root={order.root}/tables",
        "inline",
    ]
    options = feature_options(Path(order.root))
    engine = CapturedEngine(
        Path(order.model),
        reference="none",
        skip_tokenizer_init=True,
        capture_consumers=storage + (["pilot"] if order.plugins else []),
        tensor_parallel_size=order.tensor,
        pipeline_parallel_size=order.pipeline,
        async_scheduling=None if order.pipeline == 1 or not order.plugins else False,
        max_num_batched_tokens=24,
        max_logprobs=-1,
        enable_patching=True,
        max_patch_slots=4,
        enable_expert_parallel=order.experts,
        **options,
        activation_store_gb=0.01,
        gpu_memory_utilization=0.2,
        distributed_executor_backend="uni"
        if order.tensor * order.pipeline == 1
        else "mp",
    )
    prompts = [prompt(length, seed=length) for length in PROMPT_LENGTHS]
    found = {
        "plain": _requests(engine, prompts, [{} for _ in prompts]),
        "steered": _requests(
            engine, prompts[:1] * len(STEERED), [steering(*tap) for tap in STEERED]
        ),
        "gated": _requests(
            engine, [prompts[n % len(prompts)] for n in range(len(gated()))], gated()
        ),
        "fired": engine.llm.get_steering()["fired"],
        "operated": _requests(engine, prompts[:1] * len(operated()), operated()),
        "hooked": _hooked(engine, prompts[1:]),
        "registered": _registered(engine, prompts[1], options),
        "staging": engine.llm.llm_engine.capture.describe()["staging"],
        "stored": _stored(engine, prompts[1]),
        "again": _requests(engine, [*prompts, prompts[1] * 2], [{}] * 4),
        "read": _read(engine, prompts[1], READOUTS),
        "ended": _ended(engine, prompts[1]),
        "around": _around(engine, prompts),
        "told": _read(engine, prompts[1], None, **told(STEERED[0], STEERED[3])),
        "swept": _swept(engine, prompts[0]),
        "under all": _under_all(engine, prompts[:2]),
    }
    if order.plugins:
        found["acted"] = [
            _requests(engine, prompts[:2], [{"conversation_id": name}, {}])
            for name in ACTED
        ]
        core: Any = engine.llm.llm_engine.engine_core
        found["dynamic"] = core.engine_core.dynamic_steering()
    engine.close()
    return found


def _requests(engine: Any, prompts: Any, fields: Any) -> list[dict[str, Any]]:
    from tests.support.captured import asking

    params = [
        asking("all", None, NEW_TOKENS, logprobs=-1, detokenize=False, **f)
        for f in fields
    ]
    found = []
    for output in engine.run(prompts, params):
        rows = output.outputs[0].logprobs
        found.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [[row[t].logprob for t in sorted(row)] for row in rows],
                "rows": engine.rows(output),
                "sidecars": engine.sidecars(output),
                "statuses": {k: r.status for k, r in output.capture_results.items()},
                "cached": output.capture_results["keeper"].cached_rows,
            }
        )
    return found


def _read(engine: Any, prompt: list[int], readouts: Any, **fields: Any) -> Any:
    """The readouts and the receipt of a request, or why it is refused."""
    try:
        (output,) = engine.run([prompt], [greedy(readouts=readouts, **fields)])
    except ValueError as error:
        return str(error)
    arrays = {
        (name, label): array
        for name, one in output.readouts.items()
        for label, array in one.arrays.items()
    }
    errors = [one.error for one in output.readouts.values() if one.error]
    return {"arrays": arrays, "errors": errors, "receipt": output.steering}


def _under_all(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Requests under the engine's vectors in all stages, one of them steered too."""
    for tap in (STEERED[0], STEERED[3]):
        engine.llm.set_steering(*steering(*tap).values())
    found = _requests(engine, prompts, [{}, steering(*STEERED[2])])
    engine.llm.clear_steering()
    return found


def _swept(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """A grid whose rows and layers lie in all stages and ranks."""
    from vllm.patching import patch_sweep

    result = patch_sweep(
        engine.llm,
        prompt,
        [prompt[0] + 1, *prompt[1:]],
        answer=5,
        foil=9,
        hooks=HOOKS,
        positions=[0, -2, -1],
        progress=False,
    )
    return {"values": result.values, "noise_floor": result.noise_floor}


def _ended(engine: Any, prompt: list[int]) -> list[dict[str, Any]]:
    """Requests that a probe of the first stage ends, one for each of its values."""
    whole = _scored(engine, prompt, None)
    found = []
    for index in range(whole["scores"].shape[1]):
        scores = whole["scores"][:, index]
        above = float(scores[0] + scores.max()) / 2  # fires after the first token
        if scores.argmax() == 0:
            above = float(scores[0]) - 1.0
        rule = {"readout": "probe", "index": index, "above": above}
        ended = _scored(engine, prompt, [rule])
        found.append(ended | {"whole": whole["tokens"], "rule": rule})
    return found


def _around(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of requests that keep them around tokens, and all of them."""
    read = {"probe": {"kind": "probe", "probe": "direction", "positions": "all"}}
    spec = {"hooks": EVERYWHERE, "positions": "all"}
    every = engine.run(prompts, greedy(readouts=read, capture={"inline": spec}))
    values = [one.readouts["probe"]["values"][:, 0] for one in every]
    keep = {"readout": "probe", "index": 0, "scope": "token", "before": 2, "after": 1}
    keep["above"] = float(sorted(value for own in values for value in own)[-8])
    kept = greedy(readouts=read, capture={"inline": spec | {"keep_when": keep}})
    results = [one.capture_results["inline"] for one in engine.run(prompts, kept)]
    return [
        {
            "fired": [at for at, value in enumerate(own) if value > keep["above"]],
            "status": result.status,
            "rows": dict(result.payload or {}),
            "positions": dict(result.payload.positions) if result.payload else {},
            "whole": dict(whole.capture_results["inline"].payload),
        }
        for whole, own, result in zip(every, values, results)
    ]


def _scored(engine: Any, prompt: list[int], stop_when: Any) -> dict[str, Any]:
    read = {"probe": {"kind": "probe", "probe": "direction"}}
    params = greedy(2 * NEW_TOKENS, readouts=read, stop_when=stop_when)
    (output,) = engine.run([prompt], [params])
    text, probe = output.outputs[0], output.readouts["probe"]
    return {
        "tokens": list(text.token_ids),
        "stop_reason": text.stop_reason,
        "scores": probe["values"],
        "error": probe.error,
    }


def _stored(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """Store one request in every form of rows."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        spec = {"hooks": EVERYWHERE, "positions": "all"}
        place = {"request_id": layout, "tag": "t"}
        asked = {
            "filesystem": spec | place | {"layout": layout},
            "arrow": spec | place,
            "inline": spec,
        }
        (output,) = engine.run([prompt], greedy(capture=asked))
        results = output.capture_results
        found[layout] = {
            "statuses": {k: (r.status, r.error) for k, r in results.items()},
            "files": sorted(map(str, results["filesystem"].payload)),
            "tables": sorted(map(str, results["arrow"].payload)),
            "inline": dict(results["inline"].payload),
        }
    return found


def main() -> None:
    """Execute the order in the file on the command line."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    import torch

    torch.save(observe(order), order.found)


def run(order: Order, timeout: float = 300) -> dict[str, Any]:
    """Execute an order in another process."""
    return carry_out("tests.multiprocess.observe", order, Path(order.found), timeout)


if __name__ == "__main__":
    main()
