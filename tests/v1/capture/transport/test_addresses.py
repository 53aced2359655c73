# SPDX-License-Identifier: Apache-2.0
import os
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.capture._sinks import key
from vllm.v1.capture.frontend.driver import DriverLanes
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.transport import addresses
from vllm.v1.capture.transport.addresses import (
    host_for,
    local,
    reachable,
    rows_address,
    with_rows,
)
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    Inbox,
    Outbox,
)

HERE = "127.0.0.1"


def parallel(**fields: Any) -> Any:
    usual = {
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "nnodes": 1,
        "use_ray": False,
    }
    return SimpleNamespace(**(usual | fields))


def test_only_engines_over_several_hosts_open_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "get_ip", lambda: "10.0.0.1")
    assert host_for(parallel()) is None
    assert host_for(parallel(data_parallel_size=2, data_parallel_size_local=2)) is None
    for spread in (
        {"nnodes": 2},
        {"data_parallel_size": 2},
        {"use_ray": True},
    ):
        assert host_for(parallel(**spread)) == "10.0.0.1", spread


@pytest.mark.parametrize("same_host", [True, False])
def test_a_worker_on_any_host_reaches_the_front_end(
    same_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: SimpleQueue[Any] = SimpleQueue()
    inbox = Inbox(came.put, host=HERE)
    outbox = Outbox()
    rows = torch.arange(4096.0).view(1, 4, 1024)
    if not same_host:
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    try:
        assert reachable(inbox.address).startswith("ipc" if same_host else "tcp")
        chunk = GroupChunk(key()[0], ((0, "post_block"),), rows, 0, 0, [0, 1, 2, 3])
        outbox.send(inbox.address, ChunksMessage("other", 0, [chunk]))
        message = came.get(timeout=20)
        assert torch.equal(message.chunks[0].tensor, rows)
    finally:
        outbox.close()
        inbox.close()


def test_the_rows_of_each_instance_have_a_port_of_their_own() -> None:
    address = "ipc:///tmp/none tcp://h:1"
    full = with_rows(with_rows(address, "a", "ipc:///x tcp://h:2"), "b", "y tcp://h:3")
    ports = [reachable(rows_address(full, name)) for name in ("a", "b")]
    assert ports == ["tcp://h:2", "tcp://h:3"]
    assert reachable(full) == "tcp://h:1"
    assert local(rows_address(full, "a")) == rows_address("ipc:///tmp/none", "a")


def test_a_front_end_on_one_host_has_no_ports() -> None:
    inbox = Inbox(lambda message: None)
    config: Any = SimpleNamespace(dispatch_queue_bytes=1, dispatch_queue_size=1)
    lanes = DriverLanes(config, {}, inbox.address, lambda *_: None)
    inbox.close()
    assert lanes.address == inbox.address and " " not in inbox.address
    assert with_rows(inbox.address, "a", "ipc:///x") == inbox.address
