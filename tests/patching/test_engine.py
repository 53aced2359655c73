# SPDX-License-Identifier: Apache-2.0
"""Sweeps of an engine equal hooks in transformers that change one row at a time."""

import io
import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.support.inner_reference import InnerReference, Tap
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import generate, logprobs, params, tokens
from vllm import SamplingParams
from vllm.patching import ablation_sweep, causal_trace, offline, patch_sweep, presets
from vllm.patching.result import Found
from vllm.v1.readouts.modules import save_probe
from vllm.v1.residual.tap import READ_ONLY
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KINDS = (
    *("llama", "gemma3", "cohere", "mixtral"),
    # Operations in compiled code: `tests/v1/steering/apart/test_compiled.py`.
    pytest.param("llama compiled", marks=pytest.mark.soak),
)
"""Plain blocks, norms behind branches, parallel branches, and experts."""
on_one_kind = pytest.mark.parametrize("swept", KINDS[:1], indirect=True)
"""For what does not depend on the layers."""
ALL = slice(None)
CLEAN = [(37 * n * n + 11 * n + 3) % _models.VOCAB for n in range(40)]
CORRUPT = [*CLEAN[:3], 93, *CLEAN[4:]]
LONGER = [*CLEAN[:3], 93, 94, *CLEAN[4:]]
PLACES = [2, 3, 4, 31, 32, 39]
"""On both sides of a block's end."""
ANSWER, FOIL = 7, 9
BOUND = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def swept(request: Any, tmp_path_factory: Any) -> Iterator[tuple[Any, Any]]:
    kind, _, compiled = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(kind)
    path = _models.save(kind, folder / "model")
    probe = folder / "first.safetensors"
    save_probe(
        probe,
        torch.eye(_models.HIDDEN)[:1],
        layer=_models.LAYERS - 1,
        hook="post_block",
    )
    llm = _engine.engine(
        path,
        enforce_eager=not compiled,
        enable_patching=True,
        enable_steering=False,
        enable_prefix_caching=True,
        enable_readouts=True,
        readout_modules={"first": str(probe)},
        hook_points=["all"],
        block_size=32,
        max_num_seqs=32,
        max_logprobs=-1,
    )
    yield llm, InnerReference(path)
    llm.llm_engine.engine_core.shutdown()


def hooks_of(llm: Any) -> list[str]:
    """All hook points of any layer whose rows may change."""
    points = llm.llm_engine.vllm_config.capture_config.hook_points
    found = {hook for of_layer in points.values() for hook in of_layer}
    return sorted(found - set(READ_ONLY))


def difference(
    reference: Any, prompt: list[int], tap: Tap | None = None, change: Any = None
) -> float:
    found = reference.logprobs(prompt, {tap: change} if tap else {})[-1]
    return float(found[ANSWER] - found[FOIL])


