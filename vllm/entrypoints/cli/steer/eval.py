# SPDX-License-Identifier: Apache-2.0
"""`vllm steer eval`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.steer.options import (
    add_reading_arguments,
    add_server_arguments,
    add_shared,
    as_chats,
    check_engine,
    parse_scales,
    reading_of,
    started_engine,
)
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.steering.evaluation.judge import RemoteJudge
    from vllm.steering.pairs import Prompt

DOSES = "0.05,0.1,0.2,0.4"


def add_arguments(parser: Any) -> None:
    """Add the options."""
    add_shared(parser, "--vectors", "--layers", "--plot", "--json")
    parser.add_argument(
        "--pairs",
        required=True,
        metavar="FILE",
        help="Held-out pairs, in the form of vllm steer extract, not those used there.",
    )
    parser.add_argument(
        "--harmless",
        required=True,
        metavar="FILE",
        help="Prompts that the vectors should not affect: one per line, or .jsonl.",
    )
    parser.add_argument(
        "--chat", action="store_true", help="Send harmless texts as chat messages."
    )
    parser.add_argument(
        "--doses",
        type=parse_scales,
        default=parse_scales(DOSES),
        metavar="D,D,...",
        help=f"Norm of the change over norm of the stream; {DOSES} by default.",
    )
    parser.add_argument(
        "--kl-limit",
        type=float,
        default=0.1,
        help="Largest KL divergence of the recommended dose, in nats.",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=40, help="Most tokens of an answer."
    )
    judge = parser.add_argument_group("judge", "A language model that rates answers.")
    judge.add_argument(
        "--judge", metavar="URL", help="URL of an OpenAI-compatible server."
    )
    judge.add_argument("--judge-model", help="The judge's model name on that server.")
    judge.add_argument("--judge-key", help="Its API key.")
    judge.add_argument(
        "--concept", help="The concept that the vectors represent, in words."
    )
    add_reading_arguments(parser)
    add_server_arguments(parser)


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    from vllm.steering.pairs import read_pairs

    pairs, _ = read_pairs(args.pairs), _harmless(args)
    if len(pairs) < 2 or min(args.doses) <= 0:
        raise fail("pairs: two pairs and doses above 0 are needed", "pairs", len(pairs))
    _check_judge(args)
    check_engine(args)


def run(args: argparse.Namespace) -> None:
    """Print the table and the verdicts; write the plot and the JSON if requested."""
    from vllm.steering.convert import read_vectors, reworked
    from vllm.steering.evaluation.curves import draw_points, points_table
    from vllm.steering.evaluation.evaluate import evaluate, verdicts
    from vllm.steering.pairs import read_pairs
    from vllm.steering.plot import check_can_draw
    from vllm.steering.sweep import check_fits

    judge = _judge(args)
    pairs, harmless = read_pairs(args.pairs), _harmless(args)
    vectors = reworked(read_vectors(args.vectors, reading_of(args)), args.layers)
    if args.plot is not None:
        check_can_draw(args.plot)
    with started_engine(
        args, enable_steering=True, enable_readouts=True, max_logprobs=-1
    ) as llm:
        check_fits(llm, vectors, args.vectors)
        points = evaluate(
            llm, vectors, pairs, harmless, args.doses, args.max_tokens, args.seed, judge
        )
    found = verdicts(points, args.kl_limit)
    print(points_table(points))
    print()
    for verdict in found:
        print(verdict.sentence(args.kl_limit))
    if args.plot is not None:
        draw_points(args.plot, points, args.kl_limit)
        print(f"\nplot: {args.plot}")
    if args.json is not None:
        content = {
            "kl_limit": args.kl_limit,
            "points": [point.as_json() for point in points],
            "verdicts": [
                {name: getattr(one, name) for name in one.__dataclass_fields__}
                for one in found
            ],
        }
        args.json.write_text(json.dumps(content, indent=1))


def _harmless(args: argparse.Namespace) -> "list[Prompt]":
    from vllm.steering.pairs import read_prompts

    prompts = read_prompts(args.harmless)
    return as_chats(prompts) if args.chat else prompts


def _check_judge(args: argparse.Namespace) -> None:
    """Refuse a part of a judge: its URL and model, and the concept that it looks for.

    A key alone is one, too.
    """
    parts = (args.judge, args.judge_model, args.concept)
    if any((*parts, args.judge_key)) and not all(parts):
        raise fail(
            "judge: give --judge URL, --judge-model NAME and --concept, what the "
            "vectors represent, together",
            "judge",
            args.judge,
        )


def _judge(args: argparse.Namespace) -> "RemoteJudge | None":
    from vllm.steering.evaluation.judge import RemoteJudge

    if args.judge is None:
        return None
    return RemoteJudge(args.judge, args.judge_model, args.concept, args.judge_key)
