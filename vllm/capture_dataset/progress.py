# SPDX-License-Identifier: Apache-2.0
"""How far a run has come: prompts, rows, bytes, tokens per second, time left."""

from time import monotonic
from typing import Any

from tqdm import tqdm


class Progress:
    """A bar on a terminal; in a log, a line every ten seconds."""

    def __init__(self, num_prompts: int, disable: bool = False) -> None:
        self._bar: Any = tqdm(
            total=num_prompts,
            unit=" prompts",
            desc="Capture",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=disable,
        )
        self._began = monotonic()
        self.num_tokens = self.num_rows = self.num_bytes = 0

    def skipped(self, num_prompts: int) -> None:
        """Prompts that an earlier run has done."""
        if not self._bar.disable:
            # They do not count towards the speed, which the time left rests on.
            self._bar.initial += num_prompts
            self._bar.n += num_prompts
            self._bar.refresh()

    def done(self, num_tokens: int, num_rows: int, num_bytes: int) -> None:
        """A prompt has its rows."""
        self.num_tokens += num_tokens
        self.num_rows += num_rows
        self.num_bytes += num_bytes
        if not self._bar.disable:
            self._bar.set_postfix_str(str(self), refresh=False)
            self._bar.update()

    @property
    def seconds(self) -> float:
        """Since this began."""
        return monotonic() - self._began

    def __str__(self) -> str:
        speed = self.num_tokens / max(self.seconds, 1e-9)
        return (
            f"{self.num_rows:,} rows, {human_bytes(self.num_bytes)}, "
            f"{speed:,.0f} tokens/s"
        )

    def close(self) -> None:
        """Leave the last state standing."""
        self._bar.close()


def human_bytes(count: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def human_seconds(seconds: float) -> str:
    """`1 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
