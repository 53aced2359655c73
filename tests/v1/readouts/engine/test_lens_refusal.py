# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import transformers

from tests.support.models import VOCABULARY, save
from tests.v1.steering._engine import engine
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def without_norm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """OPT that norms behind each sublayer has no norm before its head."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        do_layer_norm_before=False,
    )
    folder = save(config, tmp_path_factory.mktemp("opt"))
    llm = engine(str(folder), max_model_len=128, enable_readouts=True)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_a_lens_that_the_head_cannot_answer_is_refused_at_admission(
    without_norm: LLM,
) -> None:
    def run(readout: dict[str, object]) -> object:
        params = SamplingParams(max_tokens=2, readouts={"r": readout}, detokenize=False)
        (output,) = without_norm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        return output.readouts["r"]  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match=r"readouts\.r\.kind.*norm comes before"):
        run({"kind": "lens", "layers": [1]})
    run({"kind": "norm", "hooks": {"post_block": [1]}})
