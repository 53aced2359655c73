# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of generated tokens where consumers may steer while the engine runs.

What acts in a step is known only from its output: another step may have been scheduled
before. A block of generated tokens is therefore hashed and shared when the outputs of
all steps that computed it are there, and its hash names what acted at its tokens.
Until then its hash is the request's own.

Without this no generated block is shared while a consumer within the step might act,
so that each turn of a conversation computes the answer before it again. Turns of 40
tokens after answers of 256, with an idle consumer (12 layers, 768 wide, on one core of
a CPU, blocks of 32 tokens; three pairs in one run): a turn computes 48 to 72 tokens
where it computed 296 to 320, its first token comes after 0.28 s instead of 1.00 to
1.04, and four turns take 34 s instead of 38.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_ACTED = "steering_acted"


@dataclass(slots=True)
class Acted:
    """What consumers have made act at a request's generated tokens."""

    known: int
    """At the tokens before this position it is known."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """`(start, stop, digest)` of the tokens at which something acted."""

    def note(self, start: int, stop: int, digest: str, own: str) -> None:
        """Add the tokens `[start, stop)` of a step; `own` names those left out."""
        self.spans = [(a, min(b, start), what) for a, b, what in self.spans]
        self.spans = [span for span in self.spans if span[0] < span[1]]
        if self.known < start:
            self.spans.append((self.known, start, own))
        if digest:
            self.spans.append((start, stop, digest))
        self.known = stop


def note_step(
    request: "Request", digest: str, num_tokens: int, sampled: int, block_size: int
) -> None:
    """Note what acted at a request's tokens in a step.

    Args:
        request: before the sampled tokens are appended to it.
        digest: of what acted at its generated tokens; empty if nothing did.
        num_tokens: its tokens in the step, without draft tokens.
        sampled: how many tokens the step sampled.
        block_size: tokens of a hash.

    """
    boundary = request.num_prompt_tokens
    if not sampled or request.resumable:
        return  # The next part of a session makes prompt tokens of generated ones.
    acted: Acted = vars(request).setdefault(_ACTED, Acted(boundary))
    final = acted.known // block_size
    start = max(request.num_tokens - num_tokens, boundary)
    acted.note(start, request.num_tokens + sampled - 1, digest, request.request_id)
    if acted.known // block_size > final:
        del request.block_hashes[final:]
        request.update_block_hashes()


def keys_of(request: "Request", start: int, stop: int) -> list[tuple[str, ...]]:
    """The keys of the block of tokens `[start, stop)`, which has generated ones."""
    acted: Acted | None = vars(request).get(_ACTED)
    if acted is None or stop > acted.known:
        return [("steering-dynamic", request.request_id)]
    return [
        (
            "steering-dynamic",
            str(max(a, start) - start),
            str(min(b, stop) - start),
            what,
        )
        for a, b, what in acted.spans
        if a < stop and b > start
    ]


def sharable(request: "Request", computed: int, num_tokens: int) -> int:
    """How many of a request's first `num_tokens` tokens other requests may find.

    Args:
        request: whose tokens from `computed` on are computed by the step that is
            scheduled, after a preemption also those that it had computed before.
        computed: number of its tokens whose keys and values are there.
        num_tokens: those of its tokens that the cache may hold after the step.

    """
    acted: Acted | None = vars(request).get(_ACTED)
    if acted is None:
        return num_tokens
    acted.known = min(acted.known, max(computed, request.num_prompt_tokens))
    return min(num_tokens, acted.known)


def share_rest(manager: "KVCacheManager", request: "Request") -> None:
    """Share the last blocks of a request that ends, before they are freed."""
    acted: Acted | None = vars(request).get(_ACTED)
    if acted is not None:
        known = min(acted.known, request.num_computed_tokens, request.num_tokens)
        manager.cache_blocks(request, known)
