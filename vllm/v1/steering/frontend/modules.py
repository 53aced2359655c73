# SPDX-License-Identifier: Apache-2.0
"""Named modules: sets of vectors that requests use by `steering_name`."""

from typing import Any, NamedTuple

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.module_info import Named
from vllm.v1.residual.plain_data import MAX_NAME, is_name
from vllm.v1.steering.errors import (
    SteeringValidationError,
    UnknownModuleError,
    fail,
)
from vllm.v1.steering.plan import SteeringTiers
from vllm.v1.steering.spec.provenance import Provenance


class Module(NamedTuple):
    """A named set of vectors, and where it comes from."""

    tiers: SteeringTiers
    provenance: Provenance = Provenance()


def check_name(name: Any, most: int = MAX_NAME) -> None:
    """Refuse what is no printable name of at most so many characters.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if not is_name(name, most):
        raise fail(
            f"name must be printable text of 1 to {most} characters, without blanks "
            "around it",
            "name",
            name,
        )


class SteeringModules(Named[Module]):
    """The named modules of this front end; safe to use from any thread."""

    def __init__(self) -> None:
        super().__init__({})

    def register(self, name: Any, module: Module, replace: bool = False) -> None:
        """Register a module; requests in flight keep the vectors that they have.

        Raises:
            SteeringValidationError: the name is invalid or in use.

        """
        with self._lock:
            self.check_free(name, replace)
            self.put(name, module)

    def unregister(self, name: Any) -> None:
        """Unregister a module; requests in flight keep the vectors that they have.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        with self._lock:
            self.check_known(name)
            self.put(name, None)

    def check_free(self, name: Any, replace: bool) -> None:
        """Refuse an invalid name, and a name in use unless it may be replaced.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """
        check_name(name)
        if name in self.all and not replace:
            raise fail(
                f"name: a steering module {name!r} exists; unregister it first, "
                'or set "replace": true',
                "name",
                name,
            )

    def check_known(self, name: Any) -> None:
        """Refuse a name that is not registered.

        Raises:
            SteeringValidationError: it is not text.
            UnknownModuleError: naming the parameter, the value and the remedy.

        """
        if not isinstance(name, str):
            raise self._unknown(name, "name")
        if name not in self.all:
            unknown = self._unknown(name, "name")
            raise UnknownModuleError(
                unknown.args[0], parameter="name", value=unknown.value
            )

    def get(self, name: Any, parameter: str = "steering_name") -> SteeringTiers:
        """The vectors of a module.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        module = self.all.get(name) if isinstance(name, str) else None
        if module is None:
            raise self._unknown(name, parameter)
        return module.tiers

    def _unknown(self, name: Any, parameter: str) -> SteeringValidationError:
        return fail(
            f"{parameter}: there is no steering module {shown(name)}; there are "
            f"{listed(list(self.all))}. Add one with --steering-modules NAME=PATH "
            "or POST /v1/steering/modules/register",
            parameter,
            name,
        )
