# SPDX-License-Identifier: Apache-2.0
"""Changes of the global vectors, which the engine core carries out on all ranks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.v1.residual.kept_memory import is_on_the_host
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.sizes import torch_dtype
from vllm.v1.steering.core.prefix_cache import EngineSteering, change
from vllm.v1.steering.core.refusals import refuse
from vllm.v1.steering.core.scheduler import HeldChange, SteeringScheduling
from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError, fail
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.global_vectors import merged
from vllm.v1.steering.plan import SteeringTiers, tiers_of
from vllm.v1.steering.spec.describe import describe
from vllm.v1.steering.spec.limits import (
    check_bank,
    check_operations,
    check_with_requests,
    check_with_shared,
)

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.request import Request

logger = init_logger(__name__)


def features_of(tiers: SteeringTiers) -> Iterator[FeatureUse]:
    """The feature operations of a configuration."""
    for one in tiers.operations:
        if one.details.feature is not None:
            yield one.details.feature


def uses_of(core: "EngineCore", name: str) -> str:
    """What steers by features of an SAE now, as text; empty if nothing does.

    Args:
        core: the engine core.
        name: name of the SAE.

    """
    scheduler: Any = core.scheduler
    tiers = scheduler.residual.steering.tiers
    if any(use.sae == name for use in features_of(tiers)):
        return "the engine's own vectors name it; clear them first"
    found = sum(
        any(use.sae == name for use in features_of(tiers))
        for request in scheduler.requests.values()
        if (tiers := tiers_of(request)) is not None
    )
    return f"{found} requests in flight name it; wait for them" if found else ""


def missing(tiers: SteeringTiers, saes: Mapping[str, str]) -> str | None:
    """The message about an SAE that has changed since admission; None if none has.

    Args:
        tiers: the request's configuration.
        saes: by name, the fingerprints of the SAEs that the workers hold.

    """
    for use in features_of(tiers):
        if saes.get(use.sae) != use.fingerprint:
            return (
                f"the SAE {use.sae!r} was unregistered, or replaced by another one, "
                "while the request was on its way; send it again"
            )
    return None


def dynamic_steering(core: "EngineCore") -> list[dict[str, Any]]:
    """What consumers that run within the step have set, by worker."""
    rpc = core.model_executor.collective_rpc
    found: list[dict[str, Any]] = rpc(dynamic_status)
    return found


def set_steering(
    core: "EngineCore", change: SteeringTiers, replace: bool
) -> dict[str, Any]:
    """Change the global vectors between two steps, on every rank or on none.

    Workers carry out calls and steps in the order in which they were sent, so that
    no step sees the change on some ranks only.

    Raises:
        SteeringValidationError: the sum with the vectors of a request in flight, or the
            change alone, exceeds what the model's dtype can hold.
        SteeringChangeError: a rank could not take it.

    """
    new = _checked(core, msgspec.convert(change, SteeringTiers), replace)
    _apply(core, new)
    return get_steering(core)


def hold_steering(
    core: "EngineCore", holder: str, change: SteeringTiers, replace: bool
) -> bool:
    """Prepare a change that several engines make together; false if another is held.

    Until the release, requests must fit both the vectors before the change and those
    after it, so that neither making nor undoing it can fail because of a request.

    Args:
        core: one of the data-parallel engine cores.
        holder: identifies the change until `release_steering`.
        change: the vectors and operations that are set.
        replace: whether everything that was set before is dropped.

    Raises:
        SteeringValidationError: for the same reasons as in `set_steering`.

    """
    steering = _steering(core)
    if steering.held is not None:
        return False
    new = _checked(core, msgspec.convert(change, SteeringTiers), replace)
    steering.change(steering.tiers, HeldChange(holder, steering.tiers, new))
    return True


def commit_steering(core: "EngineCore", holder: str) -> dict[str, Any]:
    """Apply the change that is held; `release_steering` can still undo it.

    Raises:
        SteeringChangeError: a rank could not take it.

    """
    held = _steering(core).held
    assert held is not None and held.holder == holder, "a change that nobody holds"
    _apply(core, held.new)
    return get_steering(core)


def release_steering(core: "EngineCore", holder: str, undo: bool) -> None:
    """End a held change, after all engines have applied it or one has refused it.

    Raises:
        SteeringChangeError: a rank could not restore the earlier vectors.

    """
    steering = _steering(core)
    held = steering.held
    if held is None or held.holder != holder:
        return  # This engine had refused the change.
    try:
        if undo and steering.tiers is not held.old:
            _apply(core, held.old)
    finally:
        steering.change(steering.tiers, None)


def _steering(core: "EngineCore") -> SteeringScheduling:
    scheduler: Any = core.scheduler
    found: SteeringScheduling = scheduler.residual.steering
    return found


def _checked(core: "EngineCore", change: SteeringTiers, replace: bool) -> SteeringTiers:
    """The global vectors after a change, checked against the requests in flight."""
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
    """Steer all requests by `new` from the next step on."""
    scheduler: Any = core.scheduler
    steering = _steering(core)
    old = steering.tiers
    _change_on_workers(core, new)
    steering.change(new, steering.held)
    EngineSteering.set(new)
    change(scheduler.requests.values(), scheduler.hash_block_size)
    changes_prompts = old.prefill_digest != new.prefill_digest
    if changes_prompts and not any(
        request.num_computed_tokens for request in scheduler.requests.values()
    ):
        # No request can hit an old block, because hashes name the vectors; the reset
        # frees the memory at once.
        scheduler.reset_prefix_cache()


def _change_on_workers(core: "EngineCore", tiers: SteeringTiers) -> None:
    executor: Any = core.model_executor
    if is_on_the_host(executor.sleeping_tags):
        raise SteeringChangeError("the engine sleeps; nothing has changed")
    rpc = executor.collective_rpc
    failures = [e for e in rpc(stage_steering, args=(tiers,)) if e]
    rpc(commit_steering_on_rank, args=(not failures,))
    if failures:
        raise SteeringChangeError(f"no rank has changed its steering: {failures[0]}")


NO_NAME = "(parameter)"
"""In place of the parameter's name, which only the front end knows."""


