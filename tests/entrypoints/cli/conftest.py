# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.cli.engine_command import (
    OWN_COMMANDS,
    EngineCommand,
    check_own_options,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

DEMO = Path(__file__).parents[3] / "examples" / "demo_model" / "weights"


def run_command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Run `vllm WORDS` in this process."""
    argv = ["vllm", *map(str, words)]
    monkeypatch.setattr(sys, "argv", argv)
    check_own_options(argv)
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(dest="subparser")
    for command in OWN_COMMANDS:
        command.subparser_init(subparsers)
    EngineCommand.cmd(parser.parse_args())


@pytest.fixture
def started(demo_llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of engines that commands start; all get the shared engine."""
    seen: list[Any] = []

    def start(engine_args: Any) -> Any:
        seen.append(engine_args)
        for name, path in (engine_args.readout_modules or {}).items():
            demo_llm.register_readout_module(name, path, replace=True)
        return demo_llm

    monkeypatch.setattr("vllm.LLM.from_engine_args", start)
    monkeypatch.setattr(demo_llm.llm_engine.engine_core, "shutdown", lambda: None)
    return seen
