# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm capture`: checks, collection, and exit status."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import islice
from shutil import disk_usage
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm.capture_dataset.collect import begin, collect
from vllm.capture_dataset.manifest import NAME, Manifest, taken
from vllm.capture_dataset.plan import Plan, known_facts
from vllm.capture_dataset.progress import Progress, human_bytes, human_seconds
from vllm.capture_dataset.runners import CaptureRunError, Runner, open_engine
from vllm.capture_dataset.spec import OutputSpec, RowsSpec
from vllm.capture_dataset.survey import Survey
from vllm.entrypoints.cli.capture.options import specs_of
from vllm.entrypoints.cli.steer.options import check_client
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.residual.bounds import counted
from vllm.v1.residual.sizes import num_layers

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

TRIED_PROMPTS = 32
INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    """Collect a data set and return the exit status."""
    # Rows depend on how prompts are batched, which is deterministic in one process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        source, rows, output = specs_of(args)
        survey = Survey.of(source)
        if not args.dry_run:
            _check_folder(survey, rows, output)
        runner = _runner(args)
    except (ValueError, OSError) as error:  # Also of a model that cannot be loaded.
        return _print_error(str(error))
    try:
        plan = Plan.of(survey, rows, output, runner)
        if args.dry_run:
            estimate(plan, runner)
            return 0
        return _collect(plan, runner)
    except (CaptureValidationError, CaptureRunError, ValueError) as error:
        return _print_error(str(error))
    except OSError as error:
        return _print_error(
            f"the data set could not be written: {error}. The shards listed in "
            f"{output.folder / NAME} are complete; make room and run this again with "
            "--resume"
        )
    except KeyboardInterrupt:
        _print_error(
            f"interrupted; {output.folder} is readable, continue with --resume"
        )
        return INTERRUPTED
    finally:
        runner.close()


def _collect(plan: Plan, runner: Runner) -> int:
    stored = sum(shard.num_value_bytes for shard in begin(plan).shards)
    folder = plan.output.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    plan.check_room(disk_usage(there).free + stored)
    progress = Progress(plan.survey.num_entries)
    try:
        manifest = collect(plan, runner, progress)
    finally:
        progress.close()
    rows = sum(shard.num_rows for shard in manifest.shards)
    size = sum(shard.num_value_bytes for shard in manifest.shards)
    num_shards = len(manifest.shards)
    print(
        f"{plan.output.folder}: {plan.survey.num_entries:,} prompts, {rows:,} rows, "
        f"{human_bytes(size)} of values in {counted(num_shards, 'shard')}"
        + ("" if plan.rows.keep_when is None else "; others were not kept")
    )
    return 0


def estimate(plan: Plan, runner: Runner) -> None:
    """Print rows, bytes and time; the time is extrapolated from a few prompts."""
    prompts, tokens, rows = plan.totals()
    tried = list(islice(plan.prompts(), TRIED_PROMPTS))
    for _ in range(2):  # The first time warms up.
        began = monotonic()
        done = sum(len(i.token_ids) for i in runner.run(tried, plan.rows, plan.tokens))
        seconds = monotonic() - began
    print(f"prompts     {prompts:,}")
    print(f"tokens      {tokens:,}" + (" at most" if plan.rows.max_tokens > 1 else ""))
    print(f"rows        {rows:,} of {plan.model.hidden_size} {plan.stored_dtype}")
    print(f"bytes       {human_bytes(rows * plan.row_bytes)} of values")
    if plan.readouts:
        read_out = rows // len(plan.rows.taps) * plan.readout_bytes
        print(f"read out    {human_bytes(read_out)}, {len(plan.readouts)} columns")
    print(f"time        about {human_seconds(seconds * tokens / max(done, 1))}")


def _check_folder(survey: Survey, rows: RowsSpec, output: OutputSpec) -> None:
    """Check the output folder before a model is loaded."""
    if not (output.folder / NAME).exists():
        return
    if not output.resume:
        raise taken(output.folder)
    manifest = Manifest.read(output.folder)
    known = known_facts(survey, rows, output)
    manifest.check_same(manifest.facts | known, output.folder)


def _runner(args: argparse.Namespace) -> Any:
    if args.server is not None:
        check_client(args.server[0])
        from vllm.capture_dataset.remote import Server
        from vllm.capture_dataset.servers import ServersRunner

        return ServersRunner(
            [
                Server(url, args.tokenizer, args.api_key, args.concurrency)
                for url in dict.fromkeys(args.server)
            ]
        )
    from vllm.engine.arg_utils import EngineArgs

    engine_args = EngineArgs.from_cli_args(args)
    engine_args.enable_readouts |= bool(args.readout)
    _check_layers(args.layers, copy(engine_args))
    if args.ray is not None:
        from vllm.capture_dataset.ray_cluster import RayRunner

        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        opened = partial(open_engine, engine_args)
        return RayRunner(args.ray, args.ray_engines, opened, ranks, args.out)
    return open_engine(engine_args)


def _check_layers(layers: Sequence[int] | None, engine_args: "EngineArgs") -> None:
    """Refuse layers that a model lacks before it is loaded, which can take minutes."""
    if layers:
        count = num_layers(engine_args.create_model_config())
        if max(layers) >= count:
            raise fail(
                f"layers: the model has {count} layers, counted from 0, and no layer "
                f"{max(layers)}",
                "layers",
                max(layers),
            )


def _print_error(message: str) -> int:
    print(f"vllm capture: {message}", file=sys.stderr)
    return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
