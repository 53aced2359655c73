# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.v1.steering.errors import SteeringValidationError, UnknownModuleError
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.plan import SteeringTiers

TIERS = SteeringTiers()


def test_a_name_is_taken_until_it_is_given_back() -> None:
    modules = SteeringModules()
    modules.register("calm", TIERS)
    assert modules.get("calm") is TIERS
    with pytest.raises(SteeringValidationError, match="exists"):
        modules.register("calm", TIERS)
    modules.register("calm", TIERS, replace=True)
    modules.unregister("calm")
    assert modules.all() == {}
    with pytest.raises(SteeringValidationError, match="no steering module"):
        modules.get("calm")
    with pytest.raises(SteeringValidationError, match="no steering module"):
        modules.unregister("calm")


def test_what_is_no_text_is_not_merely_an_unknown_name() -> None:
    with pytest.raises(UnknownModuleError):
        SteeringModules().unregister("calm")
    with pytest.raises(SteeringValidationError) as refused:
        SteeringModules().unregister(None)
    assert not isinstance(refused.value, UnknownModuleError)
    assert refused.value.parameter == "name"


@pytest.mark.parametrize("name", ["", " calm", "a\nb", "x" * 129, None, 3])
def test_names_are_printable_text(name: object) -> None:
    with pytest.raises(SteeringValidationError, match="printable"):
        SteeringModules().register(name, TIERS)  # type: ignore[arg-type]
