# SPDX-License-Identifier: Apache-2.0
"""Admission: a request's steering is checked and resolved to vectors.

After admission nothing can fail because of what the user wrote.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.frontend.forms import Parts, SteeringForm, steering_forms
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.global_vectors import SharedVectors
from vllm.v1.steering.plan import (
    Operation,
    PackedVectors,
    SteeringTiers,
    on_prompt,
    pack,
    total,
)
from vllm.v1.steering.spec import describe
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
from vllm.v1.steering.spec.scaling import parse_names, scaled

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def by_tier(
    parsed: Mapping[str, Parsed], fields: Mapping[str, str]
) -> dict[str, list[Operation]]:
    """The operations by tier; those for generated tokens only move to `decode`.

    Args:
        parsed: parsed tiers by name.
        fields: the name of each tier's field, for messages.

    Raises:
        SteeringValidationError: an entry could never act, or acts on tokens for which
            its condition is undecided.

    """
    found: dict[str, list[Operation]] = {"base": [], "prefill": [], "decode": []}
    for tier in found:
        for one in parsed[tier].operations if tier in parsed else ():
            to, placed = _placed(one, tier, fields)
            found[to].append(placed)
    return {tier: some for tier, some in found.items() if some or tier in parsed}


def _placed(
    one: Operation, tier: str, fields: Mapping[str, str]
) -> tuple[str, Operation]:
    """The tier of an operation, which is decided at prompt tokens if it acts there."""
    when = one.details.when
    if when is None or when.scope == "token" or tier == "decode":
        return tier, one
    parameter = f"{fields[tier]}.{one.hook}.{one.layer}.when.scope"
    if when.scope == "prompt":
        if tier == "base":
            return "decode", one
        raise fail(
            f'{parameter}: an entry with the scope "prompt" acts on generated tokens; '
            f"move it to {fields['decode']}",
            parameter,
            when.scope,
        )
    if when.tap == one.tap:
        raise fail(
            f"{parameter}: the tokens of a prompt are computed together, so whether an "
            "earlier one has fired is not known yet at the hook point at which the "
            "probe reads; read at an earlier hook point, or let the entry act on "
            f"generated tokens only, in {fields['decode']}",
            parameter,
            when.scope,
        )
    return tier, on_prompt(one)


REQUEST_FIELDS = {
    "base": "steering_vectors",
    "prefill": "prefill_steering_vectors",
    "decode": "decode_steering_vectors",
}
"""Request fields of vectors, by tier."""

FIELDS = (*REQUEST_FIELDS.values(), "steering_name", "steering_module_ref")
"""All request fields of steering in our own form."""


def request_fields() -> tuple[str, ...]:
    """All request fields of steering, those of other forms included."""
    return sum((form.request_fields for form in steering_forms()), FIELDS)


def set_fields() -> tuple[str, ...]:
    """The fields of a change of the global vectors, and of a named module."""
    own = tuple(describe.FIELDS.values())
    return sum((form.set_fields for form in steering_forms()), own)


class SteeringAdmission:
    """Resolves the steering of requests to vectors."""

    def __init__(
        self, model: SteeredModel, modules: SteeringModules, alone: bool = True
    ) -> None:
        self.model = model
        self.modules = modules
        self.alone = alone
        """Whether this front end has all requests of the server."""
        self.shared = SharedVectors(alone)
        self._forms: list[SteeringForm] = [form(self) for form in steering_forms()]

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
        given = {name: getattr(params, name) for name in request_fields()}
        receipt = self._wants_receipt(params)
        is_steered = any(value is not None for value in given.values())
        if not is_steered and not receipt and params.conversation_id is None:
            return
        if resumable and (is_steered or receipt):
            raise _refused_session(params)
        most = params.max_tokens
        check = partial(check_positions, num_prompt=num_prompt, max_tokens=most)
        tiers = packed(self.parse(given, REQUEST_FIELDS, check), REQUEST_FIELDS)
        if tiers.operations:
            tiers = for_prompt(tiers, num_prompt, "steering_vectors")
            check(tiers, REQUEST_FIELDS)
        if tiers:  # A module alone was checked when it was registered.
            check_sums(tiers, self.model.dtype)
        if params.steering_name is not None or params.steering_module_ref is not None:
            tiers = self._with_named(params, tiers, num_prompt)
        forms = self._forms_of(params)
        tiers = self._with_generated(forms, params, tiers)
        if resumable and tiers:
            raise _refused_session(params)
        first = _first_of(params)
        check_operations(tiers, self.model.max_operations, first)
        own = self.model.dtype, self.model.bank_bytes
        check_with_shared(tiers, self.shared.possible, *own, first)
        for form in forms:
            form.admitted(params)
        for name in given:
            setattr(params, name, None)
        if receipt:
            tiers = structs.replace(tiers, receipt=True)
        if receipt or any(one.needs_prompt for one in tiers.conditions):
            # Tokens of cached blocks are not computed: they would have neither doses
            # nor a part in the mean, and could not fire.
            params.skip_reading_prefix_cache = True
        params._steering = tiers if tiers or receipt else None

    def _wants_receipt(self, params: "SamplingParams") -> bool:
        wants = params.steering_receipt
        if wants and (reason := self.model.placement.no_receipt):
            raise fail(f"steering_receipt: {reason}", "steering_receipt", wants)
        return wants

    def _with_generated(
        self,
        forms: Iterable[SteeringForm],
        params: "SamplingParams",
        tiers: SteeringTiers,
    ) -> SteeringTiers:
        """The tiers, with what other forms add at the request's generated tokens."""
        for form in forms:
            for field, written in form.generated(params, tiers).items():
                for raw, name in written:
                    parsed = {"decode": self._parsed(raw, name)}
                    parsed = by_phase(parsed, {"decode": name})
                    tiers = _add(tiers, packed(parsed, REQUEST_FIELDS))
                check_sums(tiers, self.model.dtype, field)
        return tiers

    def _with_named(
        self, params: "SamplingParams", tiers: SteeringTiers, num_prompt: int
    ) -> SteeringTiers:
        """The sum of the named modules, scaled, and the request's own vectors."""
        names = parse_names(params.steering_name, params.steering_module_ref)
        alone = len(names) == 1 and names[0].scale == 1.0 and not tiers
        total_tiers = SteeringTiers()
        for name, scale, parameter in names:
            named = scaled(self.modules.get(name, parameter), scale, parameter)
            total_tiers = _add(total_tiers, named)
        tiers = _add(total_tiers, tiers)
        if not alone:  # A module alone was checked when it was registered.
            check_sums(tiers, self.model.dtype, names[0].parameter)
        return for_prompt(tiers, num_prompt, names[0].parameter)

    def parse(
        self,
        given: Mapping[str, Any],
        names: Mapping[str, str],
        check: Callable[[SteeringTiers, Mapping[str, str]], Any] = lambda *_: None,
    ) -> dict[str, Parsed]:
        """Parse and check the tiers that are given.

        Args:
            given: by field, what the user wrote, or None.
            names: our fields of vectors, by tier.
            check: called with what another form's field has, and its name by tier.

        """
        parts = self._in_our_fields(given)
        parsed: dict[str, Parsed] = {}
        for tier, field in names.items():
            for raw, name in parts.get(field, ()):
                one = self._parsed(raw, name)
                if name != field:
                    own = {**names, tier: name}
                    check(packed({tier: one}, own), own)
                parsed[tier] = together(parsed[tier], one) if tier in parsed else one
        return by_phase(parsed, names)

    def _in_our_fields(self, given: Mapping[str, Any]) -> Parts:
        """What the user wrote, by the field of ours to which it belongs."""
        parts = {name: [(raw, name)] for name, raw in given.items() if raw is not None}
        for form in self._forms:
            if not parts.keys().isdisjoint((*form.request_fields, *form.set_fields)):
                form.translate(parts)
        return parts

    def _forms_of(self, params: "SamplingParams") -> list[SteeringForm]:
        """The forms that a request may use: in a conversation any may have stayed."""
        return [
            form
            for form in self._forms
            if params.conversation_id is not None
            or any(getattr(params, name) is not None for name in form.request_fields)
        ]

    def prepared(self, params: "SamplingParams") -> "SamplingParams":
        """A copy of a request's parameters whose vectors are parsed.

        Called on a worker thread, because parsing large vectors would block the event
        loop.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        prepared = copy(params)
        parts = self._in_our_fields({n: getattr(params, n) for n in request_fields()})
        for written in map(parts.get, REQUEST_FIELDS.values()):
            for one, name in written or ():
                setattr(prepared, name, self._parsed(one, name))
        return prepared

    def _parsed(self, raw: Any, name: str) -> Parsed:
        if isinstance(raw, Parsed):
            return raw
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
        tiers = packed(parsed, describe.FIELDS, keep_zeros)
        check_sums(tiers, self.model.dtype, "vectors")
        check_operations(tiers, self.model.max_operations, "vectors")
        check_bank(tiers, self.model.bank_bytes, "vectors")
        check_reachable(tiers, describe.FIELDS, self.model.max_length)
        return tiers

    def parse_named(self, raw: Any) -> dict[str, Parsed]:
        """Parse and check `{"vectors", "prefill_vectors", "decode_vectors"}`."""
        names = set_fields()
        if not isinstance(raw, Mapping) or not raw or not raw.keys() <= set(names):
            raise fail(
                f"a set of vectors is an object with the keys {list(names)}, of "
                "which at least one must be there, and no others",
                "vectors",
                sorted(map(str, {*raw} - {*names}))
                if isinstance(raw, Mapping)
                else raw,
            )
        return self.parse(raw, describe.FIELDS)


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


def _refused_session(params: "SamplingParams") -> SteeringValidationError:
    """The error of a steered request whose prompt comes in parts."""
    name = _first_of(params)
    return fail(
        f"{name}: a session whose prompt comes in parts cannot be steered, as its "
        "prompt has no end; send the prompt in one piece",
        name,
        getattr(params, name),
    )


def _first_of(params: "SamplingParams") -> str:
    """The first field that steers a request, for messages."""
    given = (name for name in request_fields() if getattr(params, name) is not None)
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
    return one.joined(other, _sum)


def _sum(
    one: PackedVectors | None, other: PackedVectors | None
) -> PackedVectors | None:
    if one is None or other is None:
        return one or other
    return pack(total([one, other]), one.operations + other.operations)
