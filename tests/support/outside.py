# SPDX-License-Identifier: Apache-2.0
"""A cache outside of the engine that is keyed by the engine's block hashes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    align_to_block_size,
)

NAME = "BlockNames"


class BlockNames(ExampleConnector):
    """Upstream's example keeps prompts under their tokens; this one adds the hash of
    their last whole block, as caches do that `external.BY_BLOCK_HASH` lists.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names: dict[str, str] = {}
        self.loads: list[int] = []
        """Number of tokens to be loaded, by request."""

    def _found_match_for_request(self, request: Any) -> bool:
        tokens = request.prompt_token_ids
        blocks = align_to_block_size(len(tokens), self._block_size) // self._block_size
        name = request.block_hashes[blocks - 1].hex()
        self._names[request.request_id] = name
        return bool(self._found_match_for_prompt(tokens, [name]))

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self.loads.append(num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        named = [
            replace(
                request,
                mm_features=[SimpleNamespace(identifier=self._names[request.req_id])],
            )
            for request in scheduler_output.scheduled_new_reqs
        ]
        return super().build_connector_meta(
            replace(scheduler_output, scheduled_new_reqs=named)
        )
