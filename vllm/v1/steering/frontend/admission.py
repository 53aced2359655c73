# SPDX-License-Identifier: Apache-2.0
"""Whether a request's steering can be carried out, and by which vectors.

After admission nothing can fail for a reason that lies with the user.
"""

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.errors import fail
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.global_vectors import SharedVectors
from vllm.v1.steering.plan import PackedVectors, SteeringTiers, pack, total
from vllm.v1.steering.spec import describe
from vllm.v1.steering.spec.limits import (
    check_bank,
    check_operations,
    check_positions,
    check_sums,
    check_with_shared,
    check_work,
)
from vllm.v1.steering.spec.matrix import for_prompt
from vllm.v1.steering.spec.parse import (
    Parsed,
    SteeredModel,
    by_phase,
    parse_vectors,
)
from vllm.v1.steering.spec.scopes import by_tier

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

REQUEST_FIELDS = {
    "base": "steering_vectors",
    "prefill": "prefill_steering_vectors",
    "decode": "decode_steering_vectors",
}
"""The tiers' names in a request."""

GLOBAL_FIELDS = describe.FIELDS
"""The tiers' names in a change of the global vectors, and in a named module."""

FIELDS = (*REQUEST_FIELDS.values(), "steering_name")
"""Everything that steers a request."""


class SteeringAdmission:
    """Turns what requests ask for into vectors."""

    def __init__(self, model: SteeredModel, modules: SteeringModules) -> None:
        self.model = model
        self.modules = modules
        self.shared = SharedVectors()

    def admit(self, params: "SamplingParams", num_prompt: int, resumable: bool) -> None:
        """Put a request's resolved vectors in place of what the user wrote.

        Args:
            params: of the request; `max_tokens` is final.
            num_prompt: tokens of the prompt.
            resumable: more of the prompt may come.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        raw = {tier: getattr(params, name) for tier, name in REQUEST_FIELDS.items()}
        if params.steering_name is None and all(v is None for v in raw.values()):
            return
        if resumable:
            name = next(n for n in FIELDS if getattr(params, n) is not None)
            raise fail(
                f"{name}: a session whose prompt comes in parts cannot be steered, as "
                "its prompt has no end; send the prompt in one piece",
                name,
                getattr(params, name),
            )
        tiers = packed(self.parse(raw, REQUEST_FIELDS))
        tiers = for_prompt(tiers, num_prompt, "steering_vectors")
        check_positions(tiers, REQUEST_FIELDS, num_prompt, params.max_tokens)
        if tiers:  # What a name stands for alone is checked already.
            check_sums(tiers, self.model.dtype)
        if params.steering_name is not None:
            tiers = self._with_named(params.steering_name, tiers)
            tiers = for_prompt(tiers, num_prompt, "steering_name")
        first = next(name for name in FIELDS if getattr(params, name) is not None)
        check_operations(tiers, self.model.max_operations, first)
        check_with_shared(tiers, self.shared.possible, self.model.dtype, first)
        taken = max((one.bank_bytes for one in self.shared.possible), default=0)
        check_bank(tiers, self.model.bank_bytes - taken, first)
        for name in FIELDS:
            setattr(params, name, None)
        params._steering = tiers or None

    def _with_named(self, name: str, tiers: SteeringTiers) -> SteeringTiers:
        named = self.modules.get(name)
        if not tiers:
            return named
        tiers = _add(named, tiers)
        check_sums(tiers, self.model.dtype)
        return tiers

    def parse(
        self, raw: Mapping[str, Any], names: Mapping[str, str]
    ) -> dict[str, Parsed]:
        """The tiers that are given, checked.

        Args:
            raw: by tier, what the user wrote or None.
            names: by tier, the parameter's name in messages.

        """
        parsed = {
            tier: self._parsed(spec, names[tier])
            for tier, spec in raw.items()
            if spec is not None
        }
        return by_phase(parsed, names)

    def prepared(self, params: "SamplingParams") -> "SamplingParams":
        """A copy of a request's parameters whose vectors are parsed already.

        For another thread than the event loop's: large vectors take their time.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        prepared = copy(params)
        for name in REQUEST_FIELDS.values():
            raw = getattr(params, name)
            if raw is not None:
                setattr(prepared, name, self._parsed(raw, name))
        return prepared

    def _parsed(self, raw: Any, name: str) -> Parsed:
        if isinstance(raw, Parsed):
            return raw
        parsed = parse_vectors(raw, self.model, name)
        for one in filter(None, (parsed, parsed.generated)):
            check_work(one, name, self.model)
        return parsed

    def named_tiers(self, raw: Any) -> SteeringTiers:
        """The vectors of `{"vectors", "prefill_vectors", "decode_vectors"}`."""
        return self.checked(self.parse_named(raw))

    def checked(
        self, parsed: Mapping[str, Parsed], keep_zeros: bool = False
    ) -> SteeringTiers:
        """The form that travels, of tiers that stand alone.

        Args:
            parsed: by tier.
            keep_zeros: vectors of zeros mean something.

        Raises:
            SteeringValidationError: their sum at a token is not finite.

        """
        tiers = packed(parsed, keep_zeros)
        check_sums(tiers, self.model.dtype, "vectors")
        check_operations(tiers, self.model.max_operations, "vectors")
        check_bank(tiers, self.model.bank_bytes, "vectors")
        return tiers

    def parse_named(self, raw: Any) -> dict[str, Parsed]:
        """`{"vectors", "prefill_vectors", "decode_vectors"}`, checked."""
        names = {name: tier for tier, name in GLOBAL_FIELDS.items()}
        if not isinstance(raw, Mapping) or not raw or not raw.keys() <= names.keys():
            raise fail(
                f"a set of vectors is an object with the keys {list(names)}, of "
                "which at least one must be there",
                "vectors",
                sorted(map(str, raw)) if isinstance(raw, Mapping) else raw,
            )
        return self.parse({names[k]: v for k, v in raw.items()}, GLOBAL_FIELDS)


def packed(parsed: Mapping[str, Parsed], keep_zeros: bool = False) -> SteeringTiers:
    """The form that travels."""
    return SteeringTiers(
        **{
            tier: pack(
                parsed[tier].vectors if tier in parsed else {}, operations, keep_zeros
            )
            for tier, operations in by_tier(parsed).items()
        }
    )


def _add(one: SteeringTiers, other: SteeringTiers) -> SteeringTiers:
    return SteeringTiers(
        _sum(one.base, other.base),
        _sum(one.prefill, other.prefill),
        _sum(one.decode, other.decode),
    )


def _sum(
    one: PackedVectors | None, other: PackedVectors | None
) -> PackedVectors | None:
    if one is None or other is None:
        return one or other
    return pack(total([one, other]), one.operations + other.operations)
