# SPDX-License-Identifier: Apache-2.0
"""A tiny encoder-decoder, Whisper, and what it hears."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.models import TOKENIZER

RATE = 16000
BANDS = 16
WIDTH = 64
OPTIONS: dict[str, Any] = {
    "d_model": WIDTH,
    "num_mel_bins": BANDS,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 96,
}
"""Encoder and decoder differ in everything but their width."""


def _extractor() -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=1)


def _noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=RATE).astype(np.float32)


def save_processor(folder: Path) -> None:
    """What upstream processes audio with, which it cuts or pads to one second."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|startoftranscript|>"]}
    )
    transformers.WhisperProcessor(_extractor(), tokenizer).save_pretrained(folder)


def heard(ids: list[int], seed: int = 0) -> Mapping[str, Any]:
    """The engine's prompt: one second of noise, and tokens of the decoder.

    Upstream puts the decoder's start token in front.
    """
    audio = {"audio": (_noise(seed), RATE)}
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": audio},
        "decoder_prompt": {"prompt_token_ids": ids},
    }


def given(ids: torch.Tensor, seed: int = 0) -> Mapping[str, torch.Tensor]:
    """What the library's model is given for decoder tokens `[1, n]`."""
    found = _extractor()(_noise(seed), sampling_rate=RATE, return_tensors="pt")
    return {"input_features": found.input_features, "decoder_input_ids": ids}
