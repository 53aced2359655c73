# SPDX-License-Identifier: Apache-2.0
"""`vllm steer sweep`."""

import argparse
import json
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    add_prompt_arguments,
    add_reading_arguments,
    add_scales_argument,
    add_server_arguments,
    add_shared,
    check_engine,
    prompts_of,
    reading_of,
    sampling_of,
    started_engine,
)
from vllm.v1.steering.errors import fail


def add_arguments(parser: Any) -> None:
    """Add the options."""
    add_shared(parser, "--vectors", "--layers", "--plot", "--json")
    add_scales_argument(parser, "-2,-1,-0.5,0,0.5,1,2")
    parser.add_argument(
        "--score",
        metavar="FILE.py:FUNCTION",
        help="A function from a generated text to a number; its mean is shown. "
        "Without it, only the perplexity is shown.",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help="Samples per prompt; needs --temperature.",
    )
    add_prompt_arguments(parser)
    add_reading_arguments(parser)
    add_server_arguments(parser)


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    prompts_of(args)
    if args.samples < 1 or (args.samples > 1 and args.temperature == 0):
        raise fail(
            f"samples: {args.samples} per prompt; give 1, or more and --temperature "
            "above 0",
            "samples",
            args.samples,
        )
    check_engine(args)


def run(args: argparse.Namespace) -> None:
    """Print the tables; write the plot and the JSON if requested."""
    from vllm.steering.convert import read_vectors, reworked
    from vllm.steering.plot import check_can_draw, draw_sweep
    from vllm.steering.sweep import check_fits, load_score, sweep
    from vllm.steering.tables import sweep_table

    prompts = prompts_of(args)
    score = None if args.score is None else load_score(args.score)
    vectors = reworked(read_vectors(args.vectors, reading_of(args)), args.layers)
    if args.plot is not None:
        check_can_draw(args.plot)
    with started_engine(args, enable_steering=True) as llm:
        check_fits(llm, vectors, args.vectors)
        sampling = sampling_of(args, n=args.samples)
        cells = sweep(llm, vectors, prompts, args.scales, score, sampling)
    if score is not None:
        print(f"\nmean {args.score.rpartition(':')[2]}:")
        print(sweep_table(cells, "score"))
    print("\nperplexity of the generated texts under the unsteered model:")
    print(sweep_table(cells, "perplexity"))
    if args.plot is not None:
        draw_sweep(args.plot, cells)
        print(f"\nplot: {args.plot}")
    if args.json is not None:
        args.json.write_text(json.dumps([cell.as_json() for cell in cells], indent=1))
