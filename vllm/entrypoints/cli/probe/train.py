# SPDX-License-Identifier: Apache-2.0
"""`vllm probe train`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.probe.options import add_data_arguments, read_data
from vllm.entrypoints.cli.steer.options import (
    add_shared,
    check_engine,
    check_out,
    resolve_address,
    started_engine,
)
from vllm.v1.readouts.errors import fail
from vllm.v1.residual.model_identity import digest_of_weights
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.steering.labelled import Labelled, Labels
    from vllm.steering.probes import TrainedProbe

LEAKY = """
Every layer is perfect: the texts may differ in more than the concept, as texts from
templates do. Hold out whole groups (--group COLUMN), or texts of another file
(--held-out FILE)."""


def add_arguments(parser: Any) -> None:
    """Add the options."""
    add_data_arguments(parser)
    add_shared(parser, "--out", "--hook", "--layers", "--position", "--plot")
    parser.add_argument(
        "--method",
        choices=("logistic", "mass-mean"),
        default="logistic",
        help="Logistic regression, or the difference of the means.",
    )
    parser.add_argument(
        "--held-out",
        type=_held_out,
        default=0.25,
        metavar="SHARE|FILE",
        help="The texts on which probes are measured: a share of those of --data, or "
        "a file of others.",
    )
    parser.add_argument(
        "--group",
        metavar="COLUMN",
        help="Texts with an equal value in this column, such as those of one "
        "template, are held out together. The two texts of a pair always are.",
    )
    parser.add_argument("--penalty", type=float, default=1.0, help="Of logistic.")


def _held_out(text: str) -> float | Path:
    try:
        share = float(text)
    except ValueError:
        return Path(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError("a share lies between 0 and 1")
    return share


def run(args: argparse.Namespace) -> None:
    """Train a probe at each layer, print their metrics and save the best one."""
    from vllm.steering.extract import read_rows
    from vllm.steering.plot import check_can_draw, draw_probes
    from vllm.steering.probes import best_of, firing_rates, token_values, train

    if args.plot is not None:
        check_can_draw(args.plot)
    data, test = _data(args)
    texts = [text for text, is_held in zip(data.texts, test) if is_held]
    with started_engine(args, enable_readouts=True) as llm:
        rows = read_rows(llm, data.texts, args.hook, args.layers, args.position)
        probes = {
            tap: train(own, data.labels, test, args.method, args.penalty)
            for tap, own in sorted(rows.items())
        }
        specs = {str(tap): _spec(tap, probe) for tap, probe in probes.items()}
        values = token_values(llm, texts, specs)
    rates = {tap: firing_rates(values[str(tap)], data.labels[test]) for tap in probes}
    _print(probes, rates, len(texts))
    if args.plot is not None:
        draw_probes(args.plot, probes, rates)
    best = best_of(probes, rates)
    _save(args, best, probes[best], len(data.texts) - len(texts))
    print(f"\nwritten: {args.out} (layer {best[0]}, {best[1]})")


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    check_out(args, fail)
    if not 0 <= args.penalty < float("inf"):
        raise fail("penalty must be a finite number from 0", "penalty", args.penalty)
    resolve_address(args)
    read_data(args, args.data)
    if isinstance(args.held_out, Path):
        if args.group is not None:
            raise fail(
                "group: it chooses texts of --data to hold out, and --held-out names a "
                "file; leave one out",
                "group",
                args.group,
            )
        read_data(args, args.held_out, least=1)
    check_engine(args)


def _data(args: argparse.Namespace) -> "tuple[Labelled, Labels]":
    """The texts, and `[texts]` which are held out."""
    import numpy as np

    from vllm.steering.labelled import Labelled, held_out

    data = read_data(args, args.data)
    if isinstance(args.held_out, float):
        return data, held_out(data, args.held_out, args.seed or 0)
    other = read_data(args, args.held_out, least=1)
    labels = np.concatenate([data.labels, other.labels])
    test = np.arange(len(labels)) >= len(data.labels)
    return Labelled(data.texts + other.texts, labels, None), test


def _spec(tap: Tap, probe: "TrainedProbe") -> dict[str, Any]:
    """The readout of a probe's plain values."""
    vectors, bias = [probe.vector.tolist()], [probe.bias]
    place = {"layer": tap[0], "hook": tap[1]}
    return {"kind": "probe", "vectors": vectors, "bias": bias, **place}


def _print(
    probes: "Mapping[Tap, TrainedProbe]",
    rates: Mapping[Tap, tuple[float, float]],
    num_texts: int,
) -> None:
    print(f"{num_texts} texts held out; +, -: tokens that fire in positive, other ones")
    print("layer  accuracy  AUROC  tokens +  tokens -")
    for tap, probe in probes.items():
        fired, falsely = rates[tap]
        print(
            f"{tap[0]:5}  {probe.accuracy:8.1%}  {probe.auroc:.3f}  "
            f"{fired:8.1%}  {falsely:8.1%}"
        )
    if len(probes) > 1 and all(probe.accuracy == 1 for probe in probes.values()):
        print(LEAKY)


def _save(
    args: argparse.Namespace, tap: Tap, probe: "TrainedProbe", num_texts: int
) -> None:
    from vllm.v1.readouts.modules import save_probe

    save_probe(
        args.out,
        probe.vector[None],
        probe.vector.new_tensor([probe.bias]),
        layer=tap[0],
        hook=tap[1],
        activation="sigmoid" if args.method == "logistic" else "none",
        metadata={
            "model": str(args.model),
            "weights": digest_of_weights(str(args.model)),
            "origin": f"{args.method} probe of {num_texts} texts, {args.position}",
            "held_out_accuracy": f"{probe.accuracy:.4f}",
            "held_out_auroc": f"{probe.auroc:.4f}",
        },
    )
