# SPDX-License-Identifier: Apache-2.0
"""From prompts to a data set."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from vllm import __version__
from vllm.capture_dataset.manifest import LAYER_CONVENTION, NAME, Manifest
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.runners import Runner
from vllm.capture_dataset.shards import ShardFolder, groups
from vllm.capture_dataset.spec import ModelFacts, OutputSpec, RowsSpec
from vllm.capture_dataset.survey import Survey
from vllm.capture_dataset.table import Captured, Shard
from vllm.v1.capture.selectors import POSITION_NAMES, fail

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(slots=True)
class Plan:
    """A data set that can be collected: everything has been checked."""

    survey: Survey
    rows: RowsSpec
    output: OutputSpec
    model: ModelFacts
    tokens: Tokens

    @classmethod
    def of(
        cls, survey: Survey, rows: RowsSpec, output: OutputSpec, runner: Runner
    ) -> "Plan":
        """Check what is wanted against the model.

        Raises:
            CaptureValidationError: nothing has been written or run.

        """
        tokens = Tokens(runner.tokenizer, survey.spec.chat, survey.spec.truncate)
        model = replace(runner.model, tokenizer=tokens.digest())
        rows = replace(rows, layers=_layers(rows, model))
        plan = cls(survey, rows, output, model, tokens)
        plan._check_lengths()
        return plan

    @property
    def stored_dtype(self) -> str:
        """The dtype of stored values."""
        return self.rows.stored_dtype(self.model.dtype, self.output.format)

    @property
    def row_bytes(self) -> int:
        """Of the values of one row of one tap."""
        return self.model.hidden_size * ITEM_SIZES[self.stored_dtype]

    def facts(self) -> dict[str, Any]:
        """What decides the rows, for the manifest."""
        source, rows, output = self.survey.spec, self.rows, self.output
        return {
            "model": self.model.told(),
            "source_sha256": self.survey.digest,
            "column": self.survey.column,
            "id_column": source.id_column,
            "on_repeated_id": "replace" if source.replace_repeated else "refuse",
            "carry": {name: str(kind) for name, kind in self.survey.carried.items()},
            "chat": source.chat,
            "limit": source.limit,
            "truncate": source.truncate,
            "hooks": list(rows.hooks),
            "layers": sorted(rows.layers),
            "layer_convention": LAYER_CONVENTION,
            "positions": rows.positions,
            "max_tokens": rows.max_tokens,
            "values_dtype": self.stored_dtype,
            "format": output.format,
            "compression": output.compression,
            "context_size": output.context_size,
            "shard_bytes": output.shard_bytes,
        }

    def rows_of(self, num_tokens: int) -> int:
        """Rows of one tap that a prompt has at most."""
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
        """The prompts from a sample on, as tokens."""
        return self.tokens.prompts(self.survey.entries(first_sample))

    def shards(self, first_sample: int = 0) -> Iterator[list[Prompt]]:
        """The prompts of each shard."""
        taps = len(self.rows.taps)
        max_rows = max(self.output.shard_bytes // (self.row_bytes * taps), 1)
        return groups(self.prompts(first_sample), self.rows_of, max_rows)

    def _check_lengths(self) -> None:
        """Refuse prompts that the model cannot take, before any is run.

        A token stands for a byte at least, so mostly nothing need be tokenized here.
        """
        room = self.model.max_model_len - self.rows.max_tokens
        survey, positions = self.survey, self.rows.positions
        truncate = survey.spec.truncate
        fits = truncate is not None and truncate <= room
        fits = fits or (not survey.has_chats and survey.longest_bytes + 8 <= room)
        listed = not (isinstance(positions, str) and positions in POSITION_NAMES)
        if fits and not listed:
            return
        for prompt in self.prompts():
            count = len(prompt.token_ids)
            if count > room:
                raise fail(
                    f"source: {prompt.entry.where} has {count} tokens; with "
                    f"--max-tokens {self.rows.max_tokens} the model takes {room}. "
                    f"Shorten it, or say --truncate {room}",
                    "source",
                    count,
                )
            last = max(positions) if listed and isinstance(positions, list) else 0
            if last >= count + self.rows.max_tokens - 1:
                raise fail(
                    f"positions: {last} is behind the end of {prompt.entry.where}, "
                    f"which has {count} tokens; leave it out, or choose a name",
                    "positions",
                    positions,
                )


def _layers(rows: RowsSpec, model: ModelFacts) -> tuple[int, ...]:
    """The layers that are wanted, all if none is named.

    Raises:
        CaptureValidationError: one has not the hook points.

    """
    layers = rows.layers or tuple(range(model.num_layers))
    for layer in layers:
        for hook in rows.hooks:
            if hook not in model.hook_points.get(layer, ()):
                raise fail(
                    f"layers: layer {layer} of this model of {model.num_layers} layers "
                    f"has no hook point {hook!r}; layer 0 has "
                    f"{list(model.hook_points.get(0, ()))}",
                    "layers",
                    layer,
                )
    return layers


def begin(plan: Plan) -> Manifest:
    """The manifest to go on with: a new one, or that of the run to resume.

    Raises:
        CaptureValidationError: the folder holds something else.

    """
    folder, facts = plan.output.folder, plan.facts()
    there = (folder / NAME).is_file()
    if there and not plan.output.resume:
        raise fail(
            f"out: {str(folder)!r} holds a data set already; say --resume to go on "
            "with it, or choose another folder",
            "out",
            str(folder),
        )
    if not there:
        about = {
            "version": __version__,
            "source": str(plan.survey.spec.path),
            "num_prompts": plan.survey.num_entries,
        }
        return Manifest(facts, about)
    manifest = Manifest.read(folder)
    manifest.check_same(facts, folder)
    if manifest.drop_missing(folder):
        manifest.complete = False
    return manifest


def collect(plan: Plan, runner: Runner, progress: Progress) -> Manifest:
    """Run all prompts that are not done, and write their rows.

    Whatever ends this early, the folder holds whole shards and a manifest that lists
    them, and another run with `resume` goes on.

    Raises:
        OSError: the disk is full, for example.
        CaptureRunError: a prompt has failed.

    """
    manifest = begin(plan)
    if manifest.complete:
        return manifest
    plan.output.folder.mkdir(parents=True, exist_ok=True)
    folder = ShardFolder(plan.output.folder, manifest.facts)
    manifest.write(plan.output.folder)
    for done in manifest.shards:
        progress.skipped(done.num_prompts)

    def store(shard: Shard, stop_sample: int) -> None:
        """Runs on the writer's thread: alone changes the manifest until it ends."""
        manifest.shards.append(folder.write(shard, stop_sample))
        folder.index(manifest.shards, plan.rows.taps)
        manifest.write(plan.output.folder)

    first = manifest.shards[-1].stop_sample if manifest.shards else 0
    done_before = len(manifest.shards)
    writing: Future[None] | None = None
    # Leaving waits for the shard that is being written: what was computed is kept.
    with ThreadPoolExecutor(1, "capture-dataset-writer") as pool:
        for number, prompts in enumerate(plan.shards(first), done_before):
            shard, stop = _run(plan, runner, progress, number, prompts)
            if writing is not None:
                writing.result()
            writing = pool.submit(store, shard, stop)
        if writing is not None:
            writing.result()
    manifest.complete = True
    manifest.write(plan.output.folder)
    folder.close()
    return manifest


def _run(
    plan: Plan, runner: Runner, progress: Progress, number: int, prompts: list[Prompt]
) -> tuple[Shard, int]:
    """A shard with its rows, and the sample after its last."""
    items: list[Captured] = []
    for item in runner.run(prompts, plan.rows, plan.tokens):
        items.append(item)
        rows = len(item.positions) * len(plan.rows.taps)
        progress.done(len(item.token_ids), rows, rows * plan.row_bytes)
    items.sort(key=lambda item: item.prompt.entry.sample)
    shard = Shard(number, items, plan.rows.taps, plan.survey.carried, plan.stored_dtype)
    return shard, items[-1].prompt.entry.sample + 1
