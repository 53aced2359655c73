# SPDX-License-Identifier: Apache-2.0
"""Parses entries with `"op": "feature"`, which change one SAE feature."""

from typing import TYPE_CHECKING

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.tap import Tap, why_not
from vllm.v1.steering.conditions import is_known_at
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.spec.table import Values

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel


def parse_feature(
    values: Values, tap: Tap, model: "SteeredModel", at: str
) -> FeatureUse:
    """Check that a feature operation's SAE fits the model and the tap.

    Args:
        values: the values of the entry's keys.
        tap: where the entry acts.
        model: the model that the SAE must fit.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    name, feature = values["sae"], values["feature"]
    if not isinstance(name, str):
        raise fail(f"{at}.sae must be the name of an SAE", f"{at}.sae", name)
    sae = model.named.sae(name, f"{at}.sae")
    _check_place(name, sae, tap, model, at)
    if not is_integer(feature, 0, sae.size):
        raise fail(
            f"{at}.feature: the SAE {shown(name)} has the features 0 to {sae.size - 1}",
            f"{at}.feature",
            feature,
        )
    use = FeatureUse(
        name,
        sae.fingerprint,
        int(feature),
        values["value"],
        values["mode"],
        values["only_if_active"],
        sae.tap if sae.is_transcoder else None,
    )
    if sae.is_transcoder and use.needs_activation:
        _check_reads(name, sae, tap, model, at)
    return use


def _check_place(
    name: str, sae: ModuleInfo, tap: Tap, model: "SteeredModel", at: str
) -> None:
    """Refuse an SAE of another width, and an entry that is not where it writes."""
    if sae.width != model.hidden_size:
        raise _unfit(
            name,
            f"is for rows of width {sae.width}, and this model's have "
            f"{model.hidden_size}; use an SAE of this model",
            at,
        )
    if sae.is_transcoder and sae.width_out != model.hidden_size:
        raise _unfit(
            name,
            f"writes rows of width {sae.width_out}, and this model's have "
            f"{model.hidden_size}; use a transcoder of this model",
            at,
        )
    own = sae.writes if sae.is_transcoder else sae.tap
    if own is not None and own != tap:
        what = "was trained at"
        if sae.is_transcoder:
            what = "is a transcoder that writes to"
        raise _unfit(
            name,
            f"{what} {own[1]} of layer {own[0]}, and the entry is at {tap[1]} of layer "
            f"{tap[0]}; move the entry there",
            at,
        )


def _check_reads(
    name: str, sae: ModuleInfo, tap: Tap, model: "SteeredModel", at: str
) -> None:
    """Refuse a transcoder whose activations are not known where it writes."""
    if sae.tap is None:
        raise _unfit(
            name,
            "is a transcoder whose file does not say where it reads; register it with "
            "layer and hook",
            at,
        )
    layer, hook = sae.tap
    if hook not in model.hook_points.get(layer, ()):
        raise _unfit(
            name,
            f"reads {hook} of layer {layer}, which is not a hook point here"
            f"{why_not(hook, model.missing)}",
            at,
        )
    if sae.tap == tap or not is_known_at(sae.tap, tap):
        raise _unfit(
            name,
            f"reads {hook} of layer {layer}, which is not known when the entry acts, "
            f"at {tap[1]} of layer {tap[0]}",
            at,
        )
    model.placement.check(sae.tap, at)


def _unfit(name: str, why: str, at: str) -> SteeringValidationError:
    """The error of an SAE that an entry cannot use."""
    return fail(f"{at}.sae: {shown(name)} {why}", f"{at}.sae", name)
