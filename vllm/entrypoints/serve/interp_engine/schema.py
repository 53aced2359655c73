# SPDX-License-Identifier: Apache-2.0
"""Bodies of interp-engine's routes. An unknown field is refused."""

from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

Dtype = Literal["float32", "float16", "bfloat16"]
Tokens = Annotated[list[int], Field(min_length=1)]
MOST_POINTS = 256
"""Most points of a request."""
Points = Annotated[list[str], Field(min_length=1, max_length=MOST_POINTS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None
MOST = (1 << 31) - 1
"""Largest count."""
Steering = list[dict[str, Any]] | None
"""`[{"point", "layers": {layer: [operation]}}]`, see `vllm.interop.interp_engine`."""


TAKEN = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments of the tokenizer; a client's own template could run for hours."""


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="forbid")


class Tokenize(Body):
    """Text or a conversation."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prepend_bos: bool | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    spans: bool = False

    @model_validator(mode="after")
    def _one(self) -> "Tokenize":
        if (self.text is None) == (self.messages is None):
            raise ValueError("send either text or messages")
        if taken := sorted(set(self.template_kwargs) & TAKEN):
            raise ValueError(
                f"template_kwargs: {taken[0]} cannot be set; the keys are variables of "
                "the server's own template"
            )
        if self.spans:
            raise ValueError(
                "spans: tokens are not mapped to messages here; tokenize the "
                "conversation without its last message, and compare"
            )
        return self


class Serves(Body):
    """Points that are asked about."""

    points: Points


class Capture(Body):
    """Rows of a prompt."""

    prompt_token_ids: Tokens
    points: Points
    rows: list[int] | None = None
    steering: Steering = None
    output_dtype: Dtype = "float32"


class Generate(Body):
    """A generation."""

    prompt_token_ids: Tokens
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] = 64
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    seed: Seed = None
    stop_at_eos: bool = True
    n_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    steering: Steering = None
    steer_generated: bool = True
    stream: bool = True


class Directions(Body):
    """Directions that are read at one point."""

    point: str
    vectors: dict[str, Any] | list[list[float]]
    bias: dict[str, Any] | list[float] | None = None
    nonlinearity: str = "none"


class Project(Body):
    """Products of a prompt's rows with directions."""

    prompt_token_ids: Tokens
    directions: Annotated[list[Directions], Field(min_length=1)]
    steering: Steering = None
    output_dtype: Dtype = "float32"


class Lens(Body):
    """Layers that are read together."""

    layers: Annotated[list[int], Field(min_length=1)]
    jacobian: bool = False

    @model_validator(mode="after")
    def _distinct(self) -> "Lens":
        if len(set(self.layers)) < len(self.layers):
            raise ValueError("layers must be different")
        return self


class Lenses(Body):
    """Lenses at every position."""

    prompt_token_ids: Tokens
    lenses: Annotated[list[Lens], Field(min_length=1, max_length=8)]
    point: str = "resid_post"
    top_n: Annotated[int, Field(ge=1, le=100)] = 10
    max_tokens: Annotated[int, Field(ge=0, lt=MOST)] = 0
    temperature: float = 0.0
    seed: Seed = None
    words_only: bool = False
    skip_before: Annotated[int, Field(ge=0)] = 0
    stream_reduce: str = "none"
    stream_index: int | None = None
    steering: Steering = None
    stream: bool = True

    @model_validator(mode="after")
    def _all_tokens(self) -> "Lenses":
        if self.words_only:
            raise ValueError(
                "words_only: all tokens are ranked here; use a larger top_n and filter "
                "the result"
            )
        return self


class UnembedRows(Body):
    """Rows of the unembedding."""

    token_ids: Tokens
    output_dtype: Dtype = "float32"


class DecodeResiduals(Body):
    """Logits of rows."""

    residuals: dict[str, Any] | list[list[float]]
    top_k: Annotated[int, Field(ge=1, le=MOST)] | None = None
    output_dtype: Dtype = "float32"
