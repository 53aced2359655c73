# SPDX-License-Identifier: Apache-2.0
"""A tiny multimodal model: BLIP-2 with an OPT of a few layers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from tests.parity.recipe import Recipe
from tests.support.hf_reference import Reference
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


class PictureReference(Reference):
    """The library's model, with the image with which the next prompts begin."""

    def __init__(self, folder: Path) -> None:
        self.picture: Image.Image | None = None
        recipe = Recipe(
            layers="language_model.model.decoder.layers",
            middle=("final_layer_norm",),
            mlp=("fc1",),
            mlp_out=("fc2",),
            given=self._with_picture,
        )
        super().__init__(folder, recipe=recipe, loader="AutoModelForImageTextToText")
        self.layers = self.model.get_submodule(recipe.layers)

    def _with_picture(self, ids: torch.Tensor, _: int) -> Mapping[str, torch.Tensor]:
        """Of a prompt without tokens of an image any image is left out."""
        seen = processor()(self.picture or picture(0), return_tensors="pt")
        return {"input_ids": ids, "pixel_values": seen["pixel_values"]}
