# SPDX-License-Identifier: Apache-2.0
"""Steering in the engine core: the global vectors."""

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from vllm.logger import init_logger
from vllm.v1.residual.kept_memory import is_on_the_host
from vllm.v1.residual.sizes import torch_dtype
from vllm.v1.steering.core.prefix_cache import EngineSteering, rehash
from vllm.v1.steering.core.refusals import refuse
from vllm.v1.steering.core.saes import missing
from vllm.v1.steering.core.scheduler import HeldChange, SteeringScheduling
from vllm.v1.steering.errors import SteeringChangeError, fail
from vllm.v1.steering.global_vectors import merged
from vllm.v1.steering.plan import SteeringTiers, tiers_of
from vllm.v1.steering.spec.describe import describe
from vllm.v1.steering.spec.limits import (
    check_bank,
    check_operations,
    check_with_requests,
    find_overflow,
    too_much_with_shared,
)

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.request import Request

logger = init_logger(__name__)


def set_steering(
    core: "EngineCore", change: SteeringTiers, replace: bool
) -> dict[str, Any]:
    """Change the global vectors between two steps, on every rank or on none.

    Workers carry out calls and steps in the order in which they were sent, so that
    no step sees the change on some ranks only.

    Raises:
        SteeringValidationError: with the vectors of a request that is under way, or
            alone, it is more than the model can hold.
        SteeringChangeError: a rank could not take it.

    """
    new = _checked(core, msgspec.convert(change, SteeringTiers), replace)
    _apply(core, new)
    return get_steering(core)


def hold_steering(
    core: "EngineCore", holder: str, change: SteeringTiers, replace: bool
) -> bool:
    """Get ready for a change that several engines make together; false if one is.

    From now on requests must be able to run with the vectors before it and behind
    it, so that neither making nor undoing it can fail for their sake.

    Args:
        core: one of the engines.
        holder: names the change, until `release_steering`.
        change: what is given.
        replace: whether nothing else stays.

    Raises:
        SteeringValidationError: as `set_steering`.

    """
    steering = _steering(core)
    if steering.held is not None:
        return False
    new = _checked(core, msgspec.convert(change, SteeringTiers), replace)
    steering.held = HeldChange(holder, steering.tiers, new)
    return True


def commit_steering(core: "EngineCore", holder: str) -> dict[str, Any]:
    """Make the change that is held; it may still be undone.

    Raises:
        SteeringChangeError: a rank could not take it.

    """
    held = _steering(core).held
    assert held is not None and held.holder == holder, "a change that nobody holds"
    _apply(core, held.new)
    return get_steering(core)


def release_steering(core: "EngineCore", holder: str, undo: bool) -> None:
    """The change has been made everywhere, or is made nowhere.

    Raises:
        SteeringChangeError: a rank could not take back what was before.

    """
    steering = _steering(core)
    held = steering.held
    if held is None or held.holder != holder:
        return  # This engine had refused it.
    try:
        if undo and steering.tiers is not held.old:
            _apply(core, held.old)
    finally:
        steering.held = None


def _steering(core: "EngineCore") -> SteeringScheduling:
    found: SteeringScheduling = core.scheduler.steering  # type: ignore[attr-defined]
    return found


def _checked(core: "EngineCore", change: SteeringTiers, replace: bool) -> SteeringTiers:
    """The global vectors behind a change, which the requests under way can bear."""
    executor: Any = core.model_executor
    if is_on_the_host(executor.sleeping_tags):
        raise fail(
            "vectors: the engine sleeps, and its tables with it; wake it up first "
            "(POST /wake_up, or LLM.wake_up), with any tag",
            "vectors",
            None,
        )
    new = merged(_steering(core).tiers, change, replace)
    requests: Any = core.scheduler.requests.values()  # type: ignore[attr-defined]
    own = (tiers for request in requests if (tiers := tiers_of(request)) is not None)
    requests_tiers = list(own)
    check_with_requests(new, requests_tiers, torch_dtype(core.vllm_config.model_config))
    config = core.vllm_config.steering_config
    check_operations(new, config.max_operations, "vectors")
    largest = max((one.bank_bytes for one in requests_tiers), default=0)
    check_bank(new, config.bank_bytes - largest, "vectors")
    return new


