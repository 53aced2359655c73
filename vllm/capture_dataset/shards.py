# SPDX-License-Identifier: Apache-2.0
"""Shards: which prompts share a file, and giving whole files their names."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.capture_dataset.formats import WRITERS
from vllm.capture_dataset.manifest import ShardFile, checksum
from vllm.capture_dataset.prompts import Prompt
from vllm.capture_dataset.table import Shard
from vllm.v1.capture.consumers.arrow.saelens import (
    INFO,
    STATE,
    hook_name,
    info_of,
    state_of,
)

ASIDE = ".incomplete"


def groups(
    prompts: Iterable[Prompt], rows_of: Callable[[int], int], max_rows: int
) -> Iterator[list[Prompt]]:
    """Consecutive prompts whose rows make a shard.

    Which prompts share one depends on them alone, so a resumed run makes the same.

    Args:
        prompts: all of them, in order.
        rows_of: from a prompt's tokens to its rows, at most.
        max_rows: a shard ends with the prompt that reaches it.

    """
    group: list[Prompt] = []
    count = 0
    for prompt in prompts:
        group.append(prompt)
        count += rows_of(len(prompt.token_ids))
        if count >= max_rows:
            yield group
            group, count = [], 0
    if group:
        yield group


class ShardFolder:
    """The folder of a data set; files appear in it under their names when whole."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """Make the folder, and clear what a killed run has left unfinished.

        Raises:
            OSError: it cannot be written.

        """
        self._folder = folder
        self._facts = facts
        self._aside = folder / ASIDE
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)

    def write(self, shard: Shard, stop_sample: int) -> ShardFile:
        """Write a shard and give it its name.

        Raises:
            OSError: the disk is full, for example; nothing has changed.

        """
        writer = WRITERS[self._facts["format"]]
        name = self._aside / f"part-{shard.number:05d}"
        try:
            written = writer(shard, name, self._facts)
            sums = {
                file.relative_to(self._aside).as_posix(): checksum(file)
                for path in written
                for file in _files(path)
            }
        except BaseException:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(exist_ok=True)
            raise
        # The one that readers look for comes last.
        for path in reversed(written):
            _replace(path, self._folder / path.relative_to(self._aside))
        values = self._facts["model"]["hidden_size"] * _SIZES[shard.stored_dtype]
        rows = shard.num_rows * len(shard.taps)
        return ShardFile(
            file=written[0].relative_to(self._aside).as_posix(),
            files=sums,
            first_sample=shard.items[0].prompt.entry.sample,
            stop_sample=stop_sample,
            num_prompts=len(shard.items),
            num_rows=rows,
            num_value_bytes=rows * values,
            num_tokens=sum(len(item.token_ids) for item in shard.items),
        )

    def index(self, shards: list[ShardFile], taps: list[tuple[int, str]]) -> None:
        """Bring what lists the shards for readers up to date, if the format has it."""
        if self._facts["format"] == "saelens":
            facts = self._facts
            info = info_of(
                [hook_name(*tap) for tap in taps],
                facts["context_size"],
                facts["model"]["hidden_size"],
                facts["values_dtype"],
                json.dumps(facts),
            )
            self._put(INFO, info)
            self._put(STATE, state_of([shard.file for shard in shards]))

    def close(self) -> None:
        """Remove the folder aside."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _put(self, name: str, told: dict[str, Any]) -> None:
        path = self._aside / name
        path.write_text(json.dumps(told, indent=1))
        os.replace(path, self._folder / name)


_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _replace(path: Path, final: Path) -> None:
    """Rename over what an earlier run has left there without noting it."""
    if final.is_dir():
        shutil.rmtree(final)
    final.parent.mkdir(exist_ok=True)
    os.replace(path, final)
