# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: which cached keys and values depend on steering.

A token's cached keys and values depend on what steered it and all tokens before it. A
block's hash covers its predecessors, so each block's hash needs only what steers its
own tokens. Tokens that nothing steers add no key: such blocks are shared with unsteered
requests. Caches outside the engine are allowed if they find blocks by these hashes, or
keep no blocks for other requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.v1.steering.core.generated_blocks import keys_of
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, tiers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class EngineSteering:
    """The global vectors of this process's engine, as block hashes need them.

    A request hashes its first blocks before it reaches a scheduler, so the scheduler
    cannot hold this state. Used by the engine's thread only.
    """

    tiers: SteeringTiers = NO_STEERING
    dynamic: bool = False
    """Whether consumers may change what steers generated tokens."""
    told: bool = False
    """Whether it is told after each step what they have made act.

    Not with a KV connector, which may read a block's hash before."""
    changes: int = 0
    """How often anything has changed that block hashes name."""

    @classmethod
    def begin(cls, dynamic: bool = False, told: bool = False) -> None:
        """Begin a new engine, which nothing steers yet."""
        cls.set(NO_STEERING)
        cls.dynamic, cls.told = dynamic, told

    @classmethod
    def set(cls, tiers: SteeringTiers) -> None:
        """Set the global vectors that steer the blocks hashed from now on."""
        cls.changes += 1
        cls.tiers = tiers


def extra_keys(request: "Request", start: int, stop: int) -> list[tuple[str, ...]]:
    """The keys that steering adds to the hash of the block of tokens `[start, stop)`.

    The keys name effective vectors, not tiers: a generated token that appears in the
    prompt of the next turn is found again if both turns steer it in the same way.
    """
    tiers = tiers_of(request)
    boundary = request.num_prompt_tokens
    own_keys = _salt(request)
    if EngineSteering.dynamic and stop > boundary:
        own_keys += keys_of(request, start, stop)
    if tiers is None and not EngineSteering.tiers:
        return own_keys
    shared, own = EngineSteering.tiers, NO_STEERING if tiers is None else tiers
    prefill = _joined(shared.prefill_digest, own.prefill_digest)
    decode = _joined(shared.decode_digest, own.decode_digest)
    keys: list[tuple[str, ...]] = own_keys
    if stop <= boundary or prefill == decode:
        keys += [("steering", prefill)] if prefill else []
    elif start >= boundary:
        keys += [("steering", decode)] if decode else []
    else:
        keys.append(("steering", prefill, str(boundary - start), decode))
    for where in (shared, own):
        keys += _operation_keys(where, boundary, start, stop)
    return keys


def _operation_keys(
    tiers: SteeringTiers, boundary: int, start: int, stop: int
) -> Iterator[tuple[str, ...]]:
    """Keys of a block's operations, with the offsets of their tokens in the block."""
    middle = min(max(boundary, start), stop)
    base, prefill, decode = tiers.groups
    phases = ((base + prefill, start, middle), (base + decode, middle, stop))
    # An operation of both phases counts as one, wherever the prompt ends.
    places: dict[tuple[str, int], list[int]] = {}
    for groups, first, last in phases:
        times: Counter[str] = Counter()
        for group in groups:
            name = group.name(boundary)
            found = places.setdefault((name, times[name]), [])
            found += group.first.selected(boundary, first, last)
            times[name] += 1
    for (digest, _), selected in places.items():
        if selected:
            named = ",".join(str(place - start) for place in selected)
            yield "steering-op", digest, named


def _joined(of_engine: str, of_request: str) -> str:
    return "+".join(digest for digest in (of_engine, of_request) if digest)


def _salt(request: "Request") -> list[tuple[str, ...]]:
    """Keys of blocks that nobody else may have."""
    salt = getattr(request, "steering_salt", None)
    keys: list[tuple[str, ...]] = [] if salt is None else [("steering-changed", salt)]
    params = request.sampling_params
    if params is not None and params._hooks is not None:
        # A function may do anything, so nobody shares what it has changed.
        keys.append(("hooks", params._hooks.key))
    return keys


def change(requests: "Iterable[Request]", hash_block_size: int) -> None:
    """Recompute block hashes after a change of what they name.

    Args:
        requests: those in flight that it concerns.
        hash_block_size: number of tokens that a hash covers.

    """
    EngineSteering.changes += 1
    salt = uuid4().hex
    for request in requests:
        rehash(request, salt, hash_block_size)


def rehash(request: "Request", salt: str, hash_block_size: int) -> None:
    """Recompute a request's block hashes after a change of vectors or weights.

    Blocks that are computed keep their hashes. The blocks after them depend on what was
    in force before and after, so no other request may share them.
    """
    computed = request.num_computed_tokens // hash_block_size
    if request.num_computed_tokens > 0:
        request.steering_salt = f"{salt}:{request.request_id}"  # type: ignore[attr-defined]
    del request.block_hashes[computed:]
    request.update_block_hashes()


def continue_session(request: "Request") -> None:
    """Mark a session whose next prompt part follows generated tokens.

    If the engine steers prompt tokens and generated ones differently, some blocks were
    steered as generated tokens that are now part of the prompt. No other request may
    share the blocks after them.
    """
    tiers = EngineSteering.tiers
    by_phase = tiers.prefill_operations or tiers.decode_operations
    if by_phase or tiers.prefill_digest != tiers.decode_digest:
        request.steering_salt = f"session:{request.request_id}"  # type: ignore[attr-defined]


def forget(request: "Request") -> None:
    """Recompute all block hashes of a preempted request.

    It computes all blocks again, under one set of vectors.
    """
    if getattr(request, "steering_salt", None) is None:
        return
    request.steering_salt = None  # type: ignore[attr-defined]
    request.block_hashes.clear()
    request.update_block_hashes()


BY_BLOCK_HASH = frozenset(
    {
        "HF3FSKVConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""Connectors that find blocks by the engine's hashes, which cover steering."""

BY_REQUEST = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleHiddenStatesConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""Connectors that move the blocks of one request and keep none for another."""


def check_external_caches(vllm_config: "VllmConfig") -> None:
    """Refuse a KV connector that could share blocks across different steering.

    Raises:
        SteeringValidationError: the connector may share such blocks; the message names
            it and the remedy.

    """
    transfer = vllm_config.kv_transfer_config
    if not vllm_config.steering_config.enabled or transfer is None:
        return
    extra = transfer.kv_connector_extra_config
    for name in _connectors(transfer.kv_connector, extra):
        if name not in BY_BLOCK_HASH | BY_REQUEST:
            raise fail(
                f"kv_connector={name!r}, enable_steering=True: this connector is not "
                "known to key its blocks by the engine's block hashes, so a "
                "request might get keys and values of a differently steered one. "
                f"Use one of {sorted(BY_BLOCK_HASH)}, or start the server without "
                "--enable-steering",
                "kv_connector",
                name,
            )


def _connectors(name: str | None, extra: Mapping[str, Any]) -> Iterator[str]:
    """The names of a connector and of those that a `MultiConnector` contains."""
    if name != "MultiConnector":
        yield str(name)
        return
    for part in extra.get("connectors", []):
        inner = part.get("kv_connector_extra_config") or {}
        yield from _connectors(part.get("kv_connector"), inner)
