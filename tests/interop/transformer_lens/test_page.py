# SPDX-License-Identifier: Apache-2.0
"""The page about TransformerLens runs as it is, on an engine and on a server."""

from pathlib import Path

import pytest

pytest.importorskip("transformer_lens.model_bridge", reason="make test-interop")

from tests.interop.pages import ROOT, code_of, printed_by
from tests.support.server import Server
from vllm.interop.transformer_lens import FLAGS

pytestmark = pytest.mark.interop


def test_the_engine(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, code_of("transformer-lens")[0])
    assert printed.count("torch.Size([1, ") == 2


def test_the_server(tmp_path: Path) -> None:
    linked = tmp_path / "model"
    linked.symlink_to(ROOT / "examples" / "demo_model" / "weights")
    server = Server(linked, *FLAGS.split(), "--enforce-eager")
    try:
        code = code_of("transformer-lens")[1]
        code = code.replace("http://localhost:8000", server.url)
        printed = printed_by(tmp_path, f"{code}\nprint(logits.shape)")
    finally:
        server.close()
    assert "torch.Size([1, " in printed
