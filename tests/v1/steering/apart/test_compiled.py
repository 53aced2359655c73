# SPDX-License-Identifier: Apache-2.0
"""Compiled passes steer like eager ones, for every kind of entry."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.compiler import needs_compiler
from tests.v1.residual.sae import _layouts
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import generate, logprobs, params, tokens
from vllm.v1.residual.sae import encode, load_sae

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_compiler,
]

HOOKS = ("pre_attn", "post_attn", "post_block")
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
PROMPTS = [[(7 * i + 3 * j) % _models.VOCAB for j in range(9 + i)] for i in range(4)]
PROMPT = PROMPTS[0]
SIZE = len(PROMPT)


@pytest.fixture(scope="module")
def transcoder(tmp_path_factory: Any) -> Path:
    """One that selects the largest of 200 features."""
    folder: Path = tmp_path_factory.mktemp("saes") / "layers.1.mlp"
    parts = _layouts.parts(3, _models.HIDDEN, 200)
    said = {"transcode": True, "d_in": _models.HIDDEN, "num_latents": 200, "k": 50}
    return _layouts.sparsify(folder, parts, **said)


@pytest.fixture(scope="module")
def steered(
    tmp_path_factory: Any, transcoder: Path
) -> Iterator[tuple[Any, _models.Reference]]:
    path = _models.save("llama", tmp_path_factory.mktemp("llama"))
    llm = _engine.engine(
        path,
        enforce_eager=False,
        max_num_seqs=16,
        max_steering_configs=16,
        hook_points=["mlp_in", "mlp_out"],
        sae={"topk": str(transcoder)},
    )
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    yield llm, _models.Reference(path)
    llm.llm_engine.engine_core.shutdown()


def vector(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(_models.HIDDEN)


def of_tier(tier: str, added: torch.Tensor) -> _models.Change:
    prefill = None if tier == "decode_steering_vectors" else added
    decode = None if tier == "prefill_steering_vectors" else added
    return _models.add_by_phase(SIZE, prefill, decode)


def error(output: Any, reference: Any, changes: Any) -> float:
    """The largest relative difference from transformers."""
    prompt = output.prompt_token_ids
    ids = prompt + tokens(output)
    expected = reference.logprobs(ids[:-1], changes)[len(prompt) - 1 :]
    largest = (logprobs(output) - expected).abs().max() / expected.abs().max()
    return float(largest)


def test_every_tier_at_every_hook_point_in_one_batch(steered: Any) -> None:
    llm, reference = steered
    cases = [
        (tier, (number % _models.LAYERS, hook), vector(number))
        for number, (tier, hook) in enumerate(itertools.product(TIERS, HOOKS))
    ]
    specs: list[dict[str, Any]] = [{t: {h: {n: v}}} for t, (n, h), v in cases]
    sampling = [params(**spec) for spec in specs]
    *outputs, plain = generate(llm, [PROMPT] * 10, [*sampling, params()])
    assert error(plain, reference, {}) < 1e-4
    for (tier, tap, added), output in zip(cases, outputs, strict=True):
        assert error(output, reference, {tap: of_tier(tier, added)}) < 1e-4
        assert error(output, reference, {}) > 1e-3


def test_the_engines_vectors_and_a_requests_add_up(steered: Any) -> None:
    llm, reference = steered
    v = [vector(seed) for seed in range(6)]
    shared, own = ([{"post_block": {1: x}} for x in part] for part in (v[:3], v[3:]))
    llm.set_steering(*shared)
    try:
        request: dict[str, Any] = dict(zip(TIERS, own, strict=True))
        both, only = generate(llm, [PROMPT] * 2, [params(**request), params()])
    finally:
        llm.clear_steering()
    prefill, decode = v[0] + v[1], v[0] + v[2]
    for output, added in (
        (only, (prefill, decode)),
        (both, (prefill + v[3] + v[4], decode + v[3] + v[5])),
    ):
        change = _models.add_by_phase(SIZE, *added)
        assert error(output, reference, {(1, "post_block"): change}) < 1e-4


def along(stream: torch.Tensor, direction: torch.Tensor, factor: float) -> torch.Tensor:
    unit = direction / direction.norm()
    return stream + factor * (stream @ unit)[:, None] * unit


V = vector(5)
OPERATIONS: dict[str, tuple[dict[str, Any], _models.Change]] = {
    "replace": ({"op": "replace"}, lambda x: V.expand_as(x)),
    "project_out": ({"op": "project_out"}, lambda x: along(x, V, -1)),
    "clamp": (
        {"op": "clamp", "min": 1.5, "max": 1.5},
        lambda x: along(x, V, -1) + 1.5 * V / V.norm(),
    ),
    "norm_match": (
        {"norm_match": True, "scale": 0.5},
        lambda x: x + 0.5 * x.norm(dim=-1, keepdim=True) * V / V.norm(),
    ),
}


@pytest.mark.parametrize("positions", [None, [1, 10]])
def test_operations_are_carried_out_by_compiled_code(
    steered: Any, positions: Any
) -> None:
    llm, reference = steered
    where = {} if positions is None else {"positions": positions}
    specs: list[Any] = [
        {"post_block": {1: {"vector": V, **entry, **where}}}
        for entry, _ in OPERATIONS.values()
    ]
    sampling = [params(steering_vectors=spec) for spec in specs]
    *outputs, plain = generate(llm, [PROMPT] * 5, [*sampling, params()])
    assert not llm.get_steering()["eager_steps"]
    assert error(plain, reference, {}) < 1e-4
    for (_, formula), output in zip(OPERATIONS.values(), outputs, strict=True):

        def change(
            stream: torch.Tensor, formula: _models.Change = formula
        ) -> torch.Tensor:
            changed = stream.clone()
            rows = slice(None) if positions is None else positions
            changed[rows] = formula(stream)[rows]
            return changed

        assert error(output, reference, {(1, "post_block"): change}) < 1e-4
        assert error(output, reference, {}) > 1e-3


def test_what_adds_nothing_changes_no_bit(steered: Any) -> None:
    llm, _ = steered
    zero = {hook: {1: [0.0] * _models.HIDDEN} for hook in HOOKS}
    plain = generate(llm, PROMPTS, [params()] * 4)
    specs: list[dict[str, Any]] = [
        {"steering_vectors": zero},
        {"steering_vectors": {"pre_attn": {0: {"vector": vector(1), "scale": 0}}}},
        {"steering_vectors": {"post_attn": {0: vector(1)}}},
        {},
    ]
    same = generate(llm, PROMPTS, [params(**s) for s in specs])
    for i in (0, 1, 3):  # The third one is steered, together with the others.
        assert tokens(plain[i]) == tokens(same[i])
        assert torch.equal(logprobs(plain[i]), logprobs(same[i]))
    assert not torch.equal(logprobs(plain[2]), logprobs(same[2]))


def test_conditions_are_decided_in_compiled_code(steered: Any) -> None:
    """Probes at one place for entries at another, in prompts and generated tokens."""
    llm, reference = steered
    probe, place, acts = vector(6), (0, "post_block"), (1, "post_attn")
    seen: list[torch.Tensor] = []

    def look(stream: torch.Tensor) -> torch.Tensor:
        seen.append(stream @ probe)
        return stream

    reference.logprobs(PROMPT, {place: look})
    middle = seen[-1].sort().values[2:-2]
    widest = int(middle.diff().argmax())
    threshold = float(middle[widest : widest + 2].mean())

    def act(stream: torch.Tensor) -> torch.Tensor:
        fires = seen[-1] > threshold
        return torch.where(fires[:, None], along(stream, V, -1), stream)

    when = {"probe": probe, "layer": place[0], "hook": place[1], "above": threshold}
    entry = {"vector": V, "op": "project_out", "when": when}
    asked = params(steering_vectors={acts[1]: {acts[0]: entry}})
    output, plain = generate(llm, [PROMPT] * 2, [asked, params()])
    assert error(plain, reference, {}) < 1e-4
    assert error(output, reference, {place: look, acts: act}) < 1e-4
    assert error(output, reference, {}) > 1e-3


def test_an_activation_is_selected_in_one_place_and_changed_in_another(
    steered: Any, transcoder: Path
) -> None:
    llm, reference = steered
    sae, found = load_sae(transcoder), list[torch.Tensor]()

    def read(stream: torch.Tensor) -> torch.Tensor:
        found.append(encode(sae, stream))
        return stream

    reference.logprobs(PROMPT, {(1, "mlp_in"): read})
    share = (found[-1] != 0).double().mean(dim=0)
    feature = int((share - 0.5).abs().argmin())

    def act(branch: torch.Tensor) -> torch.Tensor:
        change = 9.0 - found[-1][:, feature, None]
        return branch + change * sae.w_dec[feature].float()

    entry = {"op": "feature", "sae": "topk", "feature": feature, "value": 9.0}
    asked = params(steering_vectors={"mlp_out": {1: entry}})
    (output,) = generate(llm, [PROMPT], [asked])
    taps = {(1, "mlp_in"): read, (1, "mlp_out"): act}
    assert error(output, reference, taps) < 1e-4
    assert error(output, reference, {}) > 1e-3
