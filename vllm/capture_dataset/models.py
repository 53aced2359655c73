# SPDX-License-Identifier: Apache-2.0
"""Facts about the model of a data set's rows."""

from typing import TYPE_CHECKING

from vllm.capture_dataset.spec import ModelFacts

if TYPE_CHECKING:
    from vllm import LLM


def facts_of_engine(llm: "LLM") -> ModelFacts:
    """The facts of an engine's model; the tokenizer's digest is filled in later."""
    from vllm.v1.residual.model_identity import identity_of

    config = llm.llm_engine.vllm_config
    identity = identity_of(config)
    model = config.model_config
    status = llm.llm_engine.capture.describe()
    return ModelFacts(
        name=identity.name,
        architecture=identity.architecture,
        weights=identity.weights,
        tokenizer="",
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        max_model_len=model.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        hook_points={
            int(layer): tuple(points) for layer, points in status["hook_points"].items()
        },
    )
