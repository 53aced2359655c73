# SPDX-License-Identifier: Apache-2.0
"""A front end learns the model's hook points, and sends vectors once."""

from fork.language import add_import, after, before, last

SYNCHRONOUS = (
    "msg = (self.core_engine, request_type.value, *self.encoder.encode(request))"
)

EDITS = [
    add_import(
        "from vllm.v1.steering.vector_cache import SentVectors",
        why="What the engines have of vectors.",
    ),
    last(
        scope="MPClient.__init__",
        insert="self.steering_sent = SentVectors()",
        why="Remembers it for each engine.",
    ),
    before(
        scope="SyncMPClient._send_input",
        anchor=SYNCHRONOUS,
        insert="""
whole = request
request = self.steering_sent.shortened(whole, self.core_engine)
""",
        why="Vectors that the engine has are sent by name.",
    ),
    after(
        scope="SyncMPClient._send_input",
        anchor=SYNCHRONOUS,
        insert="self.steering_sent.note(whole, self.core_engine)",
        why="It could be written, so that the engine will have it.",
    ),
    before(
        scope="AsyncMPClient._send_input",
        anchor="message = (request_type.value, *self.encoder.encode(request))",
        insert="whole = request\nrequest = self.steering_sent.shortened(whole, engine)",
        why="Vectors that the engine has are sent by name.",
    ),
    after(
        scope="AsyncMPClient._send_input",
        anchor="message = (request_type.value, *self.encoder.encode(request))",
        insert="self.steering_sent.note(whole, engine)",
        why="It could be written, so that the engine will have it.",
    ),
    after(
        scope="MPClient._apply_ready_response",
        anchor="cache_config.block_size = response.block_size",
        insert="vllm_config.capture_config.hook_points = response.hook_points",
        why="Admission reads them from the configuration.",
    ),
]
