# SPDX-License-Identifier: Apache-2.0
"""Results: payloads with rows by tap, merging over keys, stages and samples.

Between processes the tensors of a payload are sent as tensors, beside the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.types import (
    CaptureKey,
    CaptureResult,
    CaptureStatus,
    VllmInternalRequestId,
)
from vllm.v1.residual.tap import Tap

MOST_SHOWN = 4
"""Taps in the text of an object."""

COUNTED = ("kept", "cached_rows")
"""The fields of a result that are counts of rows, or None."""

TENSOR = "\0tensor"
ARRAY = "\0array"
ROWS = "\0rows"
BY_TAP = "\0by tap"
"""Keys of placeholders."""


class RowsByTap(dict[Tap, torch.Tensor]):
    """`(layer, hook)` -> rows `[rows, hidden_size]` on the CPU, in ascending order.

    `positions[tap]` and `token_ids[tap]` hold one entry per row of the tap. A token id
    is None if the prompt was given as embeddings. Taps with the same positions share
    these lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[Tap, list[int]] = {}
        self.token_ids: dict[Tap, list[int | None]] = {}
        self.transport = "http"
        """`"http"`: in the response body. `"shm"`: in memory that the client maps."""
        self.heads: list[int] = []
        """The heads of which all rows consist; empty if they are whole."""

    def __missing__(self, tap: object) -> torch.Tensor:
        raise KeyError(f"{tap!r} is not in {self!r}")

    def __repr__(self) -> str:
        shown = [
            f"({layer}, {hook!r}): {list(rows.shape)} {str(rows.dtype)[6:]}"
            for (layer, hook), rows in list(self.items())[:MOST_SHOWN]
        ]
        more = [f"... {len(self)} taps"] if len(self) > MOST_SHOWN else []
        return f"RowsByTap({', '.join(shown + more)})"

    def _repr_html_(self) -> str | None:
        """For notebooks, as a client shows it; None without `clearbox-client`."""
        try:
            from clearbox_client.rows import Rows, RowSet
        except ImportError:
            return None
        shown = {}
        for (layer, hook), rows in self.items():
            stored = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
            facts = self.positions[layer, hook], self.token_ids[layer, hook]
            dtype = str(rows.dtype)[6:]
            own = layer, hook, stored.numpy(), dtype, *facts
            shown[layer, hook] = Rows(*own, heads=tuple(self.heads))
        return RowSet(shown)._repr_html_()

    def put(self, tap: Tap, rows: torch.Tensor, facts: Mapping[str, Any]) -> None:
        """Add the rows of a tap; `facts` has keys of what `facts_of` returns."""
        self.put_all([tap], rows[None], facts)

    def put_all(
        self, taps: Sequence[Tap], rows: torch.Tensor, facts: Mapping[str, Any]
    ) -> None:
        """Add the rows `[taps, rows, hidden_size]` of taps with the same positions."""
        known, order = len(self), [*islice(reversed(self), 1), *taps]
        self.update(zip(taps, separated(rows), strict=True))
        self.positions.update(dict.fromkeys(taps, _as_list(facts["positions"])))
        self.token_ids.update(dict.fromkeys(taps, _as_list(facts["token_ids"])))
        self.transport = facts.get("transport", "http")
        self.heads = facts.get("heads", [])
        if 0 < known < len(self) and order != sorted(order):
            self._sort()

    def _sort(self) -> None:
        """Order taps by layer, as values are stacked; groups come in any order."""
        parts: list[dict[Tap, Any]] = [self, self.positions, self.token_ids]
        for held in parts:
            ordered = {tap: held[tap] for tap in sorted(held)}
            held.clear()
            held.update(ordered)

    def facts_of(self, tap: Tap) -> dict[str, Any]:
        """Everything about a tap except its rows, as plain data."""
        return {
            "positions": self.positions[tap],
            "token_ids": self.token_ids[tap],
            "transport": self.transport,
            "heads": self.heads,
        }

    @classmethod
    def united(cls, parts: Iterable["RowsByTap"]) -> "RowsByTap":
        """The union of the parts; their taps must be disjoint."""
        whole = cls()
        for part in parts:
            for tap, rows in part.items():
                whole.put(tap, rows, part.facts_of(tap))
        return whole


