# SPDX-License-Identifier: Apache-2.0
"""Options shared by the commands of `vllm probe`."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.capture_dataset.sources import PROMPT_COLUMNS, records

if TYPE_CHECKING:
    from vllm.steering.labelled import Labelled


def add_data_arguments(parser: Any) -> None:
    """Add the options for labelled texts."""
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help='Labelled texts, in a form of vllm capture: JSON Lines of {"text": ..., '
        '"label": true or false}, CSV, Parquet; or pairs {"positive": ..., '
        '"negative": ...}. Texts or chats; other columns are ignored.',
    )
    group = parser.add_argument_group("data", "What the columns mean.")
    group.add_argument(
        "--column",
        help="The column with the texts; by default the first of "
        f"{', '.join(PROMPT_COLUMNS)}.",
    )
    group.add_argument(
        "--label", metavar="COLUMN", default="label", help="The column with the labels."
    )
    group.add_argument(
        "--positive",
        metavar="LABEL",
        help="The label of the positive texts, where labels are not true and false, "
        "or 1 and 0; all others are negative.",
    )


def read_data(args: argparse.Namespace, path: Path, least: int = 4) -> "Labelled":
    """Read the labelled texts of a file.

    Raises:
        VLLMValidationError: it cannot be read, or a record is invalid.

    """
    from vllm.steering.labelled import Columns, read_labelled

    columns = Columns(
        texts=PROMPT_COLUMNS if args.column is None else (args.column,),
        label=args.label,
        positive=args.positive,
        group=getattr(args, "group", None),
    )
    return read_labelled(_records(path), path, columns, least)


def _records(path: Path) -> Iterable[tuple[str, Any]]:
    if path.suffix != ".json":
        return records(path)
    from vllm.steering.pairs import entries_of

    entries = entries_of(path)
    return [(f"entry {number}", entry) for number, entry in enumerate(entries, 1)]
