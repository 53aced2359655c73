# SPDX-License-Identifier: Apache-2.0
"""`vllm steer apply`."""

import argparse
import shutil
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    add_prompt_arguments,
    add_reading_arguments,
    add_scales_argument,
    add_shared,
    check_engine,
    prompts_of,
    reading_of,
    sampling_of,
    started_engine,
)


def add_arguments(parser: Any) -> None:
    """Add the options."""
    add_shared(parser, "--vectors", "--layers")
    add_scales_argument(parser, "1")
    add_prompt_arguments(parser)
    add_reading_arguments(parser)


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    prompts_of(args)
    check_engine(args)


def run(args: argparse.Namespace) -> None:
    """Print the completions of each prompt side by side, unsteered first."""
    from vllm.steering.convert import read_vectors, reworked
    from vllm.steering.sweep import at_scales, check_fits, generate
    from vllm.steering.tables import side_by_side

    prompts = prompts_of(args)
    vectors = reworked(read_vectors(args.vectors, reading_of(args)), args.layers)
    with started_engine(args, enable_steering=True) as llm:
        check_fits(llm, vectors, args.vectors)
        scales = [0.0, *filter(None, args.scales)]
        settings = at_scales(vectors, scales)
        texts = generate(llm, prompts, settings, sampling_of(args))
    titles = [f"times {scale:+g}" if scale else "unsteered" for scale in scales]
    width = shutil.get_terminal_size((100, 24)).columns
    for number, prompt in enumerate(prompts):
        shown = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        print(f"\n{shown}")
        print(side_by_side(titles, [one[number].text for one in texts], width))
