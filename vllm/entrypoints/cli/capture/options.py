# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm capture`, and the specs that they describe."""

import argparse
import json
from pathlib import Path
from typing import Any, TypeVar

from vllm.capture_dataset.progress import parse_bytes
from vllm.capture_dataset.readouts import parse_readouts
from vllm.capture_dataset.sources import records
from vllm.capture_dataset.spec import (
    FORMATS,
    VALUE_DTYPES,
    OutputSpec,
    RowsSpec,
    SourceSpec,
)
from vllm.entrypoints.cli.steer.options import parse_layers
from vllm.v1.capture.errors import fail
from vllm.v1.residual.selectors import parse_positions
from vllm.v1.residual.tap import HOOK_NAMES, did_you_mean, hook_name, parse_address

COMPRESSIONS = ("none", "zstd", "lz4")
COUNTS = (
    *("limit", "truncate", "max_tokens", "shard_size", "context_size"),
    *("concurrency", "ray_engines"),
)
Spec = TypeVar("Spec", SourceSpec, RowsSpec, OutputSpec)


def run(args: argparse.Namespace) -> int:
    """Collect a data set and return the exit status."""
    from vllm.entrypoints.cli.capture import run as command

    return command.run(args)


def check(args: argparse.Namespace) -> None:
    """Check what needs no model, before heavy imports.

    Raises:
        CaptureValidationError: an option is invalid, or the source cannot be read.

    """
    source, _, _ = specs_of(args)
    records(source.path, source.split)


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
    _add_rows(parser.add_argument_group("rows", "The rows to capture of each prompt."))
    _add_output(parser.add_argument_group("output", "The data set to write."))
    server = parser.add_argument_group(
        "server", "Use servers instead of an engine in this process."
    )
    server.add_argument(
        "--server",
        nargs="+",
        action="extend",
        metavar="URL",
        help="URLs, such as http://host:8000, of servers of one model, which share "
        "the prompts.",
    )
    server.add_argument("--api-key", help="API key of the servers.")
    server.add_argument(
        "--concurrency",
        type=int,
        default=32,
        help="Number of concurrent requests at each server.",
    )
    ray = parser.add_argument_group("ray", "Use engines in a Ray cluster.")
    ray.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="Start engines in a running Ray cluster, that of this machine by default. "
        "They write their shards to --out, which every node must share.",
    )
    ray.add_argument(
        "--ray-engines",
        type=int,
        metavar="N",
        help="Number of engines; by default as many as there are GPUs for, or without "
        "GPUs one on each node.",
    )


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
        help="replace: use the last prompt of a repeated id.",
    )
    group.add_argument(
        "--carry",
        action=_More,
        type=_names,
        default=(),
        metavar="COLUMN,...",
        help="Columns to store with the rows, such as labels; may be repeated.",
    )
    group.add_argument(
        "--chat", action="store_true", help="Treat texts as user messages of a chat."
    )
    group.add_argument("--split", help="Split of a Hugging Face data set with several.")
    group.add_argument("--limit", type=int, help="Most prompts to use.")
    group.add_argument(
        "--truncate",
        type=int,
        metavar="TOKENS",
        help="Truncate longer prompts to this number of tokens.",
    )


def _add_rows(group: Any) -> None:
    group.add_argument(
        "--layers",
        action=_More,
        type=parse_layers,
        metavar="L,L-L,...",
        help="Layers, counted from 0, such as 3 or 2,4-6; all by default.",
    )
    group.add_argument(
        "--hook",
        action=_More,
        type=_names,
        default=("post_block",),
        metavar="HOOK,...",
        help=f"Hook points: {', '.join(HOOK_NAMES)}; or, without --layers, addresses "
        "such as resid_post.3.",
    )
    group.add_argument(
        "--positions",
        type=_positions,
        default="all_prompt",
        help="all_prompt, last_prompt, all_generated, all, or JSON such as [0,5].",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=1,
        help="Tokens to generate per prompt, greedily.",
    )
    group.add_argument(
        "--readout",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="A readout to store with the rows, such as lens (all defaults) or "
        'risk={"kind":"probe","probe":"risk"}; may be repeated. Layers, hook '
        "points and positions default to those of the rows. Probes and SAEs are "
        "loaded with --readout-modules and --sae.",
    )
    group.add_argument(
        "--keep-when",
        type=_rule,
        metavar="JSON",
        help="Store rows only if, or where, a readout fires, such as "
        '{"readout":"risk","above":0.9}, or with "scope":"token","before":8,"after":8 '
        "the rows around tokens that fire.",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="DIR", help="The data set's folder.")
    group.add_argument("--format", choices=FORMATS, default="parquet")
    group.add_argument(
        "--values-dtype",
        choices=VALUE_DTYPES,
        default="auto",
        help="Dtype of stored values; auto is the model's dtype (--dtype), and "
        "float32 for bfloat16 in formats without it.",
    )
    group.add_argument(
        "--shard-size",
        type=parse_bytes,
        default=256 << 20,
        metavar="BYTES",
        help="Bytes of values per file, such as 64M, 20MB or 1GiB; 256 MiB by "
        "default. A killed run loses at most two unfinished shards; about three are "
        "in memory.",
    )
    group.add_argument("--compression", choices=COMPRESSIONS, default="none")
    group.add_argument(
        "--context-size",
        type=int,
        default=128,
        help="Rows per entry, for the format saelens.",
    )
    group.add_argument(
        "--resume", action="store_true", help="Continue an interrupted run."
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Estimate rows, bytes and time from some prompts; write nothing.",
    )