def refuses(core: "EngineCoreProc", request: "Request") -> bool:
    """Whether a request cannot be steered after all; if so, it is answered here.

    Its front end has checked it against the global vectors that it knew. Another front
    end may have set larger ones since.
    """
    tiers = tiers_of(request)
    if tiers is None:
        return False
    message = missing(tiers, _steering(core).saes)
    if message is None:
        dtype = torch_dtype(core.vllm_config.model_config)
        bank = core.vllm_config.steering_config.bank_bytes
        try:
            check_with_shared(tiers, _steering(core).possible, dtype, bank, NO_NAME)
            return False
        except SteeringValidationError as error:
            message = error.args[0].removeprefix(f"{NO_NAME}: ")
    logger.error("Request %s is not carried out: %s", request.request_id, message)
    refuse(core, request, message)
    return True


def get_steering(core: "EngineCore") -> dict[str, Any]:
    """The global vectors' norms and the rows of tables in use, as plain data.

    Each configuration in use takes one row for prompt tokens and one for generated
    ones; so do the global vectors. The row of zeros is not counted.
    """
    steering, config = _steering(core), core.vllm_config.steering_config
    tiers, slots = steering.tiers, steering.slots
    of_all = bool(tiers.prefill_digest or tiers.prefill_operations) + bool(
        tiers.decode_digest or tiers.decode_operations
    )
    return {
        **describe(tiers),
        "configs_in_use": slots.in_use,
        "max_configs": config.max_configs,
        "rows_in_use": of_all + 2 * slots.in_use,
        "max_rows": config.num_rows - 1,
        "eager_steps": {},  # Every step is compiled, or runs as CUDA graphs.
        "fired": [
            {"probe": probe or None, "layer": layer, "hook": hook, "tokens": count}
            for (probe, layer, hook), count in steering.fired.items()
        ],
    }


# What workers run, by `collective_rpc`: sent by name, so they stay at module level.


def stage_steering(worker: Any, tiers: SteeringTiers) -> str | None:
    """For `collective_rpc`: stage new global vectors; returns an error, if any."""
    try:
        worker.model_runner.residual.steering.stage_global(tiers)
    except Exception as error:  # Returned, as other ranks must then drop the change.
        logger.exception("A change of steering failed")
        return described(error)
    return None


def commit_steering_on_rank(worker: Any, keep: bool) -> None:
    """For `collective_rpc`: apply the staged global vectors, or drop them."""
    worker.model_runner.residual.steering.commit_global(keep)


def dynamic_status(worker: Any) -> dict[str, Any]:
    """For `collective_rpc`: what consumers have set, and how long they take."""
    stream = worker.model_runner.residual
    steering = stream.steering
    status: dict[str, Any] = {
        "tp_rank": get_tensor_model_parallel_rank(),
        "pp_rank": get_pp_group().rank_in_group,
        "steering_initialized": steering is not None,
    }
    if steering is not None and steering.dynamic is not None:
        status |= steering.dynamic.status()
    consumers = {} if stream.steps is None else stream.steps.status()
    status["sync_consumers"] = dict(consumers)
    return status
