# SPDX-License-Identifier: Apache-2.0
"""What a data set is made of: everything that decides which rows it holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Tap = tuple[int, str]
"""`(layer, hook)`."""

FORMATS = ("parquet", "arrow", "safetensors", "saelens", "filesystem", "zarr")
VALUE_DTYPES = ("auto", "float32", "float16", "bfloat16")
WITHOUT_BFLOAT16 = ("parquet", "arrow", "saelens", "zarr")
"""Formats whose readers have no bfloat16: it is stored as float32, which is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where prompts come from."""

    path: Path
    column: str | None = None
    """The column with the prompts; None stands for the first of `PROMPT_COLUMNS`."""
    id_column: str | None = None
    """The column with the prompts' ids; None numbers them."""
    carry: tuple[str, ...] = ()
    """Columns that go beside the rows."""
    chat: bool = False
    """Whether texts are a user's messages, for the chat template."""
    split: str | None = None
    """Of a Hugging Face data set with several."""
    limit: int | None = None
    """How many prompts are taken at most."""
    replace_repeated: bool = False
    """Whether the last prompt of an id replaces those before it, or is refused."""
    truncate: int | None = None
    """How many tokens of a prompt are taken at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec:
    """Which rows of each prompt are taken, and how their values are stored."""

    hooks: tuple[str, ...] = ("post_block",)
    layers: tuple[int, ...] = ()
    """Resolved: never empty once a data set is collected."""
    positions: Any = "all_prompt"
    """A selector of `SamplingParams.capture`."""
    max_tokens: int = 1
    values_dtype: str = "auto"
    readouts: Mapping[str, Any] = field(default_factory=dict)
    """As in `SamplingParams.readouts`; what is left out is taken from the rows."""

    @property
    def taps(self) -> list[Tap]:
        """In the order in which they are stored."""
        return [(layer, hook) for layer in sorted(self.layers) for hook in self.hooks]

    def capture(self) -> dict[str, Any]:
        """The spec of a request for the consumer `inline`."""
        hooks = {hook: sorted(self.layers) for hook in self.hooks}
        return {"hooks": hooks, "positions": self.positions}

    def stored_dtype(self, captured: str, format: str) -> str:
        """The dtype of stored values, given the dtype of the stream."""
        wanted = captured if self.values_dtype == "auto" else self.values_dtype
        if wanted == "bfloat16" and format in WITHOUT_BFLOAT16:
            return "float32"
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Where a data set goes, and in which form."""

    folder: Path
    format: str = "parquet"
    shard_bytes: int = 256 << 20
    """Of values; a shard ends with the prompt that reaches it."""
    compression: str = "none"
    context_size: int = 128
    """Rows per entry, for `saelens`."""
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model whose rows these are."""

    name: str
    architecture: str
    weights: str
    """A digest of the weights; empty if it is unknown."""
    tokenizer: str
    """A digest of the vocabulary and the chat template."""
    num_layers: int
    hidden_size: int
    max_model_len: int
    dtype: str
    """Of the stream, such as `bfloat16`."""
    hook_points: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """What a manifest says of it."""
        facts = asdict(self)
        facts.pop("hook_points")
        return facts
