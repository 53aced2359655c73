# SPDX-License-Identifier: Apache-2.0
"""`--interp` is short for what exploring a model needs."""

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.mark.parametrize(
    ("words", "consumers", "configs"),
    [
        (["--interp"], ["inline"], 16),
        (["--interp", "--max-steering-configs", "2"], ["inline"], 2),
        (["--max-steering-configs", "2", "--interp"], ["inline"], 2),
        (["--capture-consumers", "inline", "--interp"], ["inline"], 16),
        (["--interp", "--capture-consumers", "logging"], ["inline", "logging"], 16),
        ([], None, 4),
    ],
)
def test_interp_turns_on_capture_readouts_and_steering(
    words: list[str], consumers: list[str] | None, configs: int
) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(words)
    assert args.enable_readouts is args.enable_steering is bool(words)
    assert (args.capture_consumers, args.max_steering_configs) == (consumers, configs)


def test_interp_shows_the_page_of_a_server() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--interp"]).enable_lens_page
    assert not parser.parse_args([]).enable_lens_page
