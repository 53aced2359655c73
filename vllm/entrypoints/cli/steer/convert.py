# SPDX-License-Identifier: Apache-2.0
"""`vllm steer convert`."""

import argparse
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    add_reading_arguments,
    add_shared,
    reading_of,
)


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "source",
        help="A file in .safetensors, .json, .gguf, .svec, .pt, .npy or .npz, or an "
        "SAE's folder.",
    )
    parser.add_argument("target", help="Output file; its ending determines the form.")
    add_shared(parser, "--layers")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="Multiply the vectors by this factor."
    )
    parser.add_argument(
        "--unit", action="store_true", help="Normalize to length 1 first."
    )
    parser.add_argument(
        "--for-model",
        metavar="MODEL",
        help="Record that the vectors belong to this model, not to a recorded one.",
    )
    parser.add_argument(
        "--gguf-writer",
        choices=("repeng", "llama.cpp"),
        default="repeng",
        help="The program that is to read GGUF; llama.cpp refuses block 0.",
    )
    parser.add_argument("--model-hint", default="", help="The model's type, for GGUF.")
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Read, select and scale, write, and print what was written."""
    from vllm.steering.convert import for_model, read_vectors, reworked, write_vectors
    from vllm.steering.tables import vectors_table

    vectors = read_vectors(args.source, reading_of(args))
    vectors = reworked(vectors, args.layers, args.scale, args.unit)
    if args.for_model is not None:
        vectors = for_model(vectors, args.for_model)
    write_vectors(args.target, vectors, args.gguf_writer, args.model_hint)
    print(vectors_table(vectors))
    print(f"\nwritten: {args.target}")