def _apply(core: "EngineCore", new: SteeringTiers) -> None:
    """Steer all by `new` from the next step on."""
    scheduler: Any = core.scheduler
    old = scheduler.steering.tiers
    _tell_workers(core, new)
    scheduler.steering.tiers = new
    EngineSteering.set(new)
    salt = uuid4().hex
    for request in scheduler.requests.values():
        rehash(request, salt, scheduler.hash_block_size)
    changes_prompts = old.prefill_digest != new.prefill_digest
    if changes_prompts and not any(
        request.num_computed_tokens for request in scheduler.requests.values()
    ):
        # No request can hit an old block, as hashes name the vectors; this gives
        # the memory back at once.
        scheduler.reset_prefix_cache()


def _tell_workers(core: "EngineCore", tiers: SteeringTiers) -> None:
    from vllm.v1.worker import residual_stream

    executor: Any = core.model_executor
    if is_on_the_host(executor.sleeping_tags):
        raise SteeringChangeError("the engine sleeps; nothing has changed")
    rpc = executor.collective_rpc
    failures = [e for e in rpc(residual_stream.stage_steering, args=(tiers,)) if e]
    rpc(residual_stream.commit_steering, args=(not failures,))
    if failures:
        raise SteeringChangeError(f"no rank has changed its steering: {failures[0]}")


def refuses(core: "EngineCoreProc", request: "Request") -> bool:
    """Whether a request that has arrived cannot be steered after all; it is answered.

    Its front end has checked it against the global vectors that it knew. Others may
    have set larger ones since.
    """
    tiers = tiers_of(request)
    if tiers is None:
        return False
    if (lacking := missing(tiers, _steering(core).saes)) is not None:
        refuse(core, request, lacking)
        return True
    dtype, possible = (
        torch_dtype(core.vllm_config.model_config),
        _steering(core).possible,
    )
    found = [find_overflow(dtype, shared, tiers) for shared in possible if shared]
    reason = next((one for one in found if one is not None), None)
    message = "" if reason is None else too_much_with_shared(reason)
    bank = core.vllm_config.steering_config.bank_bytes
    needed = tiers.bank_bytes + max(shared.bank_bytes for shared in possible)
    if not message and needed > bank:
        message = (
            f"with the engine's operations, {needed} bytes of vectors are needed and "
            f"--steering-bank-mib allows {bank}; give fewer rows"
        )
    if not message:
        return False
    logger.error("Request %s is not carried out: %s", request.request_id, message)
    refuse(core, request, message)
    return True


def get_steering(core: "EngineCore") -> dict[str, Any]:
    """The global vectors' norms and the rows of tables in use, as plain data.

    Prompt and generated tokens have a row each, for all requests and for every
    configuration in use; the row of zeros does not count.
    """
    scheduler: Any = core.scheduler
    tiers = scheduler.steering.tiers
    slots, config = scheduler.steering.slots, core.vllm_config.steering_config
    of_all = bool(tiers.prefill_digest or tiers.prefill_operations) + bool(
        tiers.decode_digest or tiers.decode_operations
    )
    return {
        **describe(tiers),
        "configs_in_use": slots.in_use,
        "max_configs": config.max_configs,
        "rows_in_use": of_all + 2 * slots.in_use,
        "max_rows": config.num_rows - 1,
        "eager_steps": _eager_steps(core),
    }


def _eager_steps(core: "EngineCore") -> dict[str, int]:
    """Steps that ran neither compiled nor as graphs, and what in them could not.

    A step counts once for each reason. Tensor-parallel ranks count alike; a stage
    counts the steps in which its own layers were concerned.
    """
    from vllm.v1.worker import residual_stream

    found: dict[str, int] = {}
    for counts in core.model_executor.collective_rpc(residual_stream.eager_steps):
        for reason, count in counts.items():
            found[reason] = max(found.get(reason, 0), count)
    return found
