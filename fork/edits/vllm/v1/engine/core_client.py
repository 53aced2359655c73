# SPDX-License-Identifier: Apache-2.0
"""A front end receives the model's hook points and sends vectors only once."""

from fork.language import add_import, after, before, last

SYNCHRONOUS = (
    "msg = (self.core_engine, request_type.value, *self.encoder.encode(request))"
)

EDITS = [
    add_import(
        "from vllm.v1.steering.vector_cache import SentVectors",
        why="Tracks which vectors the engines already have.",
    ),
    last(
        scope="MPClient.__init__",
        insert="self.steering_sent = SentVectors()\nself.stopping = False",
        why="Which vectors each engine already has, and whether the front end stops.",
    ),
    before(
        scope="SyncMPClient._send_input",
        anchor=SYNCHRONOUS,
        insert="""
whole = request
request = self.steering_sent.shortened(whole, self.core_engine)
""",
        why="Vectors that the engine already has are sent by digest.",
    ),
    after(
        scope="SyncMPClient._send_input",
        anchor=SYNCHRONOUS,
        insert="self.steering_sent.note(whole, self.core_engine)",
        why="Encoding succeeded, so the engine will receive these vectors.",
    ),
    before(
        scope="AsyncMPClient._send_input",
        anchor="message = (request_type.value, *self.encoder.encode(request))",
        insert="whole = request\nrequest = self.steering_sent.shortened(whole, engine)",
        why="Vectors that the engine already has are sent by digest.",
    ),
    after(
        scope="AsyncMPClient._send_input",
        anchor="message = (request_type.value, *self.encoder.encode(request))",
        insert="self.steering_sent.note(whole, engine)",
        why="Encoding succeeded, so the engine will receive these vectors.",
    ),
    after(
        scope="MPClient._apply_ready_response",
        anchor="cache_config.block_size = response.block_size",
        insert="response.residual.note(vllm_config)",
        why="Admission reads them from the configuration.",
    ),
]
