# SPDX-License-Identifier: Apache-2.0
"""Reads a feature of an SAE as a vector: a row of its decoder."""

from pathlib import Path

from vllm.v1.residual.sae.files import SAEFileError
from vllm.v1.residual.sae.load import load_sae
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files.vectors import VectorSet, vector_set
from vllm.v1.steering.spec.provenance import Provenance
from vllm.v1.steering.spec.reading import Reading


def read_feature(path: Path, reading: Reading) -> VectorSet:
    """Read the decoder row of a feature.

    Args:
        path: a folder or file that `load_sae` reads.
        reading: the feature; and the layer and hook point where the SAE writes, if its
            file names no place.

    Raises:
        SteeringValidationError: it is no SAE, the feature does not exist, or the place
            is unknown or another one.

    """
    if reading.feature is None:
        raise fail(
            f"feature: {str(path)!r} is an SAE; select a feature with --feature",
            "feature",
            None,
        )
    try:
        sae = load_sae(path)
    except SAEFileError as error:
        raise fail(error.args[0], "path", str(path)) from None
    if not 0 <= reading.feature < len(sae.w_dec):
        raise fail(
            f"feature: {str(path)!r} has the features 0 to {len(sae.w_dec) - 1}",
            "feature",
            reading.feature,
        )
    tap = sae.writes.tap
    if tap is not None and not reading.selects(tap):
        raise reading.nothing_at(sae.name, [tap])
    if tap is None and reading.hook is not None and reading.layer is not None:
        tap = reading.layer, reading.hook
    if tap is None:
        raise fail(
            f"hook: {str(path)!r} writes at {sae.writes.name or 'a place'!r}, which is "
            "no hook point here; give the place of its rows with both --hook and "
            "--layer",
            "hook",
            reading.hook,
        )
    origin = f"feature {reading.feature} of the SAE {sae.name} ({sae.layout})"
    if sae.model:
        origin += f" for {sae.model}"
    row = sae.w_dec[reading.feature].float()
    return vector_set({tap: row}, Provenance(origin=origin), str(path))