def replacing(position: int, row: torch.Tensor, part: slice = ALL) -> Any:
    def change(x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.clone().reshape(-1, shape[-1])
        x[position, part] = row[part]
        return x.reshape(shape)

    return change


@on_one_kind
def test_requests_beside_those_of_a_sweep_keep_their_likeliest_tokens(
    swept: Any,
) -> None:
    llm, _ = swept
    asked = [{"logprobs": 2}, {"logprob_token_ids": [0, ANSWER, FOIL]}, {"logprobs": 5}]
    sampling = [
        SamplingParams(max_tokens=1, temperature=0, detokenize=False, **one)  # type: ignore[arg-type]
        for one in asked
    ]
    prompts = [CLEAN, CORRUPT, LONGER]
    alone = [generate(llm, [p], [s])[0] for p, s in zip(prompts, sampling, strict=True)]
    for other, output in zip(alone, generate(llm, prompts, sampling), strict=True):
        expected, found = (
            {token: one.logprob for token, one in each.outputs[0].logprobs[0].items()}
            for each in (other, output)
        )
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("prompt", [CORRUPT, LONGER], ids=["equal", "longer"])
def test_every_cell_is_what_hooks_do(swept: Any, prompt: list[int]) -> None:
    llm, reference = swept
    hooks = hooks_of(llm)
    assert len(hooks) >= 14
    places = sorted({*PLACES, len(prompt) - 1})
    result = patch_sweep(
        llm,
        CLEAN,
        prompt,
        hooks=hooks,
        positions=places,
        answer=ANSWER,
        foil=FOIL,
        progress=False,
    )
    assert result.clean == pytest.approx(difference(reference, CLEAN), abs=BOUND)
    assert result.corrupt == pytest.approx(difference(reference, prompt), abs=BOUND)
    assert result.noise_floor < 1e-5
    shift = len(prompt) - len(CLEAN)
    points = llm.llm_engine.vllm_config.capture_config.hook_points
    for hook in hooks:
        having = [layer for layer in range(_models.LAYERS) if hook in points[layer]]
        moved = 0.0
        for layer in having:
            rows = reference.rows_at(CLEAN, (layer, hook))
            for number, place in enumerate(places):
                found = float(result.values[hook][layer, number])
                if shift and 3 <= place < 5:
                    assert math.isnan(found)
                    continue
                change = replacing(place, rows[place if place < 3 else place - shift])
                expected = difference(reference, prompt, (layer, hook), change)
                assert found == pytest.approx(expected, abs=BOUND), (hook, layer, place)
                moved = max(moved, abs(found - result.corrupt))
        # Aligned tokens of unequal prompts are equal, and so are their embeddings.
        assert moved > 10 * BOUND or (shift and hook == "embed"), hook
    assert not llm.captured()["names"]


def test_every_head_is_what_hooks_do(swept: Any) -> None:
    llm, reference = swept
    for hook in ("q", "k", "v", "z"):
        moved = 0.0
        result = patch_sweep(
            llm,
            CLEAN,
            CORRUPT,
            hooks=hook,
            heads="all",
            layers=[1, 2],
            positions=[3, 39],
            answer=ANSWER,
            foil=FOIL,
            progress=False,
        )
        places = product(enumerate((1, 2)), result.heads, enumerate((3, 39)))
        for (row, layer), head, (column, place) in places:
            rows = reference.rows_at(CLEAN, (layer, hook))
            size = rows.shape[1] // len(result.heads)
            part = slice(head * size, (head + 1) * size)
            change = replacing(place, rows[place], part)
            expected = difference(reference, CORRUPT, (layer, hook), change)
            found = float(result.values[hook][row, head, column])
            assert found == pytest.approx(expected, abs=BOUND), (hook, layer, head)
            moved = max(moved, abs(expected - result.corrupt))
        assert moved > 10 * BOUND, hook


def test_answers_of_several_tokens_and_distributions(swept: Any) -> None:
    llm, reference = swept
    answer, foil = [7, 30, 31], [9, 8]

    def score(changes: Any = None) -> float:
        total = 0.0
        for sign, of in ((1, answer), (-1, foil)):
            for count, token in enumerate(of):
                ids = CORRUPT + of[:count]
                total += sign * float(reference.logprobs(ids, changes or {})[-1][token])
        return total

    asked: dict[str, Any] = {"positions": [3, 39], "layers": [1], "progress": False}
    result = patch_sweep(llm, CLEAN, CORRUPT, answer=answer, foil=foil, **asked)
    rows = reference.rows_at(CLEAN, (1, "post_block"))
    for number, place in enumerate((3, 39)):
        change = {(1, "post_block"): replacing(place, rows[place])}
        found = result.values["post_block"][0, number]
        assert found == pytest.approx(score(change), abs=4 * BOUND)
    assert result.corrupt == pytest.approx(score(), abs=4 * BOUND)
    result = patch_sweep(llm, CLEAN, CORRUPT, metric="kl", **asked)
    p = reference.logprobs(CLEAN, {})[-1]
    q = reference.logprobs(CORRUPT, {})[-1]
    assert result.clean == pytest.approx(0.0, abs=1e-6)
    whole = float((p.exp() * (p - q)).sum())
    assert result.corrupt == pytest.approx(whole, abs=BOUND)


def test_ablations_and_traces_equal_hooks(swept: Any) -> None:
    llm, reference = swept
    asked: dict[str, Any] = {"positions": PLACES, "answer": ANSWER, "progress": False}
    hook, layer = "post_attn", 1
    rows = reference.rows_at(CLEAN, (layer, hook))
    for source, row in (("zeros", rows[0] * 0), ("mean", rows.mean(dim=0))):
        result = ablation_sweep(
            llm, CLEAN, source=source, hooks=hook, metric="logprob", **asked
        )
        for number, place in enumerate(PLACES):
            changes = {(layer, hook): replacing(place, row)}
            expected = float(reference.logprobs(CLEAN, changes)[-1][ANSWER])
            found = result.values[hook][layer, number]
            assert found == pytest.approx(expected, abs=BOUND)
    heads = ablation_sweep(
        llm, CLEAN, source="mean", hooks="z", heads=[1], metric="logprob", **asked
    )
    mean = reference.rows_at(CLEAN, (layer, "z")).mean(dim=0)
    part = slice(len(mean) // 2, len(mean))
    for number, place in enumerate(PLACES):
        changes = {(layer, "z"): replacing(place, mean, part)}
        expected = float(reference.logprobs(CLEAN, changes)[-1][ANSWER])
        found = heads.values["z"][layer, 0, number]
        assert found == pytest.approx(expected, abs=BOUND)
    trace = causal_trace(llm, CLEAN, [3, 4], hooks=hooks_of(llm), **asked)
    again = causal_trace(llm, CLEAN, [3, 4], hooks=hooks_of(llm), **asked)
    plain = float(reference.logprobs(CLEAN, {})[-1][ANSWER])
    assert trace.clean == pytest.approx(plain, abs=BOUND)
    assert abs(trace.clean - trace.corrupt) > 1e-3
    for name, values in trace.values.items():
        assert np.allclose(values, again.values[name], atol=1e-5, equal_nan=True)
    # The rows that enter the last layer carry everything to the last token.
    last = trace.values["post_block"][_models.LAYERS - 1, -1]
    assert last == pytest.approx(trace.clean, abs=BOUND)


@on_one_kind
def test_presets_are_sweeps_at_their_hook_points(swept: Any) -> None:
    llm, _ = swept
    asked: dict[str, Any] = {"answer": ANSWER, "foil": FOIL, "progress": False}
    expected = patch_sweep(llm, CLEAN, CORRUPT, hooks="pre_attn", **asked)
    found = presets.get_act_patch_resid_pre(llm, CLEAN, CORRUPT, **asked)
    values = expected.values["pre_attn"]
    assert np.allclose(found.values["pre_attn"], values, atol=1e-5)
    one = presets.get_act_patch_resid_pre(
        llm, CLEAN, CORRUPT, positions="together", **asked
    )
    assert np.allclose(one.values["pre_attn"][:, 0], one.clean, atol=1e-5)
    heads = presets.get_act_patch_attn_head_out_all_pos(llm, CLEAN, CORRUPT, **asked)
    assert heads.values["z"].shape == (_models.LAYERS, 2, 1)
    keys = presets.get_act_patch_attn_head_k_all_pos(llm, CLEAN, CORRUPT, **asked)
    assert keys.values["k"].shape == (_models.LAYERS, 1, 1)


@on_one_kind
def test_a_probe_is_a_metric(swept: Any) -> None:
    llm, reference = swept
    asked: dict[str, Any] = {"positions": [3], "layers": [0], "progress": False}
    result = patch_sweep(llm, CLEAN, CORRUPT, metric="probe:first", **asked)
    last = _models.LAYERS - 1
    rows = [reference.rows_at(p, (last, "post_block")) for p in (CLEAN, CORRUPT)]
    found = result.clean, result.corrupt
    assert found == pytest.approx([float(one[-1, 0]) for one in rows], abs=BOUND)


@on_one_kind
def test_a_run_stays_under_a_name_and_is_used_again(swept: Any) -> None:
    llm, _ = swept
    asked: dict[str, Any] = {"positions": [3], "answer": ANSWER, "foil": FOIL}
    first = patch_sweep(
        llm, CLEAN, CORRUPT, run="kept", progress=False, resume=False, **asked
    )
    again = patch_sweep(llm, CLEAN, CORRUPT, run="kept", progress=False, **asked)
    alone = patch_sweep(llm, None, CORRUPT, run="kept", progress=False, **asked)
    for other in (again, alone):
        values = other.values["post_block"]
        assert np.allclose(first.values["post_block"], values, atol=1e-5)
    assert math.isnan(alone.clean)
    llm.drop_captured("kept")
    with pytest.raises(SteeringValidationError, match="no run is kept"):
        patch_sweep(llm, None, CORRUPT, run="kept", progress=False, **asked)


def test_a_runs_own_rows_change_no_bit_and_no_other_request(swept: Any) -> None:
    llm, _ = swept
    hooks = dict.fromkeys(hooks_of(llm), "all")
    spec = {"run": "own", "hooks": hooks}
    llm.reset_prefix_cache()
    (plain,) = generate(llm, [CLEAN], [params(capture={"patch_source": spec})])
    others = [[(7 * i + j) % _models.VOCAB for j in range(9 + i)] for i in range(6)]
    llm.reset_prefix_cache()
    expected = generate(llm, [*others, CLEAN], [params()] * 7)
    entry = {"op": "replace", "from": {"run": "own"}, "positions": "all_prompt"}
    points = llm.llm_engine.vllm_config.capture_config.hook_points
    every = {
        hook: {layer: entry for layer in points if hook in points[layer]}
        for hook in hooks
    }
    llm.reset_prefix_cache()
    mixed = generate(
        llm, [*others, CLEAN], [params()] * 6 + [params(steering_vectors=every)]
    )
    for one, other in zip(expected, mixed, strict=True):
        assert tokens(one) == tokens(other)
        assert torch.equal(logprobs(one), logprobs(other))
    changed = params(
        patch=[
            {
                "layer": 1,
                "hook": "post_block",
                "dest_position": 38,
                "source_run": "own",
                "source_position": 37,
            }
        ]
    )
    llm.reset_prefix_cache()
    mixed = generate(llm, [*others, CLEAN], [params()] * 6 + [changed])
    for one, other in zip(expected[:6], mixed[:6], strict=True):
        assert torch.equal(logprobs(one), logprobs(other))
    assert not torch.equal(logprobs(expected[6]), logprobs(mixed[6]))
    assert tokens(plain) == tokens(expected[6])
    llm.drop_captured("own")


@on_one_kind
def test_an_interrupt_returns_what_there_is(swept: Any) -> None:
    llm, _ = swept
    seen: list[Found] = []

    def interrupt(done: Found) -> None:
        seen.append(done)
        if len(seen) == 80:
            raise KeyboardInterrupt

    asked: dict[str, Any] = {"answer": ANSWER, "foil": FOIL, "progress": False}
    part = patch_sweep(llm, CLEAN, CORRUPT, on_cell=interrupt, **asked)
    whole = patch_sweep(llm, CLEAN, CORRUPT, **asked)
    known = ~np.isnan(part.values["post_block"])
    assert 0 < known.sum() < known.size
    assert np.allclose(
        part.values["post_block"][known], whole.values["post_block"][known], atol=1e-5
    )
    assert not np.isnan(whole.values["post_block"]).any()
    assert not llm.captured()["names"]


@on_one_kind
def test_a_bar_counts_the_cells(swept: Any, monkeypatch: Any) -> None:
    llm, _ = swept
    shown = io.StringIO()

    def bar(count: int, progress: bool) -> Any:
        options: dict[str, Any] = {"unit": "cell", "mininterval": 0, "file": shown}
        return tqdm(total=count, disable=not progress, **options)

    monkeypatch.setattr(offline, "progress_bar", bar)
    asked: dict[str, Any] = {"answer": ANSWER, "foil": FOIL, "positions": [3, 39]}
    result = patch_sweep(llm, CLEAN, CORRUPT, **asked)
    assert np.isfinite(result.values["post_block"]).all()
    last = shown.getvalue().rstrip().rpartition("\r")[2]
    done, whole = re.findall(r"(\d+)/(\d+) \[", last)[0]
    assert last.startswith("100%") and "cell/s" in last and done == whole
    shown.truncate(0)
    patch_sweep(llm, CLEAN, CORRUPT, progress=False, **asked)
    assert not shown.getvalue().strip("\0")


@on_one_kind
def test_what_does_not_fit_is_refused_before_the_first_cell(swept: Any) -> None:
    llm, _ = swept
    asked: dict[str, Any] = {"answer": ANSWER, "foil": FOIL, "progress": False}
    for change, parameter in (
        ({"mask": [1.0]}, "mask"),
        ({"alpha": "much"}, "alpha"),
        ({"mask": {"indices": [_models.HIDDEN]}}, "mask"),
    ):
        with pytest.raises(SteeringValidationError) as found:
            patch_sweep(llm, CLEAN, CORRUPT, **{**asked, **change})
        assert parameter in str(found.value.parameter)
    with pytest.raises(SteeringValidationError, match="shape"):
        ablation_sweep(llm, CLEAN, source=[1.0, 2.0], **asked)
    with pytest.raises(SteeringValidationError, match="no steering module"):
        ablation_sweep(llm, CLEAN, source="nothing", **asked)
