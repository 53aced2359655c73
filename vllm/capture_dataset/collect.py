# SPDX-License-Identifier: Apache-2.0
"""Runs prompts and writes their rows as a data set."""

from concurrent.futures import Future, ThreadPoolExecutor

from vllm import __version__
from vllm.capture_dataset.manifest import Manifest, manifest_path
from vllm.capture_dataset.plan import Plan
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.prompts import Prompt
from vllm.capture_dataset.runners import Runner
from vllm.capture_dataset.shards import ShardFolder
from vllm.capture_dataset.table import Captured, Shard
from vllm.v1.capture.errors import fail


def begin(plan: Plan) -> Manifest:
    """The manifest to start with: a new one, or that of the run to resume.

    Raises:
        CaptureValidationError: the folder contains something else.

    """
    folder, facts = plan.output.folder, plan.facts()
    there = manifest_path(folder).is_file()
    if there and not plan.output.resume:
        raise fail(
            f"out: {str(folder)!r} holds a data set already; use --resume to continue "
            "it, or choose another folder",
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

    def store(shard: Shard, stop_sample: int) -> None:
        """Write a shard and note it in the manifest; runs on the writer's thread."""
        manifest.shards.append(folder.write(shard, stop_sample))
        folder.index(manifest.shards, plan.rows.taps)
        manifest.write(plan.output.folder)

    first = manifest.shards[-1].stop_sample if manifest.shards else 0
    done_before = len(manifest.shards)
    writing: Future[None] | None = None
    # Leaving the block waits for the shard that is being written, so computed rows are
    # kept.
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
    """A shard with its rows, and the number of the sample after its last."""
    items: list[Captured] = []
    for item in runner.run(prompts, plan.rows, plan.tokens):
        items.append(item)
        rows = len(item.positions) * len(plan.rows.taps)
        progress.done(len(item.token_ids), rows, rows * plan.row_bytes)
    items.sort(key=lambda item: item.prompt.entry.sample)
    shard = Shard(
        number,
        items,
        plan.rows.taps,
        plan.survey.carried,
        plan.stored_dtype,
        plan.readouts,
    )
    return shard, items[-1].prompt.entry.sample + 1