class _More(argparse.Action):
    """Adds to what the option gave before, of which argparse would keep the last."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        more = values if before is self.default else (*before, *values)
        setattr(namespace, self.dest, more)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positions(text: str) -> Any:
    """Parse a position selector: a name, or JSON."""
    return _json(text) if text.startswith(("[", "{", '"')) else text


def _rule(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    found = _json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def specs_of(args: argparse.Namespace) -> tuple[SourceSpec, RowsSpec, OutputSpec]:
    """Convert the options to specs.

    Raises:
        CaptureValidationError: an option's value is invalid, or options conflict.

    """
    for name in COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise fail(f"{name}: {option} must be at least 1", name, value)
    parse_positions(args.positions, "positions", fail)
    if args.positions == "all_generated" and args.max_tokens == 1:
        raise fail(
            "positions: the last generated token has no row, so all_generated selects "
            "none with --max-tokens 1; give a larger --max-tokens",
            "positions",
            args.positions,
        )
    _resolve_hooks(args)
    if (args.model is None) == (args.server is None):
        raise fail(
            "model: give --model MODEL or --server URL, not both", "model", args.model
        )
    if args.ray is None and args.ray_engines is not None:
        raise fail(
            "ray_engines: --ray-engines is for --ray; add --ray, or leave it out",
            "ray_engines",
            args.ray_engines,
        )
    if args.ray is not None and args.server is not None:
        raise fail("ray: give --ray or --server, not both", "ray", args.ray)
    if args.out is None and not args.dry_run:
        raise fail("out: give the data set's folder with --out DIR", "out", None)
    replaces = args.on_repeated_id == "replace"
    source = _spec(
        SourceSpec,
        args,
        path=args.source,
        carry=tuple(dict.fromkeys(args.carry)),
        id_column=args.id,
        replace_repeated=replaces,
    )
    rows = _spec(
        RowsSpec,
        args,
        hooks=args.hook,
        layers=tuple(sorted(set(args.layers or ()))),
        readouts=parse_readouts(args.readout),
    )
    named = (rows.keep_when or {}).get("readout")
    if rows.keep_when is not None and named not in rows.readouts:
        raise fail(
            f"keep_when: there is no readout {named!r}; name one of "
            f"{sorted(rows.readouts)}, or add it with --readout",
            "keep_when",
            rows.keep_when,
        )
    folder = args.out or Path()
    output = _spec(OutputSpec, args, folder=folder, shard_bytes=args.shard_size)
    return source, rows, output


def _spec(kind: type[Spec], args: argparse.Namespace, **given: Any) -> Spec:
    """A spec of what is given, and of the options that have the names of its fields."""
    names = kind.__dataclass_fields__.keys() - given.keys()
    return kind(**given, **{name: getattr(args, name) for name in names})


def _resolve_hooks(args: argparse.Namespace) -> None:
    """Replace names in `args.hook` by ours, and addresses by hook points and layers.

    Raises:
        CaptureValidationError: a name is unknown, or the addresses are not all hook
            points of all their layers, which is the form of a data set.

    """
    taps = {tap for name in args.hook if (tap := parse_address(name)) is not None}
    names = [name for name in args.hook if parse_address(name) is None]
    unknown = sorted(name for name in names if hook_name(name) is None)
    if unknown or not args.hook:
        raise fail(
            f"hook: unknown {unknown}; use some of {list(HOOK_NAMES)}, or addresses "
            f"such as post_block.3{did_you_mean(next(iter(unknown), None))}",
            "hook",
            args.hook,
        )
    if not taps:
        args.hook = tuple(dict.fromkeys(str(hook_name(name)) for name in names))
        return
    layers, hooks = ({tap[i] for tap in taps} for i in (0, 1))
    if names or args.layers is not None or len(taps) != len(layers) * len(hooks):
        raise fail(
            "hook: addresses include the layers, so they must all be addresses, for "
            "the same layers at each hook point, without --layers; or give --hook "
            "post_block --layers 3",
            "hook",
            args.hook,
        )
    args.hook = tuple(name for name in HOOK_NAMES if name in hooks)
    args.layers = sorted(layers)
