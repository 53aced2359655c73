# SPDX-License-Identifier: Apache-2.0
"""Other systems' forms of steering, which are translated to ours at the door.

A form is a class that is named in the entry-point group `vllm.steering_forms`. The
engine imports none of them.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.steering.frontend.admission import SteeringAdmission
    from vllm.v1.steering.plan import SteeringTiers

GROUP = "vllm.steering_forms"

Parts: TypeAlias = dict[str, list[tuple[Any, str]]]
"""By field of a request, or of a set of vectors: what was written, each with the name
of the field in which it was, for messages."""


class SteeringForm(Protocol):
    """A form; made once for each front end, and called from any thread.

    It is only called for what has one of its fields, or belongs to a conversation.
    """

    request_fields: tuple[str, ...]
    """Fields of requests that this form adds to ours."""
    set_fields: tuple[str, ...]
    """Fields that it adds to a change of the global vectors, and to a module."""

    def __init__(self, admission: "SteeringAdmission") -> None: ...

    def translate(self, parts: Parts) -> None:
        """Move this form's vectors to our fields, in place.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """

    def generated(self, params: "SamplingParams", tiers: "SteeringTiers") -> Parts:
        """Further entries at a request's generated tokens, by their field.

        Args:
            params: the request's parameters, as they were written.
            tiers: what else the request is steered by.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """

    def admitted(self, params: "SamplingParams") -> None:
        """Called once such a request is admitted, before its fields are cleared."""


@cache
def steering_forms() -> tuple[type[SteeringForm], ...]:
    """The installed forms."""
    return tuple(one.load() for one in entry_points(group=GROUP))
