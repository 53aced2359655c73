# SPDX-License-Identifier: Apache-2.0
"""A tiny multimodal model: BLIP-2 with an OPT of a few layers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn

from tests.support.hf_reference import Places, Reference, Stream
from tests.support.models import TOKENIZER, VOCABULARY, randomise

IMAGE_TOKEN = VOCABULARY
IMAGE_TOKENS = 4
WIDTH = 64
SIDE = 32


def blip(folder: Path) -> Path:
    """A checkpoint with random weights, its tokenizer and its image processor."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    side = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2}
    text = transformers.OPTConfig(
        vocab_size=VOCABULARY + 8,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=96,
        num_hidden_layers=3,
        max_position_embeddings=256,
        do_layer_norm_before=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=1,
        **heads,
    )
    config = transformers.Blip2Config(
        vision_config=side | heads | {"image_size": SIDE, "patch_size": 8},
        qformer_config=side | heads | {"vocab_size": 64, "encoder_hidden_size": WIDTH},
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(folder)
    transformers.Blip2Processor(
        image_processor=processor(), tokenizer=tokenizer, num_query_tokens=IMAGE_TOKENS
    ).save_pretrained(folder)
    return folder


def processor() -> transformers.BlipImageProcessor:
    return transformers.BlipImageProcessor(size={"height": SIDE, "width": SIDE})


def picture(seed: int) -> Image.Image:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def _layers(model: nn.Module) -> nn.ModuleList:
    layers = model.language_model.model.decoder.layers  # type: ignore[union-attr]
    assert isinstance(layers, nn.ModuleList)
    return layers


class PictureReference(Reference):
    """The library's model, with the image with which the next prompts begin."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.Blip2ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._seen: Stream = {}
        self.picture: Image.Image | None = None
        places = Places(_layers, mid="final_layer_norm")
        for index, layer in enumerate(_layers(self.model)):
            self._watch(index, layer, places)

    @property
    def layers(self) -> nn.ModuleList:
        return _layers(self.model)

    def stream(self, token_ids: Sequence[int]) -> Stream:
        """Every hook point's rows for these tokens."""
        self._seen = {}
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            if self.picture is None:
                self.model.language_model(input_ids=ids)
            else:
                pixels = processor()(self.picture, return_tensors="pt")["pixel_values"]
                self.model(
                    pixel_values=pixels,
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                )
        return self._seen
