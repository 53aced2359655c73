# SPDX-License-Identifier: Apache-2.0
"""Groups prompts to shards, and publishes complete files."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.capture_dataset.formats import WRITERS
from vllm.capture_dataset.formats.saelens import INFO, STATE, info_of, state_of
from vllm.capture_dataset.manifest import ShardFile, checksum
from vllm.capture_dataset.prompts import Prompt
from vllm.capture_dataset.spec import ITEM_SIZES
from vllm.capture_dataset.table import Shard

ASIDE = ".incomplete"
MAX_PROMPTS = 4096
"""Maximum per shard: tokens and texts are held in memory until it is written."""


def groups(
    prompts: Iterable[Prompt], rows_of: Callable[[int], int], max_rows: int
) -> Iterator[list[Prompt]]:
    """Group consecutive prompts to shards.

    The groups depend on the prompts only, so a resumed run forms the same.

    Args:
        prompts: all prompts, in order.
        rows_of: returns the most rows for a number of tokens.
        max_rows: a shard ends with the prompt that reaches this number of rows, or
            with the `MAX_PROMPTS`th prompt.

    """
    group: list[Prompt] = []
    count = 0
    for prompt in prompts:
        group.append(prompt)
        count += rows_of(len(prompt.token_ids))
        if count >= max_rows or len(group) == MAX_PROMPTS:
            yield group
            group, count = [], 0
    if group:
        yield group


class ShardFolder:
    """The folder of a data set, in which only complete files have their final names."""

    def __init__(self, folder: Path, facts: dict[str, Any], part: str = "") -> None:
        """Create the folder, and remove unfinished files of a run that was killed.

        Args:
            folder: the data set's folder.
            facts: those of its manifest.
            part: the subfolder for unfinished files, of one of several writers.

        Raises:
            OSError: the folder cannot be written.

        """
        self._folder = folder
        self._facts = facts
        self._aside = folder / ASIDE / part
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)

    def write(self, shard: Shard) -> ShardFile:
        """Write a shard and rename it to its final name.

        Raises:
            OSError: writing failed, for example because the disk is full; nothing has
                changed.

        """
        writer = WRITERS[self._facts["format"]]
        name = self._aside / f"part-{shard.number:05d}"
        try:
            written = writer(shard, name, self._facts)
            sums = {path.name: checksum(path) for path in written}
        except BaseException:
            for path in self._aside.glob(f"{name.name}.*"):
                path.unlink()
            raise
        # The file that readers look for is renamed last.
        for path in reversed(written):
            os.replace(path, self._folder / path.name)
        values = self._facts["model"]["hidden_size"] * ITEM_SIZES[shard.stored_dtype]
        rows = shard.num_rows * len(shard.taps)
        return ShardFile(
            file=written[0].name,
            files=sums,
            first_sample=shard.items[0].prompt.entry.sample,
            stop_sample=shard.items[-1].prompt.entry.sample + 1,
            num_prompts=len(shard.items),
            num_rows=rows,
            num_value_bytes=rows * values,
            num_tokens=sum(len(item.token_ids) for item in shard.items),
        )

    def index(self, shards: list[ShardFile], taps: list[tuple[int, str]]) -> None:
        """Update the list of shards for readers, if the format has one."""
        if self._facts["format"] == "saelens":
            self._put(INFO, info_of(self._facts, taps))
            self._put(STATE, state_of([shard.file for shard in shards]))

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _put(self, name: str, content: dict[str, Any]) -> None:
        path = self._aside / name
        path.write_text(json.dumps(content, indent=1))
        os.replace(path, self._folder / name)
