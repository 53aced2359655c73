# SPDX-License-Identifier: Apache-2.0
"""`vllm probe train`."""

import argparse
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    ENGINE_DEFAULTS as ENGINE_DEFAULTS,
)
from vllm.entrypoints.cli.steer.options import (
    add_hook_argument,
    add_layers_argument,
    resolve_address,
    start_engine,
)
from vllm.v1.readouts.errors import fail
from vllm.v1.residual.model_identity import digest_of_weights


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help='JSON Lines of {"text": ..., "label": true or false}, or of pairs '
        '{"positive": ..., "negative": ...}; texts or chats.',
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="Output file, which ends in .safetensors.",
    )
    add_hook_argument(parser)
    add_layers_argument(parser)
    parser.add_argument(
        "--method", choices=("logistic", "mass-mean"), default="logistic"
    )
    parser.add_argument("--position", choices=("last", "mean"), default="last")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.25,
        help="Share of held-out texts for the accuracy.",
    )
    parser.add_argument("--penalty", type=float, default=1.0, help="Of logistic.")


def run(args: argparse.Namespace) -> None:
    """Train a probe at each layer, print their metrics and save the best one."""
    from vllm.steering.probes import (
        best_of,
        held_out,
        prompt_rows,
        read_labelled,
        train,
    )
    from vllm.v1.readouts.modules import save_probe

    if args.out.suffix != ".safetensors" or not args.out.absolute().parent.is_dir():
        raise fail(
            f"out: {str(args.out)!r} must end in .safetensors, in an existing folder",
            "out",
            str(args.out),
        )
    if not 0 < args.held_out < 1:
        raise fail("held-out must be between 0 and 1", "held_out", args.held_out)
    if not 0 <= args.penalty < float("inf"):
        raise fail("penalty must be a finite number from 0", "penalty", args.penalty)
    resolve_address(args)
    texts, labels = read_labelled(args.data)
    llm = start_engine(args, enable_readouts=True)
    rows = prompt_rows(llm, texts, args.hook, args.layers, args.position)
    test = held_out(labels, args.held_out, args.seed or 0)
    probes = {
        tap: train(own, labels, test, args.method, args.penalty)
        for tap, own in rows.items()
    }
    print(f"{'layer':>5}  accuracy  AUROC   ({int(test.sum())} texts held out)")
    for (layer, _), probe in sorted(probes.items()):
        print(f"{layer:5}  {probe.accuracy:8.1%}  {probe.auroc:.3f}")
    best = best_of(probes)
    found = probes[best]
    save_probe(
        args.out,
        found.vector[None],
        found.vector.new_tensor([found.bias]),
        layer=best[0],
        hook=best[1],
        activation="sigmoid" if args.method == "logistic" else "none",
        metadata={
            "model": str(args.model),
            "weights": digest_of_weights(str(args.model)),
            "origin": f"{args.method} probe of {len(texts)} texts, {args.position}",
            "held_out_accuracy": f"{found.accuracy:.4f}",
            "held_out_auroc": f"{found.auroc:.4f}",
        },
    )
    print(f"\nwritten: {args.out} (layer {best[0]}, {best[1]})")
