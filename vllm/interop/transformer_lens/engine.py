# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' `Driver` over an `LLM`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm.inputs import TokensPrompt
from vllm.interop.prompt_rows import rows_of
from vllm.interop.transformer_lens.driver import (
    Answer,
    Asked,
    ServedDriver,
    Vectors,
    filled,
)
from vllm.interop.transformer_lens.interventions import names_of
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import RequestOutput

ENGINE: dict[str, Any] = {
    "capture_consumers": ["inline"],
    "enable_steering": True,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}
"""Required arguments of `LLM`; `boot` passes them for a model's name."""


class EngineDriver(ServedDriver):
    """TransformerLens' `Driver` on an `LLM`.

    Args:
        llm: an engine started with `ENGINE`.
        bridge_config: TransformerLens' configuration of the model.
        architecture: the Hugging Face name of the model's class.
        owned: whether `close` stops the engine.

    Raises:
        ValueError: the engine lacks a feature that the driver needs; the message has
            the remedy.

    """

    def __init__(
        self, llm: "LLM", bridge_config: Any, architecture: str, owned: bool = False
    ) -> None:
        config = llm.llm_engine.vllm_config
        consumers = [entry.instance_name for entry in config.capture_config.consumers]
        if "inline" not in consumers or not config.steering_config.enabled:
            raise ValueError(
                "the engine can neither return rows nor intervene: start it with "
                "LLM(model, **vllm.interop.transformer_lens.ENGINE)"
            )
        mode = config.model_config.logprobs_mode
        if mode != "raw_logits" or config.model_config.max_logprobs != -1:
            raise ValueError(
                f"the engine returns {mode} of at most "
                f"{config.model_config.max_logprobs} tokens: start it with "
                'LLM(model, logprobs_mode="raw_logits", max_logprobs=-1)'
            )
        names = names_of(config.capture_config.hook_points or {})
        super().__init__(bridge_config, architecture, llm.get_tokenizer(), names)
        self.llm = llm
        self._owned = owned
        self._vocabulary = config.model_config.get_vocab_size()

    def _answers(self, prompts: list[list[int]], asked: Asked) -> list[Answer]:
        params = SamplingParams(detokenize=False, **asked.fields())
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [self._answer(output, asked) for output in outputs]

    def _generated(
        self,
        prompts: list[list[int]],
        sampling: Mapping[str, Any],
        vectors: Vectors | None,
    ) -> list[list[int]]:
        params = SamplingParams(
            detokenize="stop" in sampling, steering_vectors=vectors, **sampling
        )
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Stop the engine, if it was started for this driver."""
        if self._owned:
            self._owned = False
            self.llm.llm_engine.engine_core.shutdown()

    def _answer(self, output: "RequestOutput", asked: Asked) -> Answer:
        return Answer(
            rows=rows_of(output) if asked.taps else {},
            logits=_logits(output, self._vocabulary) if asked.logits else None,
            new_tokens=output.outputs[0].token_ids,
            raw=output,
        )


def _logits(output: "RequestOutput", vocabulary: int) -> torch.Tensor:
    """Logits of every prompt position, `[tokens, vocabulary]`, float32.

    The engine lists the logits that predict prompt tokens 1 to P-1, then those that
    predict the first generated token.
    """
    generated = output.outputs[0].logprobs
    assert generated, "logprobs were requested"
    predicted = [*(output.prompt_logprobs or [])[1:], generated[0]]
    known = [
        {token: entry.logprob for token, entry in (position or {}).items()}
        for position in predicted
    ]
    return filled(known, vocabulary)
