# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.v1.steering import _engine
from vllm.entrypoints.cli.engine_command import (
    OWN_COMMANDS,
    EngineCommand,
    check_own_options,
)
from vllm.steering.extract import CONSUMER
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


@pytest.fixture(scope="session")
def llm() -> Iterator[Any]:
    """The engine of the demo model that all commands share."""
    engine = _engine.engine(
        str(DEMO),
        skip_tokenizer_init=False,
        capture_consumers=[CONSUMER],
        enable_readouts=True,
        enable_patching=True,
        hook_points=["z"],
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def started(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of engines that commands start; all get the shared engine."""
    seen: list[Any] = []

    def start(engine_args: Any) -> Any:
        seen.append(engine_args)
        for name, path in (engine_args.readout_modules or {}).items():
            llm.register_readout_module(name, path, replace=True)
        return llm

    monkeypatch.setattr("vllm.LLM.from_engine_args", start)
    monkeypatch.setattr(llm.llm_engine.engine_core, "shutdown", lambda: None)
    return seen
