# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import llama
from tests.support.plugins import HOOKS, install
from tests.support.server import OWN_WORKER, Server
from tests.v1.readouts._reading import write_modules


@pytest.fixture(scope="session")
def capture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="session")
def capture_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="session")
def capture_server(capture_model: Path, capture_root: Path) -> Iterator[Server]:
    """A server with consumers for files, its log and its responses."""
    opened = Server(
        capture_model,
        *("--capture-consumers", f"filesystem:root={capture_root}"),
        *("--capture-consumers", 'logging:hooks={"post_block":[0,2]}'),
        *("--capture-consumers", "inline", "--capture-consumers", "memory"),
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "8"),
        "--enable-scale-out",
        **OWN_WORKER,
    )
    yield opened
    opened.close()


GUARD = """
from vllm.v1.capture import CaptureSpec, SteeringController


class Guard(SteeringController):
    '''Steers conversations from their first generated token on.'''

    def global_capture_spec(self):
        return CaptureSpec(hooks={"post_block": [1]}, positions="all_generated")

    def decide(self, request_view, residual):
        from vllm.v1.worker.steering_action_queue import RequestSteeringOverride

        vectors = {"post_block": {1: [30.0, -30.0] * 32}}
        return RequestSteeringOverride(request_view.req_id, vectors, source="guard")
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """A server that reads out, steers, patches and runs hooks; its key is `secret`."""
    write_modules(folder)
    named = {"scale": "lens_hooks:scale", "fails": "lens_hooks:fails"}
    install(folder, "lens_hooks", HOOKS, group="vllm.hooks", **named)
    install(folder, "guard_plugin", GUARD, guard="guard_plugin:Guard")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    opened = Server(
        llama(folder / "llama"),
        *("--capture-consumers", "inline", "--enable-steering"),
        *("--capture-consumers", "memory", "--capture-consumers", "guard"),
        "--enable-scale-out",
        *("--readout-modules", f"direction={folder / 'direction.safetensors'}"),
        *("--sae", f"jump={folder / 'jump'}", "--steering-api-key", "secret"),
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "16"),
        *("--trust-request-chat-template", "--vllm-lens-api"),
        *("--enable-patching", "--max-patch-slots", "16"),
        *("--patch-source-cache-bytes", str(4 << 20)),
        *("--hook-points", "q", "z", "attn_out", "mlp_act"),
        *("router_logits", "expert_ids", "--enable-lens-page"),
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
    )
    yield opened
    opened.close()
