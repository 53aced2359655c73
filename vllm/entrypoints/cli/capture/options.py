# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm capture`, and the specs that they describe."""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm.capture_dataset.readouts import parse_readouts
from vllm.capture_dataset.spec import (
    FORMATS,
    VALUE_DTYPES,
    OutputSpec,
    RowsSpec,
    SourceSpec,
)
from vllm.entrypoints.cli.steer.options import parse_layers
from vllm.utils.argparse_utils import human_readable_int
from vllm.v1.capture.selectors import fail
from vllm.v1.capture.types import HOOK_NAMES
from vllm.v1.residual.addresses import hook_name

COMPRESSIONS = ("none", "zstd", "lz4")


def add_arguments(parser: Any) -> None:
    """Add the options, including those of an engine."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Prompts: .jsonl, .csv, .tsv, .parquet, .txt (one per line), or the "
        "folder of a Hugging Face data set.",
    )
    _add_source(parser.add_argument_group("source", "Which prompts."))
    _add_rows(parser.add_argument_group("rows", "Which rows of each prompt."))
    _add_output(parser.add_argument_group("output", "Where the data set goes."))
    server = parser.add_argument_group("server", "A server instead of an engine here.")
    server.add_argument("--server", metavar="URL", help="Such as http://host:8000.")
    server.add_argument("--api-key", help="Of the server.")
    server.add_argument(
        "--concurrency", type=int, default=32, help="Requests at a time."
    )
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None)


def _add_source(group: Any) -> None:
    group.add_argument(
        "--column",
        help="The column with the prompts: texts, lists of chat messages, or lists of "
        "token ids. By default the first of prompt, text, messages, conversations.",
    )
    group.add_argument("--id", metavar="COLUMN", help="The column with prompts' ids.")
    group.add_argument(
        "--on-repeated-id",
        choices=("refuse", "replace"),
        default="refuse",
        help="replace: the last prompt of an id is taken.",
    )
    group.add_argument(
        "--carry",
        type=_names,
        default=(),
        metavar="COLUMN,...",
        help="Columns that go beside the rows, such as labels.",
    )
    group.add_argument(
        "--chat", action="store_true", help="Texts are a user's messages."
    )
    group.add_argument("--split", help="Of a Hugging Face data set with several.")
    group.add_argument("--limit", type=int, help="How many prompts are taken.")
    group.add_argument(
        "--truncate", type=int, metavar="TOKENS", help="Cut longer prompts here."
    )


def _add_rows(group: Any) -> None:
    group.add_argument(
        "--layers",
        type=parse_layers,
        metavar="L,L-L,...",
        help="Layers, counted from 0, such as 3 or 2,4-6; all by default.",
    )
    group.add_argument(
        "--hook",
        type=_names,
        default=("post_block",),
        metavar="HOOK,...",
        help=f"Hook points: {', '.join(HOOK_NAMES)}.",
    )
    group.add_argument(
        "--positions",
        type=_positions,
        default="all_prompt",
        help="all_prompt, last_prompt, all_generated, all, or JSON such as [0,5].",
    )
    group.add_argument(
        "--max-tokens", type=int, default=1, help="Generated per prompt, greedily."
    )
    group.add_argument(
        "--readout",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="A readout beside the rows, such as lens (all defaults) or "
        'risk={"kind":"probe","probe":"risk"}; may be repeated. Layers, hook points '
        "and positions are those of the rows where it names none. Probes and SAEs are "
        "loaded with --readout-modules and --sae.",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="DIR", help="The data set's folder.")
    group.add_argument("--format", choices=FORMATS, default="parquet")
    group.add_argument(
        "--values-dtype",
        choices=VALUE_DTYPES,
        default="auto",
        help="How values are stored; auto is the model's dtype (--dtype), and float32 "
        "for bfloat16 where the format has none.",
    )
    group.add_argument(
        "--shard-size",
        type=human_readable_int,
        default=256 << 20,
        metavar="BYTES",
        help="Of values per file, such as 64M; 256 MiB by default. A killed run loses "
        "at most what it has of two shards, and about three are in memory.",
    )
    group.add_argument("--compression", choices=COMPRESSIONS, default="none")
    group.add_argument(
        "--context-size", type=int, default=128, help="Rows per entry, for saelens."
    )
    group.add_argument(
        "--resume", action="store_true", help="Go on where a run was ended."
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Tell rows, bytes and time, after trying some prompts; write nothing.",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positions(text: str) -> Any:
    """Parse a position selector: a name, or JSON."""
    if not text.startswith(("[", "{", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def specs_of(args: argparse.Namespace) -> tuple[SourceSpec, RowsSpec, OutputSpec]:
    """Convert the options to specs.

    Raises:
        CaptureValidationError: an option's value is invalid, or options conflict.

    """
    for name, least in (
        ("limit", 1),
        ("truncate", 1),
        ("max_tokens", 1),
        ("shard_size", 1),
        ("context_size", 1),
        ("concurrency", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise fail(f"{name}: {option} must be at least {least}", name, value)
    unknown = {name for name in args.hook if hook_name(name) is None}
    args.hook = tuple(hook_name(name) or name for name in args.hook)
    if unknown or not args.hook:
        raise fail(
            f"hook: there is no {sorted(unknown)}; there are {list(HOOK_NAMES)}",
            "hook",
            args.hook,
        )
    if (args.model is None) == (args.server is None):
        raise fail("model: say --model MODEL or --server URL", "model", args.model)
    if args.out is None and not args.dry_run:
        raise fail("out: say where the data set goes, with --out DIR", "out", None)
    source = SourceSpec(
        path=args.source,
        column=args.column,
        id_column=args.id,
        carry=args.carry,
        chat=args.chat,
        split=args.split,
        limit=args.limit,
        replace_repeated=args.on_repeated_id == "replace",
        truncate=args.truncate,
    )
    rows = RowsSpec(
        hooks=args.hook,
        layers=tuple(args.layers or ()),
        positions=args.positions,
        max_tokens=args.max_tokens,
        values_dtype=args.values_dtype,
        readouts=parse_readouts(args.readout),
    )
    output = OutputSpec(
        folder=args.out or Path(),
        format=args.format,
        shard_bytes=args.shard_size,
        compression=args.compression,
        context_size=args.context_size,
        resume=args.resume,
    )
    return source, rows, output