class GroupedRows(list[tuple[tuple[Tap, ...], torch.Tensor, dict[str, Any]]]):
    """A `RowsByTap` in the form in which it is made and sent.

    Each entry has the taps of a group, their rows `[taps, rows, hidden_size]` and their
    facts, as `RowsByTap.put_all` takes them.
    """

    @classmethod
    def of(
        cls, taps: Sequence[Tap], rows: torch.Tensor, sidecar: dict[str, Any]
    ) -> "GroupedRows":
        """The rows `[taps, rows, hidden_size]` of one group, with its sidecar."""
        client = sidecar.get("client_spec") or {}
        facts = {
            "positions": sidecar["positions"],
            "token_ids": sidecar["token_ids"],
            "transport": client.get("transport", "http"),
            "heads": sidecar.get("heads", []),
        }
        return cls([(tuple(taps), rows.to(getattr(torch, sidecar["dtype"])), facts)])

    def by_tap(self) -> RowsByTap:
        """The rows of each tap, as views."""
        rows = RowsByTap()
        for group in self:
            rows.put_all(*group)
        return rows


def separated(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """`rows.unbind()` as tensors whose storages end where they do; no copy.

    `torch.save` and pickling write the whole storage of a tensor, which otherwise has
    the rows of other taps too.

    Args:
        rows: `[taps, rows, hidden_size]` on the CPU; each tap's rows are contiguous.

    """
    if not rows.numel():
        return rows.unbind()
    # By NumPy, which takes half of the time.
    taps, dtype = rows.view(torch.uint8).numpy(), rows.dtype
    return [torch.from_numpy(tap).view(dtype) for tap in taps]


def _as_list(values: Sequence[Any]) -> list[Any]:
    """`values` itself if it is a list, so that taps share it."""
    return values if isinstance(values, list) else list(values)


def is_by_tap(payload: Any) -> bool:
    """Whether a payload is a non-empty dict whose keys all are `(layer, hook)`."""
    return (
        isinstance(payload, dict)
        and bool(payload)
        and all(
            isinstance(key, tuple)
            and [type(part) for part in key] == [int, str]
            and -(1 << 63) <= key[0] < 1 << 63
            for key in payload
        )
    )


def sendable(text: str) -> str:
    """`text` with what UTF-8 cannot encode escaped, such as lone surrogates.

    File names that are not UTF-8 hold them (`os.fsdecode`).
    """
    return text.encode(errors="backslashreplace").decode()


def request_key(request_id: str) -> CaptureKey:
    """The key of the merged result of a request."""
    return VllmInternalRequestId(request_id), -1, "*"


def merge(request_id: str, results: Sequence[CaptureResult]) -> CaptureResult:
    """Merge results into one with the key `(request_id, -1, "*")`.

    The status is `"pending"` if any is, the common status if all agree,
    `"partial_error"` if some failed, otherwise `"ok"`. Errors are joined by `"; "`,
    payloads by `join_payloads`.
    """
    assert results, "there is no result to merge"
    errors = sorted({result.error for result in results if result.error})
    return CaptureResult(
        request_key(request_id),
        _status(results),
        "; ".join(errors) or None,
        join_payloads([result.payload for result in results]),
    )


def _status(results: Sequence[CaptureResult]) -> CaptureStatus:
    seen = {result.status for result in results}
    if "pending" in seen:
        return "pending"
    if len(seen) == 1:
        return results[0].status
    if seen & {"error", "partial_error"}:
        return "partial_error"
    return "ok"


def join_payloads(payloads: Sequence[Any]) -> Any:
    """Concatenate lists, unite dicts, and collect other values in a list.

    None is skipped; a single payload stays as it is.
    """
    present = [payload for payload in payloads if payload is not None]
    if not present:
        return None
    if all(isinstance(payload, GroupedRows) for payload in present):
        return GroupedRows(group for payload in present for group in payload)
    if all(isinstance(payload, list) for payload in present):
        return [item for payload in present for item in payload]
    if all(isinstance(payload, RowsByTap) for payload in present):
        return present[0] if len(present) == 1 else RowsByTap.united(present)
    if all(isinstance(payload, dict) for payload in present):
        return {key: value for payload in present for key, value in payload.items()}
    return present[0] if len(payloads) == 1 else present


def merge_samples(
    request_id: str, samples: Mapping[int, CaptureResult]
) -> CaptureResult:
    """Merge the results of samples; the payload is a dict by sample index."""
    merged = merge(request_id, list(samples.values()))
    merged.payload = {index: result.payload for index, result in samples.items()}
    for name in COUNTED:
        counts = [getattr(result, name) for result in samples.values()]
        known = [count for count in counts if count is not None]
        setattr(merged, name, sum(known) if known else None)
    return merged


def set_aside(payload: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace tensors and arrays in a payload by placeholders.

    Args:
        payload: nested dicts, lists and tuples, and rows by tap.
        tensors: extended by the tensors.

    Returns:
        The payload with placeholders.

    Raises:
        TypeError: a key of a dict is of a type that msgpack does not preserve.

    """
    if isinstance(payload, torch.Tensor):
        tensors.append(payload.detach().cpu())
        return {TENSOR: len(tensors) - 1}
    if isinstance(payload, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(payload)))
        return {ARRAY: len(tensors) - 1}
    if isinstance(payload, np.generic):
        return payload.item()
    if isinstance(payload, RowsByTap):
        groups = [
            ((tap,), rows[None], payload.facts_of(tap)) for tap, rows in payload.items()
        ]
        payload = GroupedRows(groups)
    if isinstance(payload, GroupedRows):
        return {ROWS: _rows_set_aside(payload, tensors)}
    if is_by_tap(payload):
        own = [[tap, set_aside(value, tensors)] for tap, value in payload.items()]
        return {BY_TAP: own}
    if isinstance(payload, dict):
        for key in payload:
            if not isinstance(key, (str, int, float, bytes, type(None))):
                raise TypeError(f"a key is {key!r}, neither text nor a number")
        return {key: set_aside(value, tensors) for key, value in payload.items()}
    if isinstance(payload, (list, tuple)):
        return [set_aside(value, tensors) for value in payload]
    return payload


def _rows_set_aside(groups: GroupedRows, tensors: list[torch.Tensor]) -> list[Any]:
    """The groups' taps, placeholders and facts, of which equal ones are sent once.

    Otherwise positions and tokens of a prompt would be sent once per group.
    """
    indices: dict[tuple[int, int], int] = {}
    different: list[dict[str, Any]] = []
    found = []
    for taps, rows, facts in groups:
        # `groups` holds both lists, so no other object has the same id.
        lists = id(facts["positions"]), id(facts["token_ids"])
        index = indices.setdefault(lists, len(different))
        if index == len(different):
            different.append(facts)
        found.append([taps, len(tensors), index])
        tensors.append(rows)
    return [found, different]


def put_back(payload: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `set_aside`, except that tuples have become lists.

    Rows become a `RowsByTap`, also those of this process, which were not set aside.
    """
    if isinstance(payload, GroupedRows):
        return payload.by_tap()
    if isinstance(payload, dict):
        if payload.keys() == {ROWS}:
            groups, facts = payload[ROWS]
            return GroupedRows(
                (tuple(map(tuple, taps)), tensors[rows], facts[index])
                for taps, rows, index in groups
            ).by_tap()
        if payload.keys() == {BY_TAP}:
            return {tuple(k): put_back(v, tensors) for k, v in payload[BY_TAP]}
        if payload.keys() == {TENSOR}:
            return tensors[payload[TENSOR]]
        if payload.keys() == {ARRAY}:
            return tensors[payload[ARRAY]].numpy()
        return {key: put_back(value, tensors) for key, value in payload.items()}
    if isinstance(payload, list):
        return [put_back(value, tensors) for value in payload]
    return payload
