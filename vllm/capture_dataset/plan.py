# SPDX-License-Identifier: Apache-2.0
"""Plans: a wanted data set, checked against source and model."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from vllm.capture_dataset.formats.saelens import HOOK_NAMES
from vllm.capture_dataset.manifest import LAYER_CONVENTION
from vllm.capture_dataset.progress import human_bytes
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.readouts import ReadoutColumn, columns_of, completed
from vllm.capture_dataset.runners import Runner
from vllm.capture_dataset.shards import groups
from vllm.capture_dataset.spec import ITEM_SIZES, ModelFacts, OutputSpec, RowsSpec
from vllm.capture_dataset.survey import Survey
from vllm.v1.capture.errors import fail
from vllm.v1.residual.selectors import first_outside, parse_positions
from vllm.v1.residual.tap import why_not

SPECIAL_TOKENS = 8
"""More than a tokenizer adds to a text."""


@dataclass(slots=True)
class Plan:
    """A checked plan of a data set to collect."""

    survey: Survey
    rows: RowsSpec
    output: OutputSpec
    model: ModelFacts
    tokens: Tokens
    readouts: tuple[ReadoutColumn, ...] = ()
    modules: dict[str, Any] = field(default_factory=dict)
    """The probes, translators and SAEs that the readouts name."""

    @classmethod
    def of(
        cls, survey: Survey, rows: RowsSpec, output: OutputSpec, runner: Runner
    ) -> "Plan":
        """Check the wanted rows and output against source and model.

        Raises:
            CaptureValidationError: a check failed; nothing has been written or run.

        """
        tokens = Tokens(runner.tokenizer, survey.spec.chat, survey.spec.truncate)
        model = replace(runner.model, tokenizer=tokens.digest())
        rows = replace(rows, layers=_layers(rows, model))
        if output.format == "saelens":
            _check_names(rows, model)
        plan = cls(survey, rows, output, model, tokens)
        plan._check_tokens()
        plan._check_lengths()
        if rows.readouts:
            plan._take_readouts(runner)
        return plan

    @property
    def stored_dtype(self) -> str:
        """The dtype of stored values."""
        return self.rows.stored_dtype(self.model.dtype, self.output.format)

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of one row of one tap."""
        return self.model.hidden_size * ITEM_SIZES[self.stored_dtype]

    @property
    def readout_bytes(self) -> int:
        """Bytes of the readouts of one token."""
        return sum(column.row_bytes for column in self.readouts if not column.reduced)

    def facts(self) -> dict[str, Any]:
        """The facts that determine the rows, for the manifest."""
        rows = self.rows
        readouts = {
            "specs": dict(rows.readouts),
            "modules": self.modules,
            "columns": {column.name: column.as_dict() for column in self.readouts},
        }
        return {
            **known_facts(self.survey, rows, self.output),
            "model": self.model.as_dict(),
            "hooks": list(rows.hooks),
            "layers": sorted(rows.layers),
            "layer_convention": LAYER_CONVENTION,
            "values_dtype": self.stored_dtype,
            **({"readouts": readouts} if rows.readouts else {}),
        }

    def totals(self) -> tuple[int, int, int]:
        """Numbers of prompts, and at most of tokens and rows; tokenizes all prompts."""
        prompts = tokens = rows = 0
        for prompt in self.prompts():
            prompts += 1
            tokens += len(prompt.token_ids) + self.rows.max_tokens - 1
            rows += self.rows_of(len(prompt.token_ids)) * len(self.rows.taps)
        return prompts, tokens, rows

    def check_room(self, free: int) -> None:
        """Refuse rows of prompts, and readouts, that need more than `free` bytes.

        Generated tokens are not counted, because an answer may be short.

        Raises:
            CaptureValidationError: with the size.

        """
        plan = replace(self, rows=replace(self.rows, max_tokens=1))
        row_bytes = self.row_bytes + self.readout_bytes // len(self.rows.taps)
        longest = self.survey.longest_bytes + SPECIAL_TOKENS
        most = self.survey.num_entries * plan.rows_of(longest) * len(self.rows.taps)
        if most * row_bytes <= free and not self.survey.has_chats:
            return
        needed = plan.totals()[2] * row_bytes
        if needed > free:
            raise fail(
                f"out: the rows need {human_bytes(needed)}, and the disk has "
                f"{human_bytes(free)}; make room, or use --layers, --positions, "
                "--limit or --values-dtype float16",
                "out",
                str(self.output.folder),
            )

    def rows_of(self, num_tokens: int) -> int:
        """Most rows of one tap for a prompt of this length."""
        generated = self.rows.max_tokens - 1
        counts = {
            "last_prompt": 1,
            "all_prompt": num_tokens,
            "all_generated": generated,
            "all": num_tokens + generated,
        }
        positions = self.rows.positions
        if isinstance(positions, str) and positions in counts:
            return counts[positions]
        if isinstance(positions, list):
            return len(positions)
        return num_tokens + generated

    def prompts(self, first_sample: int = 0) -> Iterator[Prompt]:
        """Yield the prompts from a sample on, as tokens."""
        return self.tokens.prompts(self.survey.entries(first_sample))

    def shards(self, first_sample: int = 0) -> Iterator[list[Prompt]]:
        """Yield the prompts of each shard."""
        token_bytes = self.row_bytes * len(self.rows.taps) + self.readout_bytes
        max_rows = max(self.output.shard_bytes // token_bytes, 1)
        return groups(self.prompts(first_sample), self.rows_of, max_rows)

    def _take_readouts(self, runner: Runner) -> None:
        """Determine the columns of readouts by running the first prompt.

        Raises:
            CaptureValidationError: the readouts cannot be computed or stored.

        """
        if self.output.format == "saelens":
            raise fail(
                "readout: the format saelens has no columns for readouts; choose "
                "another --format",
                "readout",
                sorted(self.rows.readouts),
            )
        self.rows = replace(self.rows, readouts=completed(self.rows))
        first = list(islice(self.prompts(), 1))
        (item,) = runner.run(first, self.rows, self.tokens)
        self.readouts = columns_of(item.readouts, self.rows)
        taken = {column.name for column in self.readouts} & self.survey.carried.keys()
        if taken:
            raise fail(
                f"readout: {min(taken)!r} is a carried column too; choose another "
                "name for the readout",
                "readout",
                min(taken),
            )
        named = {str(v) for spec in self.rows.readouts.values() for v in spec.values()}
        having = runner.readout_modules()
        self.modules = {name: having[name] for name in sorted(named & having.keys())}

    def _check_tokens(self) -> None:
        """Refuse token ids that the model does not have."""
        (largest, where), last = self.survey.largest_id, self.model.last_token
        if last is not None and largest > last:
            raise fail(
                f"source: {where} has the token id {largest}, and the model's are up "
                f"to {last}; correct it",
                "source",
                largest,
            )

    def _check_lengths(self) -> None:
        """Refuse prompts that are too long for the model, before any is run.

        A token covers at least one byte, so most prompts need not be tokenized here.
        """
        room = self.model.max_model_len - self.rows.max_tokens
        survey = self.survey
        spans = parse_positions(self.rows.positions, "positions", fail)
        truncate = survey.spec.truncate
        fits = truncate is not None and truncate <= room
        longest = survey.longest_bytes + SPECIAL_TOKENS
        fits = fits or (not survey.has_chats and longest <= room)
        if fits and isinstance(spans, str):
            return
        for prompt in self.prompts():
            count = len(prompt.token_ids)
            if count > room:
                raise fail(
                    f"source: {prompt.entry.where} has {count} tokens; with "
                    f"--max-tokens {self.rows.max_tokens} the model takes {room}. "
                    f"Shorten it, or use --truncate {room}",
                    "source",
                    count,
                )
            if isinstance(spans, str):
                continue
            end = count + self.rows.max_tokens - 1
            outside = first_outside(spans, count, end)
            if outside is not None:
                raise fail(
                    f"positions: {outside} is outside of {prompt.entry.where}, which "
                    f"has {count} tokens; leave it out, or choose a name",
                    "positions",
                    outside,
                )


def known_facts(survey: Survey, rows: RowsSpec, output: OutputSpec) -> dict[str, Any]:
    """The facts of a data set that are known without its model."""
    source = survey.spec
    return {
        "source_sha256": survey.digest,
        "column": survey.column,
        "id_column": source.id_column,
        "on_repeated_id": "replace" if source.replace_repeated else "refuse",
        "carry": {name: str(kind) for name, kind in survey.carried.items()},
        "chat": source.chat,
        "limit": source.limit,
        "truncate": source.truncate,
        "positions": rows.positions,
        "max_tokens": rows.max_tokens,
        "format": output.format,
        "compression": output.compression,
        "context_size": output.context_size,
        "shard_bytes": output.shard_bytes,
        **({"layers": sorted(rows.layers)} if rows.layers else {}),
        **({} if rows.keep_when is None else {"keep_when": rows.keep_when}),
    }


def _layers(rows: RowsSpec, model: ModelFacts) -> tuple[int, ...]:
    """The wanted layers; all if none is named.

    Raises:
        CaptureValidationError: a layer lacks the hook points.

    """
    layers = rows.layers or tuple(range(model.num_layers))
    for layer in layers:
        for hook in rows.hooks:
            if hook not in model.hook_points.get(layer, ()):
                raise fail(
                    f"layers: layer {layer} of this model of {model.num_layers} layers "
                    f"has no hook point {hook!r}; layer 0 has "
                    f"{list(model.hook_points.get(0, ()))}{why_not(hook)}",
                    "layers",
                    layer,
                )
            width = model.other_widths.get(f"{hook}.{layer}", model.hidden_size)
            if width != model.hidden_size:
                raise fail(
                    f"hooks: the rows of {hook} have {width} numbers, and those of a "
                    f"data set are as wide as the stream ({model.hidden_size}); use "
                    f"the consumer arrow or filesystem for {hook}",
                    "hooks",
                    hook,
                )
    return layers


def _check_names(rows: RowsSpec, model: ModelFacts) -> None:
    """Refuse hook points that have no name in TransformerLens.

    Its `hook_mlp_in` is the stream before the norm, its `hook_attn_out` and
    `hook_mlp_out` are what is added to the stream.

    Raises:
        CaptureValidationError: naming the hook point.

    """
    if unknown := [hook for hook in rows.hooks if hook not in HOOK_NAMES]:
        raise fail(
            f"hook: {unknown[0]!r} of this model has no name in TransformerLens, which "
            f"the format saelens needs; use {sorted(HOOK_NAMES)}, or another --format",
            "hook",
            unknown[0],
        )
