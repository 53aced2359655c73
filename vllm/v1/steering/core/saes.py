# SPDX-License-Identifier: Apache-2.0
"""SAEs that entries name: none is taken away from a request that needs it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.plan import SteeringTiers, tiers_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def features_of(tiers: SteeringTiers) -> Iterator[FeatureUse]:
    """What some tiers do to features."""
    for part in tiers.parts:
        for one in () if part is None else part.operations:
            if one.details.feature is not None:
                yield one.details.feature


def uses_of(core: "EngineCore", name: str) -> str:
    """Who steers by features of an SAE now; empty if nobody does.

    Args:
        core: the engine.
        name: of the SAE.

    """
    scheduler: Any = core.scheduler
    if any(use.sae == name for use in features_of(scheduler.steering.tiers)):
        return "the engine's own vectors name it; clear them first"
    found = sum(
        any(use.sae == name for use in features_of(tiers))
        for request in scheduler.requests.values()
        if (tiers := tiers_of(request)) is not None
    )
    return f"{found} requests in flight name it; wait for them" if found else ""


def missing(tiers: SteeringTiers, saes: Mapping[str, str]) -> str | None:
    """What to tell of an SAE that is not what it was when a request was admitted.

    Args:
        tiers: of the request.
        saes: the fingerprints of those that the workers have, by name.

    """
    for use in features_of(tiers):
        if saes.get(use.sae) != use.fingerprint:
            return (
                f"the SAE {use.sae!r} was unregistered, or replaced by another one, "
                "while the request was on its way; send it again"
            )
    return None
