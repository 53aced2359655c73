# SPDX-License-Identifier: Apache-2.0
"""The result of a sweep."""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = npt.NDArray[np.float32]


class Skipped(NamedTuple):
    """A cell without a value."""

    hook: str
    layer: int
    head: int | None
    position: int | list[int]
    reason: str


class Found(NamedTuple):
    """A cell with its value."""

    hook: str
    layer: int
    head: int | None
    position: int | list[int]
    token: str
    value: float


@dataclass(slots=True, repr=False)
class PatchResult:
    """The values of all cells, and what to compare them with.

    A cell is NaN if it could not be patched (`skipped` says why), or if the sweep was
    interrupted before it.
    """

    values: dict[str, Values]
    """By hook point, float32 `[layers, positions]`, or `[layers, heads, positions]`."""
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    positions: tuple[tuple[int, ...], ...]
    """Of each column, the positions of the patched prompt that are patched together."""
    tokens: tuple[str, ...]
    """The text of each token of the patched prompt."""
    metric: str
    clean: float = math.nan
    """The metric of the clean run, or of the unpatched prompt of an ablation."""
    corrupt: float = math.nan
    """The metric of the corrupt run; NaN for an ablation."""
    noise_floor: float = math.nan
    """The largest difference where nothing was changed: of runs that were measured
    again, and that got their own rows. Smaller effects mean nothing."""
    skipped: list[Skipped] = field(default_factory=list)

    def __repr__(self) -> str:
        shapes = {hook: one.shape for hook, one in self.values.items()}
        return (
            f"PatchResult({self.metric} {shapes}, clean {self.clean:.4g}, corrupt "
            f"{self.corrupt:.4g}, noise floor {self.noise_floor:.2g})"
        )

    @property
    def baseline(self) -> float:
        """The metric of the patched prompt without a patch, by which nothing moves."""
        if self.metric == "recovered":
            return 0.0
        return self.clean if math.isnan(self.corrupt) else self.corrupt

    def at(self, hook: str, place: tuple[int, ...]) -> Found:
        """The cell at an index of a hook point's array."""
        group = self.positions[place[-1]]
        return Found(
            hook,
            self.layers[place[0]],
            None if self.heads is None else self.heads[place[1]],
            position_of(group),
            "".join(self.tokens[p] for p in group if p < len(self.tokens)),
            float(self.values[hook][place]),
        )

    def cells(self) -> Iterator[Found]:
        """All cells, those that are NaN included."""
        for hook, values in self.values.items():
            for place in np.ndindex(values.shape):
                yield self.at(hook, place)

    def top(self, k: int = 5) -> list[Found]:
        """The cells that move the metric most, the largest change first."""
        found = [cell for cell in self.cells() if not math.isnan(cell.value)]
        return sorted(found, key=lambda cell: -abs(cell.value - self.baseline))[:k]

    def to_pandas(self) -> Any:
        """A `DataFrame` with a row for each cell; needs pandas."""
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame(list(self.cells()), columns=list(Found._fields))

    def heatmap(self, path: str | PathLike[str] | None = None) -> "Figure":
        """Draw a map of each hook point, and write it to `path`; needs matplotlib."""
        from vllm.patching.picture import draw

        return draw(self, path)

    def as_json(self) -> dict[str, Any]:
        """Plain data, with None for NaN."""
        return {
            "values": {hook: plain(one) for hook, one in self.values.items()},
            "layers": list(self.layers),
            "heads": None if self.heads is None else list(self.heads),
            "positions": [position_of(group) for group in self.positions],
            "tokens": list(self.tokens),
            "metric": self.metric,
            "clean": plain(self.clean),
            "corrupt": plain(self.corrupt),
            "noise_floor": plain(self.noise_floor),
            "skipped": [one._asdict() for one in self.skipped],
        }

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write one HTML file of the maps, which loads nothing; needs clearbox-client.

        Raises:
            SteeringValidationError: the client is not installed.

        """
        from vllm.patching.picture import save_html

        save_html(self, path)

    def _repr_html_(self) -> str | None:
        """The maps in a notebook; None, so that it shows text, without the client."""
        from vllm.patching.picture import page_parts

        try:
            from clearbox_client.html import frame
        except ImportError:
            return None
        return frame(page_parts(self))


def position_of(group: tuple[int, ...]) -> int | list[int]:
    """A column's position, or the positions that are patched together."""
    return group[0] if len(group) == 1 else list(group)


def plain(value: Any) -> Any:
    """Numbers as JSON has them: None for NaN, lists for arrays."""
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value.tolist()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    return None if math.isnan(value) else float(value)
