# SPDX-License-Identifier: Apache-2.0
"""A killed API server leaves no process that upstream's would not leave."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.environments import make_upstream_environment
from tests.support.models import llama
from tests.support.server import OWN_WORKER, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.hostile]

SECONDS = 30.0
"""A process that runs this long after its parent was killed is an orphan."""
COMMON = ("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager")
BODY = {"model": "tiny", "prompt": [20, 30], "max_tokens": 200, "ignore_eos": True}
STEERED = {
    "steering_vectors": {"post_block": {"1": [0.25] * 64}},
    "capture": {"filesystem": {"hooks": {"post_block": "all"}, "positions": "all"}},
}


class UpstreamServer(Server):
    """A server of the release, without this project."""


def left_behind(server: Server, body: dict[str, object]) -> list[str]:
    """Kinds of processes that outlive a server that is killed during a request."""
    try:
        for number, _ in enumerate(server.stream("/v1/completions", body)):
            if number == 5:
                break
        parent = psutil.Process(server.pid)
        children = parent.children(recursive=True)
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=SECONDS)
        names = sorted(kind(process) for process in alive)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return names
    finally:
        server.close()


def kind(process: psutil.Process) -> str:
    """The kind of a process: `VLLM::EngineCore`, or `python` for a helper."""
    with suppress(psutil.NoSuchProcess):
        return Path(process.cmdline()[0]).name
    return ""


def upstream(folder: Path) -> Path:
    """The Python of upstream's release, under the name that its command expects."""
    python = make_upstream_environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    facts = site / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return python


@pytest.mark.timeout(1200)
def test_a_killed_server_leaves_what_upstreams_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(tmp_path / "llama")
    python = upstream(tmp_path / "upstream")
    monkeypatch.setattr(UpstreamServer, "python", str(python))
    theirs = left_behind(UpstreamServer(model, *COMMON, **OWN_WORKER), BODY)
    consumers = ("--capture-consumers", f"filesystem:root={tmp_path / 'rows'}")
    ours = Server(model, *COMMON, *consumers, "--enable-steering", **OWN_WORKER)
    found = left_behind(ours, BODY | STEERED)
    print({"upstream": theirs, "ours": found})
    assert found == theirs
