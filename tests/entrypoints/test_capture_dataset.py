# SPDX-License-Identifier: Apache-2.0
"""`vllm capture --server`: rows of a server, and servers without rows."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.hf_reference import Reference, relative_error
from tests.support.server import Server
from vllm.capture_dataset import load_dataset, remote
from vllm.capture_dataset.collect import collect
from vllm.capture_dataset.plan import Plan
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.servers import ServersRunner
from vllm.capture_dataset.spec import OutputSpec, RowsSpec, SourceSpec
from vllm.capture_dataset.survey import Survey
from vllm.v1.capture.errors import CaptureValidationError


@pytest.mark.e2e
@pytest.mark.slow
def test_a_servers_rows_become_a_data_set(
    capture_server: Server, capture_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    prompts = [[20 + i, 30, 40 + 2 * i, *range(50, 50 + i)] for i in range(9)]
    source.write_text("\n".join(json.dumps({"prompt": p, "y": 1}) for p in prompts))
    server = remote.Server(capture_server.url, None, None, concurrency=4)
    runner = ServersRunner([server])
    assert runner.model.name == "tiny" and runner.model.dtype == "float32"
    plan = Plan.of(
        Survey.of(SourceSpec(path=source, carry=("y",))),
        RowsSpec(layers=(0, 2), positions="all", max_tokens=3),
        OutputSpec(folder=tmp_path / "out", shard_bytes=16_000),
        runner,
    )
    manifest = collect(plan, runner, Progress(1, disable=True))
    runner.close()
    assert manifest.complete and len(manifest.shards) > 1
    data, reference, done = load_dataset(tmp_path / "out"), Reference(capture_model), 0
    ids = data.columns.column("token_id").to_pylist()
    for number, prompt in enumerate(prompts):
        rows = data.layer(2)[number]
        fed = ids[done : done + len(rows)]
        assert fed[: len(prompt)] == prompt
        expected = reference.stream(fed)[2, "post_block"]
        assert relative_error(rows, expected) < 1e-4
        done += len(rows)


@pytest.fixture
def without_inline() -> Iterator[str]:
    """A server that captures to files only."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = {"consumers": [{"name": "filesystem"}], "hook_points": {}}
            if self.path == "/v1/models":
                told = {"data": [{"id": "m", "max_model_len": 64}]}  # type: ignore[dict-item]
            body = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_without_the_consumer_is_refused(without_inline: str) -> None:
    with pytest.raises(CaptureValidationError, match="--capture-consumers inline"):
        remote.Server(without_inline, None, None, concurrency=1)


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(CaptureValidationError, match="does not answer"):
        remote.Server("http://127.0.0.1:9", None, None, concurrency=1)
