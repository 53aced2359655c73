# SPDX-License-Identifier: Apache-2.0
"""The request fields `patch` and `patch_vectors` become entries that replace rows.

`patch` lists `{"layer", "hook", "dest_position", "alpha"?, "mask"?}`, each with one of
`source_run` and `source_position`, `source_module` (a name, or `"zeros"`) and
`source_inline`, the index of a row of `patch_vectors`. A mask is `{"indices": [...]}`
or `{"inline": row}`.
"""

from collections.abc import Mapping
from typing import Any

from vllm.interop.reference_fork.objects import object_of
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.packed import unpack_array
from vllm.v1.steering.spec.parse import MAX_ENTRIES, Parsed
from vllm.v1.steering.spec.table import Array, is_packed

FIELD, VECTORS = "patch", "patch_vectors"
PLACE = ("layer", "hook", "dest_position")
SOURCES = ("source_run", "source_module", "source_inline")
OPTIONAL = (*SOURCES, "source_position", "alpha", "mask")

Entries = dict[str, dict[str, list[dict[str, Any]]]]


def as_entries(raw: Any, packed: Any) -> Any:
    """The patches of a request as `steering_vectors`; parsed ones as they are.

    Args:
        raw: the field `patch`, or None.
        packed: the field `patch_vectors`, or None.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if isinstance(raw, Parsed):
        return raw
    if not isinstance(raw, (list, tuple)) or not 0 < len(raw) <= MAX_ENTRIES:
        raise fail(
            f"{FIELD} must list 1 to {MAX_ENTRIES} patches such as "
            '{"layer": 3, "hook": "post_block", "dest_position": 4, "source_run": '
            '"clean", "source_position": 4}',
            FIELD if raw is not None else VECTORS,
            raw,
        )
    vectors = inline_rows(packed)
    found: Entries = {}
    for number, one in enumerate(raw):
        at = f"{FIELD}[{number}]"
        _check(one, at)
        layers = found.setdefault(one["hook"], {})
        layers.setdefault(str(one["layer"]), []).append(_entry(one, vectors, at))
    return found


def inline_rows(packed: Any) -> Array | None:
    """The rows `[n, width]` of the field `patch_vectors`; None without it.

    Raises:
        SteeringValidationError: they are not packed rows.

    """
    if packed is None:
        return None
    if not is_packed(packed):
        raise fail(
            f'{VECTORS} must be rows as {{"dtype", "shape": [n, width], "data"}}',
            VECTORS,
            packed,
        )
    return unpack_array(packed, VECTORS, dimensions=(2,))


def _check(one: Any, at: str) -> None:
    object_of(one, at, PLACE, OPTIONAL)
    if sum(one.get(key) is not None for key in SOURCES) != 1:
        raise fail(f"{at}: give one of {list(SOURCES)}", at, sorted(one))
    for key in ("layer", "dest_position"):
        if not is_integer(one[key], 0):
            raise fail(f"{at}.{key} must be an index from 0", f"{at}.{key}", one[key])
    if not isinstance(one["hook"], str):
        raise fail(f"{at}.hook must be a name", f"{at}.hook", one["hook"])
    has_position = one.get("source_position") is not None
    if has_position != (one.get("source_run") is not None):
        raise fail(
            f"{at}.source_position: a source_run needs it, and no other source has it",
            f"{at}.source_position",
            one.get("source_position"),
        )


def _entry(one: Mapping[str, Any], vectors: Array | None, at: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": "replace", "positions": [one["dest_position"]]}
    if one.get("source_run") is not None:
        place = one["source_position"]
        if not is_integer(place, 0):
            raise fail(
                f"{at}.source_position must be an index from 0",
                f"{at}.source_position",
                place,
            )
        entry["from"] = {"run": one["source_run"], "positions": [place]}
    elif one.get("source_module") is not None:
        entry["from"] = one["source_module"]
    else:
        at_row = f"{at}.source_inline"
        entry["vector"] = inline_row(one["source_inline"], vectors, at_row)
    if one.get("alpha") is not None:
        entry["alpha"] = one["alpha"]
    if one.get("mask") is not None:
        entry["mask"] = inline_mask(one["mask"], vectors, f"{at}.mask")
    return entry


def inline_mask(mask: Any, vectors: Array | None, at: str) -> Any:
    """A mask in the form of an entry, whose row `patch_vectors` may have.

    Raises:
        SteeringValidationError: it is none.

    """
    if isinstance(mask, Mapping) and mask.keys() == {"inline"}:
        return inline_row(mask["inline"], vectors, f"{at}.inline")
    if isinstance(mask, Mapping) and mask.keys() == {"indices"}:
        return mask
    raise fail(
        f'{at} must be {{"indices": [...]}}, or {{"inline": row of {VECTORS}}}',
        at,
        mask,
    )


def inline_row(index: Any, vectors: Array | None, at: str) -> Array:
    """A row of `patch_vectors`.

    Raises:
        SteeringValidationError: there is no such row.

    """
    count = 0 if vectors is None else len(vectors)
    if vectors is None or not is_integer(index, 0, count):
        raise fail(
            f"{at}: {shown(index)} is no row of {VECTORS}, which has {count}", at, index
        )
    return vectors[int(index)]
