# SPDX-License-Identifier: Apache-2.0
"""Runs prompts and writes their rows as a data set."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from vllm import __version__
from vllm.capture_dataset.manifest import NAME, Manifest, ShardFile, taken
from vllm.capture_dataset.plan import Plan
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.prompts import Prompt
from vllm.capture_dataset.runners import Runner, Writer
from vllm.capture_dataset.shards import ShardFolder
from vllm.capture_dataset.table import Captured, Shard


def begin(plan: Plan) -> Manifest:
    """The manifest to start with: a new one, or that of the run to resume.

    Raises:
        CaptureValidationError: the folder contains something else.

    """
    folder, facts = plan.output.folder, plan.facts()
    there = (folder / NAME).is_file()
    if there and not plan.output.resume:
        raise taken(folder)
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


def collect(plan: Plan, runner: Runner | Writer, progress: Progress) -> Manifest:
    """Run all prompts that are not done, and write their rows.

    If this ends early, the folder holds complete shards and a manifest that lists them,
    and another run with `resume` continues.

    Raises:
        OSError: writing failed, for example because the disk is full.
        CaptureRunError: a prompt failed.

    """
    manifest = begin(plan)
    if manifest.complete:
        return manifest
    plan.output.folder.mkdir(parents=True, exist_ok=True)
    folder = ShardFolder(plan.output.folder, manifest.facts)
    manifest.write(plan.output.folder)
    for done in manifest.shards:
        progress.skipped(done.num_prompts)

    def note(done: ShardFile) -> None:
        """Note a written shard in the manifest."""
        manifest.shards.append(done)
        folder.index(manifest.shards, plan.rows.taps)
        manifest.write(plan.output.folder)

    first = manifest.shards[-1].stop_sample if manifest.shards else 0
    number = len(manifest.shards)
    if isinstance(runner, Writer):
        with closing(runner.written(plan, manifest.facts, first, number)) as written:
            for done in written:
                note(done)
                progress.done(
                    *(done.num_tokens, done.num_rows, done.num_value_bytes),
                    done.num_prompts,
                )
    else:
        _collect_here(plan, runner, progress, first, number, folder, note)
    manifest.complete = True
    manifest.write(plan.output.folder)
    folder.close()
    return manifest


def _collect_here(
    plan: Plan,
    runner: Runner,
    progress: Progress,
    first: int,
    number: int,
    folder: ShardFolder,
    note: Callable[[ShardFile], None],
) -> None:
    """Compute the shards from a sample on, while the one before is written."""

    def count(item: Captured) -> None:
        rows = len(item.positions) * len(plan.rows.taps)
        progress.done(len(item.token_ids), rows, rows * plan.row_bytes)

    def store(shard: Shard) -> None:
        """Write and note a shard; runs on the writer's thread."""
        note(folder.write(shard))

    writing: Future[None] | None = None
    # Leaving the block waits for the shard that is being written, so computed rows are
    # kept.
    with ThreadPoolExecutor(1, "capture-dataset-writer") as pool:
        for index, prompts in enumerate(plan.shards(first), number):
            shard = run_shard(plan, runner, index, prompts, count)
            if writing is not None:
                writing.result()
            writing = pool.submit(store, shard)
        if writing is not None:
            writing.result()


def run_shard(
    plan: Plan,
    runner: Runner,
    number: int,
    prompts: list[Prompt],
    count: Callable[[Captured], None] = lambda _: None,
) -> Shard:
    """A shard with its rows.

    Args:
        plan: the plan of the data set.
        runner: runs the prompts.
        number: of the shard.
        prompts: those of the shard.
        count: called with each prompt's rows.

    """
    items: list[Captured] = []
    for item in runner.run(prompts, plan.rows, plan.tokens):
        items.append(item)
        count(item)
    items.sort(key=lambda item: item.prompt.entry.sample)
    return Shard(
        number,
        items,
        plan.rows.taps,
        plan.survey.carried,
        plan.stored_dtype,
        plan.readouts,
    )
