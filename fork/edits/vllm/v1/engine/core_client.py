# SPDX-License-Identifier: Apache-2.0
"""A front end receives the model's hook points and sends vectors only once."""

from fork.language import add_import, after, last, replace

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
    *[
        replace(
            scope=f"{kind}MPClient._send_input",
            anchor="self.encoder.encode(request)",
            by=f"self.steering_sent.encoded(request, self.encoder, {engine})",
            why="Vectors that the engine already has are sent by digest.",
        )
        for kind, engine in (("Sync", "self.core_engine"), ("Async", "engine"))
    ],
    after(
        scope="MPClient._apply_ready_response",
        anchor="cache_config.block_size = response.block_size",
        insert="response.residual.note(vllm_config)",
        why="Admission reads them from the configuration.",
    ),
]
