# SPDX-License-Identifier: Apache-2.0
"""What ends the wait for a message of another node."""

from threading import Timer
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils import remote_messages


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A queue that reads what `sender` sends."""
    monkeypatch.setattr(remote_messages, "LOOK_SECONDS", 0.01)
    context = zmq.Context()
    sender, reader = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    reader.connect(f"tcp://127.0.0.1:{sender.bind_to_random_port('tcp://127.0.0.1')}")
    made: Any = SimpleNamespace(
        _is_local_reader=False,
        _is_remote_reader=True,
        remote_socket=reader,
        shutting_down=False,
        sender=sender,
    )
    yield made
    context.destroy(linger=0)


def test_a_message_is_received(queue: Any) -> None:
    Timer(0.05, queue.sender.send_pyobj, args=({"a": 1},)).start()
    assert MessageQueue.dequeue(queue, timeout=60) == {"a": 1}
    queue.sender.send_pyobj("next")
    assert MessageQueue.dequeue(queue) == "next"


def test_the_wait_ends_when_the_queue_is_shut_down(queue: Any) -> None:
    Timer(0.05, setattr, args=(queue, "shutting_down", True)).start()
    with pytest.raises(RuntimeError, match="cancelled"):
        MessageQueue.dequeue(queue, timeout=60)


def test_the_wait_ends_at_its_limit(queue: Any) -> None:
    began = monotonic()
    with pytest.raises(TimeoutError):
        MessageQueue.dequeue(queue, timeout=0.05)
    assert 0.04 < monotonic() - began < 30
