# SPDX-License-Identifier: Apache-2.0
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TOKENIZER
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(folder: Path, text: str) -> Any:
    """Parse the options of a configuration file."""
    file = folder / "server.yaml"
    file.write_text(text)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag", nargs="?")
    return parser.parse_args(["--model", str(TOKENIZER), "--config", str(file)])


def test_a_list_in_a_file_is_an_option_repeated(tmp_path: Path) -> None:
    chosen = parse(
        tmp_path,
        """
capture-consumers: [filesystem:root=/tmp/x, logging]
capture-graphsafe-key: ["3:post_block", "4:pre_attn"]
enable-steering: true
steering_api_key: [one, two]
steering-modules: [a=1.json, b=2.json]
""",
    )
    assert chosen.steering_api_key == ["one", "two"]
    assert chosen.capture_graphsafe_key == ["3:post_block", "4:pre_attn"]
    assert chosen.capture_consumers == ["filesystem:root=/tmp/x", "logging"]
    assert chosen.steering_modules == ["a=1.json", "b=2.json"]
    assert chosen.model_tag is None


def test_one_value_in_a_file_is_the_option_once(tmp_path: Path) -> None:
    chosen = parse(tmp_path, "steering-api-key: one\ncapture-consumers: logging\n")
    assert chosen.steering_api_key == ["one"]
    assert chosen.capture_consumers == ["logging"]


def test_a_file_is_read_before_the_subcommand_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("capture-consumers: [logging, inline]\n")
    main = FlexibleArgumentParser()
    serve = main.add_subparsers().add_parser("serve")
    EngineArgs.add_cli_args(serve).add_argument("model_tag", nargs="?")
    chosen = main.parse_args(["serve", "model", "--config", str(file)])
    assert chosen.capture_consumers == ["logging", "inline"]


def test_only_an_option_whose_first_value_is_lost_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--capture-consumers", "inline", "--capture-consumers=logging"]
    parser.parse_args(
        [*given, "--steering-modules", "a=1", "--steering-modules", "b=2"]
    )
    assert "duplicate" not in caplog.text
    parser.parse_args([*given, "--max-logprobs", "2", "--max-logprobs", "3"])
    assert "Found duplicate keys --max-logprobs" in caplog.text
