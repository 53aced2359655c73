# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for a message of another node notices that the engine has ended."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.utils import remote_messages",
        why="Waits for messages of other nodes, below.",
    ),
    before(
        scope="MessageQueue.dequeue",
        anchor="obj = MessageQueue.recv(self.remote_socket, timeout)",
        insert="remote_messages.wait(self, timeout)",
        why="Requests would hang for minutes after a node was killed.",
    ),
]
