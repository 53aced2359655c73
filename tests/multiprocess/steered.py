# SPDX-License-Identifier: Apache-2.0
"""Servers of the demo model with steering, in several processes."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from examples.demo import serving

MODEL = Path(__file__).parents[2] / "examples/demo_model/weights"
HIDDEN = 192
KEY = "steering"


@contextmanager
def served(
    folder: Path, arguments: list[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Run a server; yields its address."""
    port = serving.free_port(8870)
    url = f"http://{serving.HOST}:{port}"
    command = [sys.executable, "-m", "tests.multiprocess.launch", str(MODEL)]
    command += ["--host", serving.HOST, "--port", str(port), *arguments]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--gpu-memory-utilization", "0.2"]
    command += ["--enable-steering", "--steering-api-key", KEY]
    variables = {
        **serving.ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **environment,
    }
    log = folder / "log"
    with serving.running(command, url, log, 400, lambda _, __: None, variables):
        yield url


def post(client: httpx.Client, what: str, **body: Any) -> httpx.Response:
    """Request a change below `/v1/steering/`."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return client.post(f"/v1/steering/{what}", json=body, headers=headers)


def carried_out(response: httpx.Response) -> Any:
    """Check that a change succeeded; returns the answer."""
    assert response.status_code == 200, response.text
    return response.json()
