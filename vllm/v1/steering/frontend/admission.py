# SPDX-License-Identifier: Apache-2.0
"""Admission: a request's steering is checked and resolved to vectors.

After admission nothing can fail because of what the user wrote.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from msgspec import structs

from vllm.v1.steering.errors import fail
from vllm.v1.steering.frontend.gate_vectors import GateVectors
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.global_vectors import SharedVectors
from vllm.v1.steering.plan import (
    PackedVectors,
    SteeringTiers,
    conditions_of,
    pack,
    total,
)
from vllm.v1.steering.spec import describe
from vllm.v1.steering.spec.clamps import as_entries
from vllm.v1.steering.spec.gates import Gate, parse_gates
from vllm.v1.steering.spec.limits import (
    check_bank,
    check_operations,
    check_positions,
    check_reachable,
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
    together,
)
from vllm.v1.steering.spec.scaling import NamedScale, parse_names, scaled
from vllm.v1.steering.spec.scopes import by_tier

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

REQUEST_FIELDS = {
    "base": "steering_vectors",
    "prefill": "prefill_steering_vectors",
    "decode": "decode_steering_vectors",
    "base_clamps": "steering_clamps",
    "prefill_clamps": "prefill_steering_clamps",
    "decode_clamps": "decode_steering_clamps",
}
"""Request fields by tier, for vectors and for clamps."""

GLOBAL_FIELDS = {
    **describe.FIELDS,
    "base_clamps": "clamps",
    "prefill_clamps": "prefill_clamps",
    "decode_clamps": "decode_clamps",
}
"""Fields by tier in a change of the global vectors and in a named module."""

_TIER_OF_CLAMPS = {f"{tier}_clamps": tier for tier in describe.FIELDS}

FIELDS = (
    *REQUEST_FIELDS.values(),
    "steering_name",
    "steering_module_ref",
    "steering",
)
"""All request fields of steering."""


class SteeringAdmission:
    """Resolves the steering of requests to vectors."""

    def __init__(self, model: SteeredModel, modules: SteeringModules) -> None:
        self.model = model
        self.modules = modules
        self.shared = SharedVectors()
        self.gate_vectors = GateVectors(model)
        self.keeps_conversations = True
        """Whether this front end has all requests of a conversation."""

    def admit(self, params: "SamplingParams", num_prompt: int, resumable: bool) -> None:
        """Replace the user's steering fields by resolved vectors, in place.

        Args:
            params: the request's parameters; `max_tokens` is final.
            num_prompt: number of prompt tokens.
            resumable: whether more of the prompt may follow.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        check_kinds(params)
        raw = {tier: getattr(params, name) for tier, name in REQUEST_FIELDS.items()}
        gates, receipt = self._gates(params), self._wants_receipt(params)
        given = gates or any(getattr(params, name) is not None for name in FIELDS)
        if not given and not receipt:
            return
        if resumable:
            name = _first_of(params)
            raise fail(
                f"{name}: a session whose prompt comes in parts cannot be steered, as "
                "its prompt has no end; send the prompt in one piece",
                name,
                getattr(params, name),
            )
        tiers = packed(self.parse(raw, REQUEST_FIELDS), REQUEST_FIELDS)
        tiers = for_prompt(tiers, num_prompt, "steering_vectors")
        check_positions(tiers, REQUEST_FIELDS, num_prompt, params.max_tokens)
        if tiers:  # A module alone was checked when it was registered.
            check_sums(tiers, self.model.dtype)
        names = parse_names(params.steering_name, params.steering_module_ref)
        if names:
            tiers = self._with_named(names, tiers)
            tiers = for_prompt(tiers, num_prompt, names[0].parameter)
        if gates:
            tiers = for_prompt(self._with_gates(gates, tiers), num_prompt, "steering")
        first = _first_of(params)
        check_operations(tiers, self.model.max_operations, first)
        check_with_shared(tiers, self.shared.possible, self.model.dtype, first)
        taken = max((one.bank_bytes for one in self.shared.possible), default=0)
        check_bank(tiers, self.model.bank_bytes - taken, first)
        for name in FIELDS:
            setattr(params, name, None)
        if receipt:
            tiers = structs.replace(tiers, receipt=True)
        if receipt or any(one.needs_prompt for one in conditions_of(tiers)):
            # Tokens of cached blocks are not computed: they would have neither doses
            # nor a part in the mean, and could not fire.
            params.skip_reading_prefix_cache = True
        params._steering = tiers if tiers or receipt else None
        if gates and params.conversation_id is not None:
            self.gate_vectors.keep(params.conversation_id, gates)

    def _wants_receipt(self, params: "SamplingParams") -> bool:
        wants = params.steering_receipt
        if wants and (reason := self.model.placement.no_receipt):
            raise fail(f"steering_receipt: {reason}", "steering_receipt", wants)
        return wants

    def _gates(self, params: "SamplingParams") -> list[Gate]:
        """The request's gates, after those that its conversation has kept."""
        conversation, raw = params.conversation_id, params.steering
        given = [] if raw is None else parse_gates(raw, self.gate_vectors.resolve)
        staying = [gate for gate in given if gate.stays]
        if staying and not (conversation and self.keeps_conversations):
            raise fail(
                f"{staying[0].where}.scope: rest_of_conversation needs a "
                "conversation_id, and a server with a single API server process",
                f"{staying[0].where}.scope",
                conversation,
            )
        if conversation is None:
            return given
        kept = self.gate_vectors.kept(conversation)
        kept = [one for one in kept if all(one != gate.raw for gate in given)]
        if not kept:
            return given
        where = f"steering kept for the conversation {conversation[:60]!r}"
        return parse_gates(kept, self.gate_vectors.resolve, where) + given

    def _with_gates(self, gates: Sequence[Gate], tiers: SteeringTiers) -> SteeringTiers:
        """What a request is steered by, with its gates at generated tokens."""
        own = total([tiers.base, tiers.decode])
        for gate in gates:
            if gate.steer is None and tiers.decode_operations:
                raise fail(
                    f"{gate.where}.apply: only additions can be attenuated, and the "
                    "request has operations at generated tokens; leave one of them out",
                    f"{gate.where}.apply",
                    gate.raw["apply"],
                )
        for gate in gates:
            if entries := gate.entries(own):
                parsed = {"decode": self._parsed(entries, gate.where, False)}
                tiers = _add(tiers, packed(parsed, REQUEST_FIELDS))
        check_sums(tiers, self.model.dtype, "steering")
        return tiers

    def _with_named(
        self, names: Sequence[NamedScale], tiers: SteeringTiers
    ) -> SteeringTiers:
        """The sum of the named modules, scaled, and the request's own vectors."""
        alone = len(names) == 1 and names[0].scale == 1.0 and not tiers
        total_tiers = SteeringTiers()
        for name, scale, parameter in names:
            named = scaled(self.modules.get(name, parameter), scale, parameter)
            total_tiers = _add(total_tiers, named)
        tiers = _add(total_tiers, tiers)
        if not alone:  # A module alone was checked when it was registered.
            check_sums(tiers, self.model.dtype, names[0].parameter)
        return tiers

    def parse(
        self, raw: Mapping[str, Any], names: Mapping[str, str]
    ) -> dict[str, Parsed]:
        """Parse and check the tiers that are given, each together with its clamps.

        Args:
            raw: by tier and by tier of clamps, what the user wrote, or None.
            names: by the same keys, the parameter's name in messages.

        """
        parsed: dict[str, Parsed] = {}
        for key in (key for key in names if raw.get(key) is not None):
            one = self._parsed(raw[key], names[key], key in _TIER_OF_CLAMPS)
            tier = _TIER_OF_CLAMPS.get(key, key)
            parsed[tier] = together(parsed[tier], one) if tier in parsed else one
        return by_phase(parsed, names)

    def prepared(self, params: "SamplingParams") -> "SamplingParams":
        """A copy of a request's parameters whose vectors are parsed.

        Called on a worker thread, because parsing large vectors would block the event
        loop.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        prepared = copy(params)
        for key, name in REQUEST_FIELDS.items():
            raw = getattr(params, name)
            if raw is not None:
                parsed = self._parsed(raw, name, key in _TIER_OF_CLAMPS)
                setattr(prepared, name, parsed)
        return prepared

    def _parsed(self, raw: Any, name: str, are_clamps: bool) -> Parsed:
        if isinstance(raw, Parsed):
            return raw
        raw = as_entries(raw, name) if are_clamps else raw
        parsed = parse_vectors(raw, self.model, name)
        for one in filter(None, (parsed, parsed.generated)):
            check_work(one, name, self.model)
        return parsed

    def checked(
        self, parsed: Mapping[str, Parsed], keep_zeros: bool = False
    ) -> SteeringTiers:
        """The packed form of tiers that are valid without others.

        Args:
            parsed: parsed vectors by tier.
            keep_zeros: whether vectors of zeros are kept, because they replace others.

        Raises:
            SteeringValidationError: their sum at a token is not finite.

        """
        tiers = packed(parsed, GLOBAL_FIELDS, keep_zeros)
        check_sums(tiers, self.model.dtype, "vectors")
        check_operations(tiers, self.model.max_operations, "vectors")
        check_bank(tiers, self.model.bank_bytes, "vectors")
        check_reachable(tiers, describe.FIELDS, self.model.max_length)
        return tiers

    def parse_named(self, raw: Any) -> dict[str, Parsed]:
        """Parse and check `{"vectors", "prefill_vectors", "decode_vectors"}`."""
        names = {name: tier for tier, name in GLOBAL_FIELDS.items()}
        if not isinstance(raw, Mapping) or not raw or not raw.keys() <= names.keys():
            raise fail(
                f"a set of vectors is an object with the keys {list(names)}, of "
                "which at least one must be there",
                "vectors",
                sorted(map(str, raw)) if isinstance(raw, Mapping) else raw,
            )
        return self.parse({names[k]: v for k, v in raw.items()}, GLOBAL_FIELDS)


def check_kinds(params: "SamplingParams") -> None:
    """Refuse fields of a kind that the engine core could not read.

    Raises:
        SteeringValidationError: naming the parameter and the value.

    """
    receipt, conversation = params.steering_receipt, params.conversation_id
    if not isinstance(receipt, bool):
        raise fail(
            "steering_receipt must be true or false", "steering_receipt", receipt
        )
    if conversation is not None and not isinstance(conversation, str):
        raise fail("conversation_id must be text", "conversation_id", conversation)


def _first_of(params: "SamplingParams") -> str:
    """The first field that steers a request, for messages."""
    given = (name for name in FIELDS if getattr(params, name) is not None)
    other = "steering_receipt" if params.steering_receipt else "conversation_id"
    return next(given, other)


def packed(
    parsed: Mapping[str, Parsed], fields: Mapping[str, str], keep_zeros: bool = False
) -> SteeringTiers:
    """The packed form, which is sent to the engine core; `fields` is for messages."""
    found = {
        tier: pack(
            parsed[tier].vectors if tier in parsed else {}, operations, keep_zeros
        )
        for tier, operations in by_tier(parsed, fields).items()
    }
    return SteeringTiers(found.get("base"), found.get("prefill"), found.get("decode"))


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
