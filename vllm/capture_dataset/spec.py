# SPDX-License-Identifier: Apache-2.0
"""Specifications of data sets: everything that determines their rows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.residual.tap import Tap

FORMATS = ("parquet", "safetensors", "saelens")
VALUE_DTYPES = ("auto", "float32", "float16", "bfloat16")
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a stored value, by dtype."""
WITHOUT_BFLOAT16 = ("parquet", "saelens")
"""Formats whose readers have no bfloat16: it is stored as float32, which is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The source of the prompts."""

    path: Path
    column: str | None = None
    """The column with the prompts; None for the first of `PROMPT_COLUMNS`."""
    id_column: str | None = None
    """The column with the prompts' ids; None to number them."""
    carry: tuple[str, ...] = ()
    """Columns that are stored with the rows."""
    chat: bool = False
    """Whether texts are user messages, to which the chat template is applied."""
    split: str | None = None
    """The split of a Hugging Face data set with several."""
    limit: int | None = None
    """Most prompts to use."""
    replace_repeated: bool = False
    """Whether the last prompt of a repeated id replaces earlier ones; otherwise it is
    refused."""
    truncate: int | None = None
    """Most tokens of a prompt to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec:
    """The rows of each prompt to capture, and how their values are stored."""

    hooks: tuple[str, ...] = ("post_block",)
    layers: tuple[int, ...] = ()
    """The layers; empty for all until the plan resolves them."""
    positions: Any = "all_prompt"
    """A position selector of `SamplingParams.capture`."""
    max_tokens: int = 1
    values_dtype: str = "auto"
    readouts: Mapping[str, Any] = field(default_factory=dict)
    """Readouts in the form of `SamplingParams.readouts`; missing keys are taken from
    the rows."""
    keep_when: Mapping[str, Any] | None = None
    """If, and where, a readout must fire for rows to be stored, as in a capture."""

    @property
    def taps(self) -> list[Tap]:
        """The taps, in the order of storage."""
        return [(layer, hook) for layer in sorted(self.layers) for hook in self.hooks]

    def capture(self) -> dict[str, Any]:
        """A request's capture spec for the consumer `inline`."""
        hooks = {hook: sorted(self.layers) for hook in self.hooks}
        spec = {"hooks": hooks, "positions": self.positions}
        return spec if self.keep_when is None else spec | {"keep_when": self.keep_when}

    def stored_dtype(self, captured: str, format: str) -> str:
        """The dtype of stored values, given the dtype of the stream."""
        wanted = captured if self.values_dtype == "auto" else self.values_dtype
        if wanted == "bfloat16" and format in WITHOUT_BFLOAT16:
            return "float32"
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """The folder and the format of a data set."""

    folder: Path
    format: str = "parquet"
    shard_bytes: int = 256 << 20
    """Bytes of values per shard; a shard ends with the prompt that reaches it."""
    compression: str = "none"
    context_size: int = 128
    """Rows per entry, for `saelens`."""
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model of the rows."""

    name: str
    architecture: str
    weights: str
    """Digest of the weights; empty if it is unknown."""
    tokenizer: str
    """Digest of the vocabulary and the chat template."""
    num_layers: int
    hidden_size: int
    max_model_len: int
    dtype: str
    """Dtype of the residual stream, such as `bfloat16`."""
    hook_points: dict[int, tuple[str, ...]] = field(default_factory=dict)
    other_widths: dict[str, int] = field(default_factory=dict)
    """Numbers per row of the points `HOOK.LAYER` that are not as wide as the stream."""
    last_token: int | None = None
    """The largest token id; None if only the server knows it."""

    def as_dict(self) -> dict[str, Any]:
        """The model's entry in the manifest."""
        left_out = ("hook_points", "other_widths", "last_token")
        return {name: v for name, v in asdict(self).items() if name not in left_out}
