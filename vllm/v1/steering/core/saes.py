# SPDX-License-Identifier: Apache-2.0
"""Checks that an SAE is not unregistered while a request or the engine uses it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.plan import SteeringTiers, tiers_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


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
