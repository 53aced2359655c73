# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm.interop import probe_hook
from vllm.v1.capture.errors import CaptureValidationError

PROMPTS = ["Anna went home.", "The dog was here and there and there."]
ENGINE = {"max_model_len": 128, "enforce_eager": True, "gpu_memory_utilization": 0.2}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[probe_hook.LLM]:
    opened = probe_hook.LLM(
        str(model), layers=[0, 2], include_prefill=True, dtype="float32", **ENGINE
    )
    yield opened
    opened.llm_engine.engine_core.shutdown()


@pytest.mark.e2e
def test_row_i_is_what_output_token_i_was_read_from(llm, reference) -> None:
    params = probe_hook.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for output in llm.generate(PROMPTS, params):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        states = reference(torch.tensor([tokens]), output_hidden_states=True)
        prompt = len(output.prompt_token_ids)
        assert set(output.hidden_states) == {0, 2}
        # The library's last hidden state is normalized: layer 2 is the model's last, so
        # only layer 0 is compared directly.
        expected = states.hidden_states[1][0]
        assert output.hidden_states[0].shape == (5, 64)
        torch.testing.assert_close(
            output.hidden_states[0], expected[prompt - 1 : -1], rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            output.prefill_hidden_states[0], expected[:prompt], rtol=0, atol=1e-4
        )
        normed = reference.model.norm(output.hidden_states[2])
        read = reference.lm_head(normed).argmax(-1)
        assert read.tolist() == list(output.outputs[0].token_ids)
        assert output.hidden is output.hidden_states
        assert output.prefill_hidden is output.prefill_hidden_states


@pytest.mark.e2e
def test_one_output_token_has_one_row(llm) -> None:
    params = probe_hook.SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.hidden_states[0].shape == (1, 64)


@pytest.mark.e2e
def test_chat_has_them_too(llm) -> None:
    params = probe_hook.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (output,) = llm.chat(
        [{"role": "user", "content": "Anna"}], params, chat_template=template
    )
    assert output.hidden_states[2].shape == (3, 64)


def test_several_samples_are_refused() -> None:
    options = probe_hook.ProbeOptions(layers=[0])
    from vllm.interop.probe_hook.rows import with_capture

    with pytest.raises(CaptureValidationError, match="send the prompt 2 times"):
        with_capture(probe_hook.SamplingParams(n=2), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": ""}, "layers is empty"),
        ({"layers": [0], "dtype": "bf16"}, "torch has no such dtype"),
        ({"layers": [0], "dtype": 16}, "torch has no such dtype"),
        ({"layers": [0], "include_decode": False}, "nothing would be read"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(options, message) -> None:
    with pytest.raises(CaptureValidationError, match=message):
        probe_hook.ProbeOptions(**options)


@pytest.mark.parametrize(
    ("layers", "read"),
    [("all", [0, 1, 2]), (["all"], [0, 1, 2]), ("0,1-2", [0, 1, 2]), (1, [1])],
)
def test_layers_are_those_of_the_model(llm, layers, read) -> None:
    config = llm.llm_engine.vllm_config
    assert probe_hook.ProbeOptions(layers=layers).of_model(config).layers == read


@pytest.mark.parametrize("layers", [[0, 3], [-1], "some", [1.5], True])
def test_layers_that_the_model_does_not_have_are_refused(llm, layers) -> None:
    options = probe_hook.ProbeOptions(layers=layers)
    with pytest.raises(CaptureValidationError, match="^layers: ") as error:
        options.of_model(llm.llm_engine.vllm_config)
    assert error.value.parameter == "layers"


def test_the_dtype_may_be_torchs_or_the_models() -> None:
    rows = {0: torch.zeros(2, 4)}
    for dtype, found in [(torch.float16, torch.float16), ("auto", torch.float32)]:
        options = probe_hook.ProbeOptions(layers=[0], dtype=dtype)
        assert options._converted(rows)[0].dtype == found


def test_the_last_rows_alone() -> None:
    from vllm.v1.capture.results import RowsByTap

    rows = torch.randn(6, 4)
    prompt, generated = RowsByTap(), RowsByTap()
    facts = {"positions": [], "token_ids": []}
    prompt.put((1, "post_block"), rows[:3], facts)
    generated.put((1, "post_block"), rows[3:], facts)
    options = probe_hook.ProbeOptions(
        layers="all", last_decode_token=True, dtype="float32"
    )
    decoded = options.decode_rows(prompt, generated)
    assert torch.equal(decoded[1], rows[-1:])
    assert options.capture()["probe_prompt"]["positions"] == "last_prompt"
    whole = probe_hook.ProbeOptions(layers="all", dtype="float32")
    assert torch.equal(whole.decode_rows(prompt, generated)[1], rows[2:])


@pytest.mark.e2e
def test_the_asynchronous_engine_yields_rows_as_they_come(model: Path) -> None:
    async def run() -> list[int]:
        options = {"layers": 1, "dtype": torch.float32}
        llm = probe_hook.AsyncLLM(str(model), **options, **ENGINE)
        params = probe_hook.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        counts = []
        async for output in llm.generate(PROMPTS[0], params):
            rows = output.hidden_states.get(1)
            counts.append(0 if rows is None else len(rows))
        llm.shutdown()
        return counts

    counts = asyncio.run(run())
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_the_package_has_every_public_name() -> None:
    import vllm_probe_hook

    import vllm

    for name in vllm.__all__:
        exec(f"from vllm_probe_hook import {name}", {})
    own = {"LLM", "SamplingParams", "RequestOutput"}
    assert vllm_probe_hook.LLM is probe_hook.LLM is not vllm.LLM
    same = set(vllm.__all__) - own
    assert all(getattr(vllm_probe_hook, name) is getattr(vllm, name) for name in same)
    with pytest.raises(ImportError):
        exec("from vllm_probe_hook import Nothing", {})
