# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.streams import streams_of
from tests.support.plugins import HOOKS, install
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.utils.residual_fields import refuse_args
from vllm.interop.vllm_lens import (
    Hook,
    SteeringVector,
    client,
    hook_wire,
    responses,
    tensors,
)
from vllm.interop.vllm_lens.requests import translate
from vllm.v1.capture.frontend.http import response_results
from vllm.v1.capture.types import CaptureResult
from vllm.v1.hooks.frontend.parse import Allowed, parse_hooks
from vllm.v1.hooks.results import HookResult, decode, encode, merged_results
from vllm.v1.steering.errors import SteeringValidationError

PROMPT = "Anna went home and there."


def asked(**args) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=args)


def rows_of(reference, tokens: list[int], change=None) -> torch.Tensor:
    """The output of each layer `[layers, tokens, hidden]`, after `change(layer, h)`."""
    return torch.cat(streams_of(reference, tokens, change)[1])


def tokens_of(output) -> list[int]:
    """The tokens that have rows."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]


@pytest.mark.e2e
@pytest.mark.parametrize("layers", [True, 1, [0, 2], "[2]"], ids=str)
def test_the_residual_stream_is_what_leaves_the_layers(llm, reference, layers) -> None:
    (output,) = llm.generate(PROMPT, asked(output_residual_stream=layers))
    stream = output.activations["residual_stream"]
    every = rows_of(reference, tokens_of(output))
    chosen = json.loads(layers) if isinstance(layers, str) else layers
    expected = every if chosen == 1 else every[chosen]
    torch.testing.assert_close(stream, expected, rtol=0, atol=1e-4)


@pytest.mark.e2e
@pytest.mark.parametrize("norm_match", [False, True])
def test_rows_are_those_after_the_layers_own_steering(
    llm, reference, norm_match: bool
) -> None:
    vectors = torch.randn(2, 64)
    sent = SteeringVector(
        activations=vectors, layer_indices=[0, 2], scale=0.7, norm_match=norm_match
    )
    for form in ([sent], json.dumps([sent.model_dump()])):
        params = asked(output_residual_stream=True, apply_steering_vectors=form)
        (output,) = llm.generate(PROMPT, params)

        def change(layer: int, states: torch.Tensor) -> torch.Tensor:
            if layer not in (0, 2):
                return states
            added = vectors[0 if layer == 0 else 1]
            if norm_match:
                norms = states.norm(dim=-1, keepdim=True)
                added = norms * added / added.norm()
            return states + 0.7 * added

        expected = rows_of(reference, tokens_of(output), change)
        stream = output.activations["residual_stream"]
        torch.testing.assert_close(stream, expected, rtol=0, atol=2e-4)


@pytest.mark.e2e
def test_rows_are_those_after_vectors_for_all_requests(llm, reference) -> None:
    vectors = torch.randn(2, 64)
    given = {1: vectors[0].tolist(), 2: vectors[1].tolist()}
    llm.set_steering(vectors={"post_block": given})
    try:
        (output,) = llm.generate(PROMPT, asked(output_residual_stream=True))
    finally:
        llm.clear_steering()
    expected = rows_of(
        reference,
        tokens_of(output),
        lambda layer, states: states + vectors[layer - 1] if layer else states,
    )
    stream = output.activations["residual_stream"]
    torch.testing.assert_close(stream, expected, rtol=0, atol=2e-4)


@pytest.mark.e2e
@pytest.mark.parametrize("norm_match", [False, True])
def test_vectors_of_positions_act_at_theirs(llm, reference, norm_match: bool) -> None:
    rows = torch.randn(2, 3, 64)
    at = [0, 2, 4]
    sent = SteeringVector(
        activations=rows, layer_indices=[1, 2], norm_match=norm_match, scale=0.5
    )
    for positions in (at, None):
        sent.position_indices = positions
        params = asked(
            output_residual_stream=True,
            apply_steering_vectors=json.dumps([sent.model_dump()]),
        )
        (output,) = llm.generate(PROMPT, params)

        def change(layer: int, states: torch.Tensor, places=positions) -> torch.Tensor:
            if not layer:
                return states
            places = [0, 1, 2] if places is None else places
            added = rows[layer - 1]
            if norm_match:
                norms = states[0, places].norm(dim=-1, keepdim=True)
                added = norms * added / added.norm(dim=-1, keepdim=True)
            changed = states.clone()
            changed[0, places] += 0.5 * added
            return changed

        expected = rows_of(reference, tokens_of(output), change)
        stream = output.activations["residual_stream"]
        torch.testing.assert_close(stream, expected, rtol=0, atol=2e-4)


@pytest.mark.e2e
def test_a_request_for_nothing_has_no_activations(llm) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert output.activations is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"output_residual_stream": [7]}, "outside of this model's layers 0 to 2"),
        ({"output_residual_stream": "[1"}, "must be JSON"),
        ({"output_residual_stream": {"layers": 1}}, "true or a list of layers"),
        ({"output_residual_stream": "[" * 5000}, "nested too deeply"),
        ({"output_residual_stream": "[" * 90 + "]" * 90}, "lists and objects deep"),
        ({"apply_hooks": "[1" + "0" * 30 + "]"}, "64 bits"),
    ],
)
def test_what_cannot_be_carried_is_refused(llm, args, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPT, asked(**args))


@pytest.mark.e2e
def test_a_vector_of_another_form_is_refused(llm) -> None:
    for sent in (
        {"activations": [[1.0]]},
        {"activations": [1.0], "layer_indices": [0]},
        {"activations": [[None]], "layer_indices": [0]},
        {"activations": [["a"]], "layer_indices": [0]},
    ):
        with pytest.raises(SteeringValidationError, match="apply_steering_vectors"):
            llm.generate(PROMPT, asked(apply_steering_vectors=[sent]))


@pytest.mark.e2e
def test_vectors_at_one_layer_are_added(llm) -> None:
    v, w = torch.linspace(-1, 1, 64), torch.linspace(2, 0, 64)
    together = SteeringVector(activations=(v + w)[None], layer_indices=[1])
    apart = SteeringVector(activations=torch.stack([v, w]), layer_indices=[1, 1])
    own = {"post_block": {1: v.tolist()}}
    rest = SteeringVector(activations=w[None], layer_indices=[1])
    streams = []
    for vector, beside in ((together, None), (apart, None), (rest, own)):
        params = asked(output_residual_stream=True, apply_steering_vectors=[vector])
        params.steering_vectors = beside
        (output,) = llm.generate(PROMPT, params)
        streams.append(output.activations["residual_stream"])
    for stream in streams[1:]:
        torch.testing.assert_close(stream, streams[0], rtol=0, atol=1e-4)
    params.steering_vectors = {"post_block": {"all": v.tolist()}}
    with pytest.raises(SteeringValidationError, match="single layers"):
        llm.generate(PROMPT, params)


@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_tensors_survive_the_wire(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = torch.randn(shape).to(dtype)
    sent = json.loads(json.dumps(tensors.encode(tensor)))
    assert torch.equal(tensors.decode(sent), tensor)
    assert sent["dtype"] == ("int16" if dtype == torch.bfloat16 else str(dtype)[6:])


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "%"},
        {"data": "AAAA"},
        {"shape": [5]},
        {"shape": [-1]},
        {"shape": [1 << 40]},
        {"compression": "gzip"},
        {"original_dtype": "torch.nothing"},
        {"original_dtype": "torch.quint8"},
        {"shape": [1] * 99},
        {"shape": [1 << 40, 0]},
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(changes) -> None:
    with pytest.raises(ValueError):
        tensors.decode(tensors.encode(torch.zeros(3)) | changes)


@pytest.mark.parametrize("status", ["error", "partial_error"])
def test_rows_that_are_missing_are_not_passed_over(status: str) -> None:
    lost = CaptureResult(("r", -1, "*"), status, "the disk is full", {})
    output = SimpleNamespace(
        request_id="r",
        lens_result=None,
        capture_results={"vllm_lens": lost},
    )
    with pytest.raises(RuntimeError, match="r are not complete: the disk is full"):
        responses.activations_of(output)
    assert responses.response_activations([output]) is None
    told = response_results([output])["vllm_lens"]
    assert told["status"] == status and told["error"] == "the disk is full"
    answer = {"choices": [], "capture_results": {"vllm_lens": told}}
    with pytest.raises(RuntimeError, match="not complete: the disk is full"):
        client._output(answer, "")


HOOKED = Allowed({layer: ("pre_attn", "post_block") for layer in range(3)}, code=False)


@pytest.mark.e2e
def test_hooks_see_and_change_what_hooks_of_transformers_do(llm, reference) -> None:
    def keep(ctx, h):
        ctx.saved.setdefault(ctx.layer_idx, []).append(h.clone())

    def turn(ctx, h):
        return h.roll(1, dims=-1) * (1 + ctx.layer_idx)

    def blank(ctx, h):
        h[:, :8] = 0.0  # In place, and nothing returned.

    hooks = [Hook(turn, [0, 1]), Hook(blank, [2]), Hook(keep, [0, 1, 2])]
    params = asked(apply_hooks=[*hooks, Hook(keep, [1], pre=True)])
    plain, (output,) = llm.generate(PROMPT, asked()), llm.generate(PROMPT, params)

    def change(layer: int, states: torch.Tensor) -> torch.Tensor:
        if layer < 2:
            return states.roll(1, dims=-1) * (1 + layer)
        states = states.clone()
        states[..., :8] = 0.0
        return states

    expected = rows_of(reference, tokens_of(output), change)
    count = expected.shape[1]
    assert sorted(output.hook_results) == ["0", "1", "2", "3"]
    for layer, parts in output.hook_results["2"].items():
        assert [len(part) for part in parts][:2] == [len(output.prompt_token_ids), 1]
        found = torch.cat(parts)[:count]
        torch.testing.assert_close(found, expected[layer], rtol=0, atol=1e-4)
    entering = torch.cat(output.hook_results["3"][1])[:count]
    torch.testing.assert_close(entering, expected[0], rtol=0, atol=1e-4)
    again = llm.generate(PROMPT, asked())  # Nothing of it is left in the prefix cache.
    assert again[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert again[0].hook_results is None


@pytest.mark.e2e
def test_the_residual_stream_is_what_leaves_the_hooks(llm, reference) -> None:
    def halve(ctx, h):
        return h * 0.5

    vector = SteeringVector(activations=torch.ones(1, 64), layer_indices=[2])
    (output,) = llm.generate(
        PROMPT,
        asked(
            output_residual_stream=True,
            apply_hooks=[Hook(halve, [1, 2])],
            apply_steering_vectors=[vector],
        ),
    )

    def change(layer: int, states: torch.Tensor) -> torch.Tensor:
        return states if layer == 0 else (states + (layer == 2)) * 0.5

    expected = rows_of(reference, tokens_of(output), change)
    found = output.activations["residual_stream"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.e2e
def test_hooks_of_one_request_leave_the_others_alone(llm) -> None:
    def noise(ctx, h):
        return h * 3 + 1

    prompts = [PROMPT, "The cat is here.", PROMPT]
    plain = llm.generate(prompts, asked())
    hooked = asked(apply_hooks=[Hook(noise, [1])])
    found = llm.generate(prompts, [asked(), hooked, asked()])
    for number in (0, 2):
        expected = plain[number].outputs[0].token_ids
        assert found[number].outputs[0].token_ids == expected
    assert found[1].outputs[0].token_ids != plain[1].outputs[0].token_ids


@pytest.mark.e2e
def test_parameters_are_whole_and_have_the_models_names(llm, reference) -> None:
    def unembed(ctx, h):
        ctx.saved["logits"] = h[-1] @ ctx.get_parameter("lm_head.weight").T

    (output,) = llm.generate(PROMPT, asked(apply_hooks=[Hook(unembed, [1])]))
    rows = rows_of(reference, tokens_of(output))[1]
    expected = rows @ reference.lm_head.weight.T
    found = output.hook_results["0"]["logits"]
    assert any(torch.allclose(found, row, atol=1e-3) for row in expected)
    assert llm.prefetch_params(["lm_head.weight"]) == ["lm_head.weight"]
    llm.clear_prefetched()
    with pytest.raises(ValueError, match="no parameter 'lm_head.nothing'"):
        llm.prefetch_params(["lm_head.nothing"])


@pytest.mark.e2e
def test_registered_hooks_run_for_all_until_they_are_cleared(llm) -> None:
    def count(ctx, h):
        ctx.saved["tokens"] = ctx.saved.get("tokens", 0) + ctx.seq_len

    assert llm.register_hooks([Hook(count, [0])]) == 1
    try:
        outputs = llm.generate([PROMPT, PROMPT], asked())
        found = llm.collect_hook_results()
        assert found.keys() >= {output.request_id for output in outputs}
        for output in outputs:
            assert output.hook_results is None
            saved = found[output.request_id]["0"]["tokens"]
            assert saved >= len(tokens_of(output))
        with pytest.raises(ValueError, match="65 would be registered"):
            llm.register_hooks([Hook(count, [0])] * 64)
        with pytest.raises(ValueError, match="must be a list of layers"):
            llm.register_hooks([Hook(count, ["0"])], ["lm_head.nothing"])
        with pytest.raises(ValueError, match="registered for all requests"):
            llm.generate(PROMPT, SamplingParams(n=2))
        llm.clear_hook_results()
        assert llm.collect_hook_results() == {}
        llm.generate(PROMPT, asked())
        assert len(llm.collect_hook_results()) == 1
    finally:
        llm.clear_hooks()
    assert llm.collect_hook_results() == {}
    llm.generate(PROMPT, asked())
    assert llm.collect_hook_results() == {}


@pytest.mark.e2e
def test_a_hook_that_raises_is_an_error_of_its_request(llm) -> None:
    def raises(ctx, h):
        raise RuntimeError("not this one")

    def leaves(ctx, h):
        raise SystemExit(3)

    def widens(ctx, h):
        return h.repeat(1, 2)

    for hook, message in (
        (raises, "not this one"),
        (leaves, "SystemExit"),
        (widens, r"not a tensor \(\d+, 64"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPT, asked(apply_hooks=[Hook(hook, [0])]))
    assert llm.generate(PROMPT, asked())[0].outputs[0].token_ids


@pytest.mark.e2e
def test_installed_functions_run_by_their_names(llm, tmp_path, monkeypatch) -> None:
    install(tmp_path, "lens_hooks", HOOKS, group="vllm.hooks", scale="lens_hooks:scale")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = {"name": "scale", "params": {"by": 4.0}}
    sent = [{"fn": fn, "layer_indices": [0, 1]}]
    for form in (sent, json.dumps(sent), [Hook(fn, [0, 1])]):
        (output,) = llm.generate(PROMPT, asked(apply_hooks=form))
        first, second = output.hook_results["0"]["rows"][:2]
        assert first.shape == second.shape == (len(output.prompt_token_ids), 64)
        assert second.norm() > first.norm()
    with pytest.raises(ValueError, match=r"no hook 'gone' is installed; .*'scale'"):
        llm.generate(PROMPT, asked(apply_hooks=[Hook("gone", [0])]))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"fn": {"cloudpickle": "AAAA"}, "layer_indices": [0]}, "runs no code"),
        ({"fn": {"name": "nobody"}, "layer_indices": [0]}, "no hook 'nobody'"),
        ({"fn": {"name": "nobody"}, "layer_indices": [3]}, "layers are 0 to 2"),
        ({"fn": {"name": "nobody"}, "layer_indices": []}, "list of layers"),
        ({"fn": {"name": "n"}, "layer_indices": [0], "pre": 1}, "true or false"),
        ({"fn": {"name": "n"}, "layer_indices": [0], "at": 1}, "no such key"),
        ({"layer_indices": [0]}, "a hook is"),
        ("[{", "must be JSON"),
        ([{"fn": {"name": "n"}, "layer_indices": [0]}] * 65, "at most 64"),
    ],
    ids=str,
)
def test_hooks_that_cannot_run_are_refused(raw, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hooks(raw, HOOKED, "extra_args.apply_hooks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_hooks_save_survives_both_wires(dtype: torch.dtype) -> None:
    saved = {"rows": [torch.arange(6).view(2, 3).to(dtype)], 3: "x", "none": None}
    empty = torch.empty(0, 4)
    result = HookResult({"0": saved | {"empty": empty}}, {}, {})
    found = decode(encode(result, pickles=False), pickles=False)
    assert torch.equal(found.own["0"]["rows"][0], saved["rows"][0])
    assert found.own["0"][3] == "x" and found.own["0"]["empty"].shape == (0, 4)
    sent = json.loads(json.dumps(hook_wire.encode(found.own)))
    again = hook_wire.decode(sent)["0"]
    assert torch.equal(again["rows"][0], saved["rows"][0]) and again["3"] == "x"


def test_saved_values_have_vllm_lens_form_on_the_wire() -> None:
    """Its client decodes tensors and pickles directly under a key, and nothing else."""
    rows = torch.arange(6.0).view(2, 3)
    saved = {
        "tensor": rows,
        "plain": {"a": [1, 2.5, None, "x"]},
        "parts": [rows, rows],
        "nested": {"rows": rows},
        "pair": (1, 2),
        "nan": float("nan"),
        "nans": [float("inf")],
        "array": np.ones(2, np.float32),
    }
    sent = json.loads(json.dumps(hook_wire.encode({"0": saved}), allow_nan=False))["0"]
    assert sent["tensor"]["__type__"] == "tensor"
    assert sent["plain"] == saved["plain"]
    for name in ("parts", "nested", "pair", "nan", "nans", "array"):
        assert sent[name].keys() == {"__type__", "data"}, name
        assert sent[name]["__type__"] == "cloudpickle"
    found = hook_wire.decode({"0": sent})["0"]
    assert torch.equal(torch.cat(found["parts"]), torch.cat(saved["parts"]))
    assert torch.equal(found["nested"]["rows"], rows) and found["pair"] == (1, 2)
    assert found["nan"] != found["nan"] and found["nans"] == [float("inf")]
    assert isinstance(found["array"], np.ndarray)


def test_lists_of_several_pipeline_stages_are_joined() -> None:
    first = HookResult({"0": {"parts": [1], "last": "a"}}, {}, {})
    second = HookResult({"0": {"parts": [2, 3], "last": "b"}}, {}, {})
    parts = [encode(one, pickles=False) for one in (first, second)]
    found = merged_results([parts[0], None, parts[1]], pickles=False)
    assert found.own == {"0": {"parts": [1, 2, 3], "last": "b"}}


def test_the_names_are_those_of_the_package() -> None:
    import vllm.interop.vllm_lens as ours

    theirs = {
        *("decode_activations", "deserialize_hook_results", "deserialize_tensor"),
        *("Hook", "HookContext", "serialize_activations", "serialize_hook_results"),
        *("serialize_tensor", "SteeringVector"),
    }
    assert theirs <= set(ours.__all__)
    rows = torch.randn(2, 3).bfloat16()
    response = {"activations": ours.serialize_activations({"residual_stream": rows})}
    found = ours.decode_activations(response)
    assert torch.equal(found["residual_stream"], rows)
    assert ours.decode_activations({}) == ours.decode_activations({"activations": None})
    assert ours.VLLMLensClient("http://here:1/v1/").base_url == "http://here:1"
    vector = SteeringVector(activations=torch.ones(2, 4), layer_indices=[7, 3])
    assert vector.layer_index_map == {7: 0, 3: 1}


def test_a_hook_is_checked_and_read_from_its_json() -> None:
    with pytest.raises(ValueError, match="layer_indices is empty"):
        Hook(lambda ctx, h: None, [])
    made = Hook(lambda ctx, h: h + 1, [2], pre=True)
    again = Hook.model_validate(json.loads(json.dumps(made.model_dump())))
    assert again.fn(None, 1) == 2 and (again.layer_indices, again.pre) == ([2], True)
    named = Hook.model_validate({"fn": {"name": "n"}, "layer_indices": [0]})
    assert named.fn == {"name": "n"} and Hook.model_validate(named) is named


@pytest.mark.parametrize("kind", [CompletionResponse, ChatCompletionResponse])
def test_responses_have_its_fields_only_if_there_is_something(kind) -> None:
    """vllm-lens' client decodes what is under the keys, if they are there."""
    fields = {"activations", "hook_results"}
    plain = kind.model_construct(choices=[])
    assert not fields & plain.model_dump().keys()
    assert not fields & json.loads(plain.model_dump_json()).keys()
    full = kind.model_construct(choices=[], activations={"a": 1}, hook_results={})
    assert fields <= full.model_dump().keys()


