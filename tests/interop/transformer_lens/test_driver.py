# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' bridge on an engine and a server, compared with Transformers."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformer_lens.model_bridge", reason="make test-interop")

import torch
from transformers import AutoModelForCausalLM

from tests.support.models import llama
from tests.support.server import Server
from vllm.interop import transformer_lens

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), bos_token_id=None)


@pytest.fixture(scope="module", params=["engine", "server"])
def bridge(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    """The same bridge over an engine of this process and over a server."""
    options = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
    if request.param == "engine":
        yield transformer_lens.boot(str(model), gpu_memory_utilization=0.2, **options)
        return
    flags = [*transformer_lens.FLAGS.split(), "--dtype", "float32", "--enforce-eager"]
    server = Server(model, *flags, "--max-model-len", "64", VLLM_CPU_KVCACHE_SPACE="1")
    try:
        yield transformer_lens.boot_server(server.url)
    finally:
        server.close()


@pytest.fixture(scope="module")
def reference(model: Path):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 1000, (2, 9))


def test_the_cache_and_the_logits_are_the_models(bridge, reference, tokens) -> None:
    logits, cache = bridge.run_with_cache(tokens)
    with torch.no_grad():
        expected = reference(tokens, output_hidden_states=True)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=2e-4)
    for layer in range(2):
        for name, at in (("hook_in", layer), ("hook_resid_post", layer + 1)):
            torch.testing.assert_close(
                cache[f"blocks.{layer}.{name}"],
                expected.hidden_states[at],
                rtol=0,
                atol=1e-4,
            )


def test_the_loss_is_the_models(bridge, reference, tokens) -> None:
    loss = bridge.forward(tokens, return_type="loss")
    with torch.no_grad():
        expected = reference(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        {"op": "suppress", "pos": 3},
        {"op": "suppress"},
        {"op": "add", "value": 0.5, "pos": [0, 8]},
        {"op": "set", "value": torch.linspace(-1, 1, 64)},
        {"op": "scale", "factor": 0.5, "pos": [1, 2]},
        {"op": "scale", "factor": -1.0},
    ],
    ids=str,
)
def test_interventions_do_what_a_hook_does(bridge, reference, tokens, spec) -> None:
    def hook(module, inputs, output):
        states = output.clone()
        at = spec.get("pos", slice(None))
        at = [at] if isinstance(at, int) else at
        match spec["op"]:
            case "suppress":
                states[:, at] = 0
            case "add":
                states[:, at] += spec["value"]
            case "set":
                states[:, at] = spec["value"]
            case "scale":
                states[:, at] *= spec["factor"]
        return states

    logits = bridge.forward(tokens, intervene={"blocks.1.hook_out": spec})
    with reference.model.layers[1].register_forward_hook(hook), torch.no_grad():
        expected = reference(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)


def test_a_server_without_what_is_needed_is_refused(model) -> None:
    flags = ["--capture-consumers", "inline", "--dtype", "float32", "--enforce-eager"]
    server = Server(model, *flags, "--max-model-len", "64", VLLM_CPU_KVCACHE_SPACE="1")
    try:
        with pytest.raises(ValueError, match="--logprobs-mode raw_logits"):
            transformer_lens.boot_server(server.url)
    finally:
        server.close()


def test_texts_and_tokens_are_generated_as_the_library_does(bridge, reference) -> None:
    text = "Anna went home."
    prompt = bridge.to_tokens(text)
    with torch.no_grad():
        expected = reference.generate(
            prompt, max_new_tokens=5, do_sample=False, eos_token_id=None
        )
    greedy = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False}
    assert torch.equal(bridge.generate(prompt, **greedy), expected)
    whole, cache, fed = bridge.generate(
        text, return_cache=True, return_input_tokens=True, **greedy
    )
    decoded = bridge.tokenizer.decode(expected[0], skip_special_tokens=True)
    assert whole == decoded and torch.equal(fed, prompt)
    assert cache["blocks.1.hook_out"].shape[1] == expected.shape[1]
    several = bridge.generate([text, "The dog"], return_type="tokens", **greedy)
    assert torch.equal(several[0], expected[0])
    assert several.shape == (2, expected.shape[1])
    assert several[1, 0] == bridge._padding()
    last = int(expected[0, -1])
    ended = bridge.generate(
        prompt, max_new_tokens=9, do_sample=False, eos_token_id=last
    )
    new = ended[0, prompt.shape[1] :].tolist()
    assert new.index(last) == len(new) - 1, "the sequence ends with its first end"
    steered = bridge.generate(
        prompt, intervene={"blocks.1.hook_out": {"op": "suppress"}}, **greedy
    )
    assert not torch.equal(steered, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"freq_penalty": 0.5}, "use repetition_penalty"),
        ({"output_logits": True}, "use forward"),
        ({"attention_mask": torch.ones(1, 3)}, "not padded"),
        ({"stopping_criteria": [1]}, "use stop_strings"),
        ({"num_beams": 2}, "no such argument"),
        ({"return_cache": True, "input": ["a", "b"]}, "give one prompt"),
    ],
    ids=lambda one: str(one)[:20],
)
def test_generation_refuses_what_it_would_ignore(bridge, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.generate(**{"input": "Anna"} | arguments)


def test_a_bridge_stops_the_engine_that_it_has_started(model, bridge) -> None:
    driver = bridge._driver
    stopped = []
    core = SimpleNamespace(shutdown=lambda: stopped.append(True))
    made = object.__new__(transformer_lens.EngineDriver)
    made.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    for owned, times in ((False, 0), (True, 1)):
        made._owned = owned
        made.close()
        made.close()
        assert len(stopped) == times
    assert getattr(driver, "_owned", True)
