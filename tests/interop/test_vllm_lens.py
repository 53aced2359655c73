# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.support.models import llama
from vllm import LLM, SamplingParams
from vllm.interop.vllm_lens import SteeringVector, tensors
from vllm.interop.vllm_lens.consumer import steered
from vllm.v1.steering.errors import SteeringValidationError

PROMPT = "Anna went home and there."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    opened = LLM(
        str(model),
        vllm_lens_api=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
    )
    yield opened
    opened.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def reference(model: Path):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def asked(**args) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=args)


def streams_of(reference, tokens: list[int], change=None) -> torch.Tensor:
    """The output of each layer `[layers, tokens, hidden]`, after `change(layer, h)`."""
    found = []
    handles = []
    for number, layer in enumerate(reference.model.layers):

        def hook(module, inputs, output, number=number):
            states = output if change is None else change(number, output)
            found.append(states[0])
            return states

        handles.append(layer.register_forward_hook(hook))
    try:
        with torch.no_grad():
            reference(torch.tensor([tokens]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found)


def tokens_of(output) -> list[int]:
    """The tokens that have rows."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]


@pytest.mark.e2e
@pytest.mark.parametrize("layers", [True, [0, 2], "[2]"], ids=str)
def test_the_residual_stream_is_what_leaves_the_layers(llm, reference, layers) -> None:
    (output,) = llm.generate(PROMPT, asked(output_residual_stream=layers))
    stream = output.activations["residual_stream"]
    every = streams_of(reference, tokens_of(output))
    chosen = json.loads(layers) if isinstance(layers, str) else layers
    expected = every if chosen is True else every[chosen]
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

        expected = streams_of(reference, tokens_of(output), change)
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

        expected = streams_of(reference, tokens_of(output), change)
        stream = output.activations["residual_stream"]
        torch.testing.assert_close(stream, expected, rtol=0, atol=2e-4)


@pytest.mark.e2e
def test_who_asks_for_nothing_has_no_activations(llm) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert output.activations is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"output_residual_stream": [7]}, "outside of this model's layers 0 to 2"),
        ({"output_residual_stream": "[1"}, "must be JSON"),
        ({"output_residual_stream": {"layers": 1}}, "true or a list of layers"),
        ({"apply_hooks": []}, "hooks with code are not supported"),
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
    ):
        with pytest.raises(SteeringValidationError, match="apply_steering_vectors"):
            llm.generate(PROMPT, asked(apply_steering_vectors=[sent]))


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
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(changes) -> None:
    with pytest.raises(ValueError):
        tensors.decode(tensors.encode(torch.zeros(3)) | changes)


def test_rows_at_positions_are_steered() -> None:
    rows = torch.randn(4, 8)
    vectors = torch.randn(2, 8)
    entry = {"scale": 2.0, "norm_match": False, "positions": [1, 3]}
    changed = steered(rows, [0, 1, 2, 3], [entry | {"vectors": vectors.tolist()}])
    expected = rows.clone()
    expected[[1, 3]] += 2 * vectors
    torch.testing.assert_close(changed, expected)
