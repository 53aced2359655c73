# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

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
