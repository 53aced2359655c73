# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm patch`."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.steer.options import (
    add_server_arguments,
    check_engine,
    parse_layers,
    started_engine,
)
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.patching import PatchResult


MOST_COLUMNS = 12
"""Most columns of a printed map; a wider one shows its largest cells only."""


def add_arguments(parser: Any) -> None:
    """Declare the options."""
    parser.add_argument("clean", metavar="CLEAN", help="The prompt with the answer.")
    parser.add_argument("corrupt", metavar="CORRUPT", help="The prompt to patch.")
    group = parser.add_argument_group("patch", "The grid, and what is measured.")
    group.add_argument("--answer", help='Usually with a space before it: " Paris".')
    group.add_argument("--foil", help="The answer to the corrupt prompt.")
    group.add_argument(
        "--metric",
        default=None,
        help="logit_diff (the default with a foil), logprob, recovered, kl, or "
        "probe:NAME.",
    )
    group.add_argument(
        "--hook", action="append", metavar="NAME", help="A hook point; repeatable."
    )
    group.add_argument("--layers", default="all", help="Such as 0,4-7.")
    group.add_argument(
        "--heads", type=parse_heads, default=None, help='Such as 0,3-5, or "all".'
    )
    group.add_argument(
        "--noise",
        action="store_true",
        help="Patch CLEAN with rows of CORRUPT instead.",
    )
    group.add_argument(
        "--top", type=int, default=5, metavar="K", help="How many cells are listed."
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="Draw the maps.")
    group.add_argument("--json", type=Path, metavar="FILE", help="Write all values.")
    add_server_arguments(parser)


def parse_heads(text: str) -> Any:
    """`"0,3-5"` as `[0, 3, 4, 5]`, and `"all"`."""
    return text if text == "all" else parse_layers(text)


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    check_engine(args)
    needs_answer = args.metric in (None, "logit_diff", "logprob", "recovered")
    if needs_answer and args.answer is None:
        raise fail("answer: give it with --answer ' Paris'", "answer", None)


def run(args: argparse.Namespace) -> None:
    """Start an engine, sweep, and show what was found.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    from vllm.patching import patch_sweep
    from vllm.patching.picture import check_can_draw

    if args.out is not None:
        check_can_draw(args.out)
    llm: Any  # An `LLM`, or a server's.
    with started_engine(args, enable_patching=True) as llm:
        result = patch_sweep(
            llm if args.server is None else llm.client,
            args.clean,
            args.corrupt,
            effect="noise" if args.noise else "denoise",
            hooks=args.hook or ("post_block",),
            layers=args.layers,
            heads=args.heads,
            metric=args.metric or ("logprob" if args.foil is None else "logit_diff"),
            answer=args.answer,
            foil=args.foil,
        )
    print("\n".join(report(result, args.top)))
    if args.out is not None:
        result.heatmap(args.out)
        print(f"map: {args.out}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_json(), indent=1))


def report(result: "PatchResult", top: int) -> Iterator[str]:
    """The lines that describe a result: its baselines, maps and largest cells."""
    yield (
        f"{result.metric}: clean {result.clean:.4f}, corrupt {result.corrupt:.4f}, "
        f"noise floor {result.noise_floor:.1e}"
    )
    if result.heads is None and len(result.positions) <= MOST_COLUMNS:
        names = [result.tokens[group[0]].strip()[:8] for group in result.positions]
        for hook, values in result.values.items():
            yield f"\n{hook:<10}" + "".join(f"{name:>9}" for name in names)
            for layer, row in zip(result.layers, values, strict=True):
                yield f"{layer:<10}" + "".join(f"{value:9.3f}" for value in row)
    yield "\nlargest changes:"
    for cell in result.top(top):
        head = "" if cell.head is None else f", head {cell.head}"
        yield (
            f"{cell.value:9.4f}  {cell.hook} of layer {cell.layer}{head}, position "
            f"{cell.position} {cell.token!r}"
        )
