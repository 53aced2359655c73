# SPDX-License-Identifier: Apache-2.0
"""The page about SAELens runs as it is: SAEs train."""

import json
from pathlib import Path

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

from tests.interop.pages import code_of, printed_by, run

pytestmark = pytest.mark.interop


def test_saes_train_from_a_model_and_from_files(tmp_path: Path) -> None:
    texts = [f"Anna went home {n} times and the dog was there." for n in range(500)]
    lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (command,) = code_of("saelens", "sh")
    run(tmp_path, ["sh", "-ec", f"{command.rstrip()} --enforce-eager"])

    printed = printed_by(tmp_path, "\n".join(code_of("saelens")))
    assert "torch.Size([1, " in printed
    assert printed.count("torch.Size([192, 256])") == 2
