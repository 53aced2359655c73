# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: prompts, rows, bytes, tokens per second, time left."""

import argparse
import re
import sys
from time import monotonic
from typing import Any, TextIO

from tqdm import tqdm

LOG_SECONDS = 10.0
"""Seconds between lines where the output is not a terminal."""


class LogLines:
    """A file for `tqdm` in which each state of the bar is a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> None:
        """Write one state; the characters that overwrite an earlier one are removed."""
        line = text.strip("\r\n ")
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class Progress:
    """A progress bar on a terminal; in a log, a line every ten seconds."""

    def __init__(self, num_prompts: int, disable: bool = False) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar: Any = tqdm(
            total=num_prompts,
            unit=" prompts",
            desc="Capture",
            dynamic_ncols=True,
            mininterval=0.5 if is_terminal else LOG_SECONDS,
            maxinterval=LOG_SECONDS,
            file=sys.stderr if is_terminal else LogLines(sys.stderr),
            disable=disable,
        )
        self._began = monotonic()
        self.num_tokens = self.num_rows = self.num_bytes = 0

    def skipped(self, num_prompts: int) -> None:
        """Count prompts that an earlier run has done."""
        if not self._bar.disable:
            # They do not count for the speed, from which the time left is computed.
            self._bar.initial += num_prompts
            self._bar.n += num_prompts
            self._bar.refresh()

    def done(
        self, num_tokens: int, num_rows: int, num_bytes: int, num_prompts: int = 1
    ) -> None:
        """Count finished prompts."""
        self.num_tokens += num_tokens
        self.num_rows += num_rows
        self.num_bytes += num_bytes
        if not self._bar.disable:
            self._bar.set_postfix_str(str(self), refresh=False)
            self._bar.update(num_prompts)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._began

    def __str__(self) -> str:
        speed = self.num_tokens / max(self.seconds, 1e-9)
        return (
            f"{self.num_rows:,} rows, {human_bytes(self.num_bytes)}, "
            f"{speed:,.0f} tokens/s"
        )

    def close(self) -> None:
        """Stop, and leave the last state on the screen."""
        self._bar.close()


def human_bytes(count: float) -> str:
    """Format a number of bytes, as in `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def parse_bytes(text: str) -> int:
    """Parse a size: `64M` and `64MiB` are 2**20 each, `20m` and `20MB` 10**6.

    Raises:
        argparse.ArgumentTypeError: the text is no size.

    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmMgGtT]?)(i?[bB])?", text.strip())
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number as in 20MB, 1GiB or 64M"
        )
    number, unit, suffix = parts.groups()
    is_binary = unit.isupper() if suffix is None else suffix[0] == "i"
    power = " kmgt".index(unit.lower() or " ")
    return int(float(number) * (1024 if is_binary else 1000) ** power)


def human_seconds(seconds: float) -> str:
    """Format a duration, as in `1 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
