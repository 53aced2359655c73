# SPDX-License-Identifier: Apache-2.0
"""A decoder with a second attention, compiled, against hooks in transformers.

Its points themselves are in the parity suite.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support import audio
from tests.support.captured import asking_logits, check_effect, logprobs_of
from tests.support.hf_reference import changing, relative_error
from tests.support.models import randomise
from vllm import LLM, RequestOutput
from vllm.v1.capture.errors import CaptureValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS, TOKENS = 256, [5, 6, 70, 8, 91]
OPTIONS = audio.OPTIONS | {"decoder_layers": 2}
LAST = OPTIONS["decoder_layers"] - 1


class Pair:
    """An engine, and the library's model."""

    def __init__(self, folder: Path) -> None:
        config = transformers.WhisperConfig(vocab_size=WORDS, **OPTIONS)
        self.library = transformers.WhisperForConditionalGeneration._from_config(
            config, attn_implementation="eager"
        ).eval()
        randomise(self.library)
        self.library.save_pretrained(folder)
        audio.save_processor(folder)
        self.llm = LLM(
            str(folder),
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
            capture_consumers=["inline"],
            enable_steering=True,
            enable_readouts=True,
            hook_points=["all"],
        )

    def ask(self, *seeds: int, **fields: Any) -> list[RequestOutput]:
        params = asking_logits(4, **{"capture": None, **fields})
        prompts = [audio.heard(TOKENS, seed) for seed in seeds]
        return self.llm.generate(prompts, params, use_tqdm=False)

    def run(self, output: RequestOutput, seed: int) -> Any:
        """The library's outputs for all tokens that the engine fed."""
        assert output.prompt_token_ids is not None
        fed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        inputs = audio.given(torch.tensor([fed]), seed)
        with torch.no_grad():
            return self.library(
                **inputs, output_attentions=True, output_hidden_states=True
            )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    opened = Pair(tmp_path_factory.mktemp("whisper"))
    yield opened
    opened.llm.llm_engine.engine_core.shutdown()


def test_each_request_s_rows_are_of_what_it_heard(pair: Pair) -> None:
    spec = {"hooks": {"post_block": "all"}, "positions": "all"}
    outputs = pair.ask(0, 1, capture={"inline": spec})
    rows = []
    for seed, output in enumerate(outputs):
        found = output.capture_results["inline"].payload
        assert output.prompt_token_ids == [1, *TOKENS]
        states = pair.run(output, seed).decoder_hidden_states
        for layer in range(LAST):  # The last of these is behind the final norm.
            expected = states[layer + 1][0]
            assert relative_error(found[layer, "post_block"], expected) < 1e-5
        rows.append(found[0, "post_block"][: len(TOKENS)])
    assert relative_error(*rows) > 0.01


def test_patterns_and_logits_are_the_decoder_s(pair: Pair) -> None:
    spec = {"positions": "all_prompt"}
    readouts = {
        "patterns": {"kind": "attention", "layers": [1], "full": True, **spec},
        "lens": {"kind": "lens", "layers": [LAST], "tokens": [7, 9], **spec},
        "parts": {"kind": "attribution", "tokens": [7, 9], **spec},
    }
    (output,) = pair.ask(1, readouts=readouts)
    expected, end = pair.run(output, 1), 1 + len(TOKENS)
    patterns = torch.as_tensor(output.readouts["patterns"]["weights"])
    own = expected.decoder_attentions[1][0, :, :end, :end]
    assert (patterns - own).abs().max() < 1e-4
    wanted = expected.logits[0, :end, [7, 9]]
    parts = output.readouts["parts"]["logits"].sum(1)
    assert relative_error(torch.as_tensor(parts), wanted) < 1e-4
    seen = torch.as_tensor(output.readouts["lens"]["token_logprobs"])[:, 0]
    own = expected.logits[0, :end].log_softmax(-1)[:, [7, 9]]
    assert relative_error(seen, own) < 1e-4


def test_a_head_of_the_self_attention_is_left_out(pair: Pair) -> None:
    without = {"op": "replace", "vector": 0, "heads": [1]}
    (output,) = pair.ask(0, steering_vectors={"z": {1: without}})
    plain = pair.run(output, 0).logits[0, len(TOKENS) :]

    def zeroed(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[..., audio.WIDTH // 2 :] = 0
        return rows

    attention = pair.library.model.decoder.layers[1].self_attn
    with changing(attention.out_proj, zeroed):
        expected = pair.run(output, 0).logits[0, len(TOKENS) :]
    check_effect(logprobs_of(output, WORDS), plain, expected, 1e-2, 1e-3)


def test_layers_are_the_decoder_s(pair: Pair) -> None:
    for layer in (LAST + 1, OPTIONS["encoder_layers"] + 7):
        with pytest.raises(CaptureValidationError, match=f"{layer}.*0 to {LAST}"):
            pair.ask(0, capture={"inline": {"hooks": {"post_block": [layer]}}})


def test_what_two_attentions_add_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(CaptureValidationError, match="attn_add.*no place"):
        pair.ask(0, capture={"inline": {"hooks": {"attn_add": "all"}}})
