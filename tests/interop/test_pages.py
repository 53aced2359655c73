# SPDX-License-Identifier: Apache-2.0
"""The Python code of pages whose libraries need not be installed runs unchanged."""

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.interop.pages import code_of, printed_by
from tests.support.plugins import install
from tests.support.scripts import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "examples/demo_model/weights"


def test_probe_hook(run_script: Run) -> None:
    (code,) = code_of("probe-hook")
    printed = run_script(code)
    assert "torch.Size([8, 192])" in printed


def test_activation_capture(run_script: Run) -> None:
    (code,) = code_of("activation-capture")
    with mock.patch.dict(os.environ):
        printed = run_script(code)
    assert ", 64)" in printed and len(printed.splitlines()) >= 3


def test_interp_engine(tmp_path: Path) -> None:
    """With names and layers of the example model."""
    (code,) = code_of("interp-engine")
    for there, here in [
        ('"NAME"', f'"{MODEL}", enforce_eager=True'),
        ("resid_post.10", "resid_post.4"),
        ("[4, 8, 12]", "[2, 4]"),
    ]:
        assert there in code
        code = code.replace(there, here)
    body = "".join(f"    {line}" for line in code.splitlines(keepends=True))
    script = f"""
import asyncio
import torch

directions = torch.randn(3, 192)

async def main():
{body}
    print("rows", [len(one) == len(ids) for one in rows.values()])
    print("values", [tuple(one.shape) for one in values] == [(len(ids), 3)])
    await model.shutdown()
"""
    guarded = 'if __name__ == "__main__":\n    asyncio.run(main())\n'
    printed = printed_by(tmp_path, script + guarded)
    assert "rows [True, True]" in printed and "values True" in printed
    assert len(printed.splitlines()) >= 7


OF_THE_FORK = """
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from plug_ins import Calm
from vllm import LLM, SamplingParams

Calm.vector = torch.full((192,), 30.0)
files = {"name": "filesystem", "params": {"root": "captures"}}
llm = LLM(MODEL, enable_steering=True, capture_consumers=["norms", "calm", files])
spec = {"hooks": {"post_block": [3]}, "positions": "all_prompt"}
capture = {"filesystem": {"tag": "trial", "request_id": "one", **spec}}
params = SamplingParams(max_tokens=8, temperature=0, capture=capture)
(output,) = llm.generate("Anna went home.", params)
print("norm", output.capture_results["norms"].payload["norm"] > 0)
tokens = len(output.prompt_token_ids)
calmed = []
for talk, sign in (("a", -1e4), ("b", 1e4)):
    Calm.probe = torch.full((192,), sign, dtype=torch.bfloat16)
    params = SamplingParams(max_tokens=8, temperature=0, conversation_id=talk)
    (one,) = llm.generate("Anna went home.", params)
    calmed.append(one.outputs[0].text != output.outputs[0].text)
print("calm", any(calmed))
"""


def test_plug_ins_and_readers_of_the_reference_fork(tmp_path: Path) -> None:
    plug_in, controller, reader = code_of("reference-fork")
    for there, here in [("[15]", "[2]"), ("{15:", "{2:")]:
        assert there in controller
        controller = controller.replace(there, here)
    classes = {"norms": "plug_ins:Norms", "calm": "plug_ins:Calm"}
    install(tmp_path, "plug_ins", f"{plug_in}\n{controller}", **classes)
    reader = reader.replace("/captures/", "captures/")
    reader += 'print("read", len(rows) == tokens)\n'
    script = OF_THE_FORK.replace("MODEL", repr(MODEL)) + reader
    printed = printed_by(tmp_path, script)
    assert "norm True" in printed and "calm True" in printed
    assert "read True" in printed
