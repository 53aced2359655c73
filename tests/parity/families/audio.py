# SPDX-License-Identifier: Apache-2.0
"""Decoders of encoder-decoders: a second attention reads what an encoder made."""

from collections.abc import Mapping

import torch

from tests.parity.cases import VOCABULARY, Case
from tests.parity.recipe import Recipe
from tests.support import audio

UNTRIED = "no case has its encoder of {what}; its decoder is woven as Whisper's"


def given(ids: torch.Tensor, num_prompt_tokens: int) -> Mapping[str, torch.Tensor]:
    return audio.given(ids)


CASES = [
    Case(
        architecture="WhisperForConditionalGeneration",
        model_type="whisper",
        options={"vocab_size": VOCABULARY, **audio.OPTIONS},
        recipe=Recipe(
            layers="model.decoder.layers",
            attention=("encoder_attn",),
            middle=("final_layer_norm",),
            mlp=("fc1",),
            mlp_out=("fc2",),
            given=given,
        ),
        engine={"skip_tokenizer_init": False, "max_num_batched_tokens": 64},
        loader="AutoModelForSpeechSeq2Seq",
        prompt=audio.heard,
        processor=audio.save_processor,
        representative=True,
    ),
    *(
        Case(
            architecture=architecture,
            model_type="",
            options={},
            variant="none",
            never=UNTRIED.format(what=what),
        )
        for architecture, what in (
            ("CohereAsrForConditionalGeneration", "audio"),
            ("NemotronParseForConditionalGeneration", "pictures"),
        )
    ),
]
