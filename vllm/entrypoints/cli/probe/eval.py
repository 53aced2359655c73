# SPDX-License-Identifier: Apache-2.0
"""`vllm probe eval`."""

import argparse
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.probe.options import add_data_arguments, read_data
from vllm.entrypoints.cli.steer.options import (
    add_shared,
    check_engine,
    started_engine,
)
from vllm.v1.readouts.errors import fail

NAME = "probe"


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("probe", type=Path, metavar="FILE", help="The probe's file.")
    add_data_arguments(parser)
    add_shared(parser, "--position")
    parser.add_argument(
        "--threshold",
        type=float,
        help="The value above which it fires; 0.5 by default for sigmoid, else 0.",
    )


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    read_data(args, args.data, least=1)
    check_engine(args)


def run(args: argparse.Namespace) -> None:
    """Print how a probe classifies texts, and at how many of their tokens it fires."""
    from vllm.steering.measures import auroc
    from vllm.steering.probes import firing_rates, token_values
    from vllm.v1.readouts.modules import ProbeModule, load_module

    module = load_module(NAME, str(args.probe))
    if not isinstance(module, ProbeModule) or len(module.vectors) != 1:
        raise fail(
            f"probe: {str(args.probe)!r} must be a probe with one vector",
            "probe",
            str(args.probe),
        )
    data = read_data(args, args.data, least=1)
    threshold = args.threshold
    if threshold is None:
        threshold = 0.5 if module.activation == "sigmoid" else 0.0
    spec = {"kind": "probe", "probe": NAME}
    with started_engine(args, readout_modules={NAME: str(args.probe)}) as llm:
        values = token_values(llm, data.texts, {NAME: spec})[NAME]
    import numpy as np

    reduce = np.mean if args.position == "mean" else lambda own: own[-1]
    scores = np.array([reduce(own) for own in values])
    accuracy = ((scores > threshold) == data.labels).mean()
    fired, falsely = firing_rates(values, data.labels, threshold)
    print(f"texts      {len(scores)}, {int(data.labels.sum())} of them positive")
    print(f"accuracy   {accuracy:.1%} at the threshold {threshold:g}")
    print(f"AUROC      {auroc(scores[data.labels], scores[~data.labels]):.3f}")
    print(f"tokens     fires at {fired:.1%} in positive texts, {falsely:.1%} in others")