@pytest.mark.e2e
def test_a_request_may_ask_for_a_prompt_without_the_prefix_cache(llm) -> None:
    config = llm.llm_engine.vllm_config
    for value, expected in ((True, True), ("true", True), (1, True), ("false", False)):
        params = asked(skip_reading_prefix_cache=value)
        translate(params, config)
        assert params.skip_reading_prefix_cache is expected and not params.extra_args
    with pytest.raises(ValueError, match="skip_reading_prefix_cache must be true or"):
        translate(asked(skip_reading_prefix_cache=[1]), config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("output_qk", "queries and keys are not captured"),
        ("activations_transport", "Accept: application/safetensors"),
        ("output_residual_strem", "did you mean output_residual_stream?"),
        ("aply_hooks", "did you mean apply_hooks?"),
        ("output_residual_streams", "did you mean output_residual_stream?"),
        ("apply_hook", "did you mean apply_hooks?"),
        ("apply_steering_vector", "did you mean apply_steering_vectors?"),
        ("hooks", "send them as apply_hooks"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_args({name: "[1]"}, "vllm_xargs")


def test_objects_are_pickled_only_where_code_is_run() -> None:
    result = HookResult({"0": {"z": 1j}}, {}, {})
    with pytest.raises(TypeError, match="saved a complex"):
        encode(result, pickles=False)
    data = encode(result, pickles=True)
    assert decode(data, pickles=True).own == {"0": {"z": 1j}}
    with pytest.raises(ValueError, match="extension"):
        decode(data, pickles=False)
