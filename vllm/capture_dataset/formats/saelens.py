# SPDX-License-Identifier: Apache-2.0
"""SAELens' cached activations: a Hugging Face data set of contexts.

SAELens' cached activations are data sets on disk whose entries hold an array
`[context_size, hidden_size]` under a hook point's name, and `token_ids`. Hook points
have TransformerLens' names. A shard is an Arrow IPC stream as the library `datasets`
writes it; `state.json` lists the shards and `dataset_info.json` the columns.

Rows of consecutive prompts fill the contexts; rows at the end of a shard that do not
fill a context are dropped.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm.capture_dataset.table import Shard
from vllm.v1.residual.sae.places import TRANSFORMER_LENS
from vllm.v1.residual.tap import Tap

HOOK_NAMES = {ours: name for name, ours in TRANSFORMER_LENS.items()}
INFO, STATE = "dataset_info.json", "state.json"
IDS = "token_ids"
"""The column of token ids."""


def hook_name(layer: int, hook: str) -> str:
    """TransformerLens' name of a hook point."""
    return f"blocks.{layer}.{HOOK_NAMES[hook]}"


def contexts_of(
    values: Mapping[str, npt.NDArray[Any]], token_ids: npt.NDArray[Any], size: int
) -> pa.RecordBatch:
    """A batch with an entry for each context.

    Args:
        values: `[contexts * size, hidden_size]` by hook name, float16 or float32.
        token_ids: `[contexts * size]`.
        size: rows of a context.

    """
    fields, arrays = [], []
    for name, rows in values.items():
        arrays.append(_nested(rows, size))
        metadata = _array2d((size, rows.shape[1]), str(rows.dtype))
        fields.append(pa.field(name, arrays[-1].type, metadata=metadata))
    arrays.append(_lists(pa.array(np.ascontiguousarray(token_ids, np.int32)), size))
    fields.append(pa.field(IDS, arrays[-1].type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def info_of(facts: Mapping[str, Any], taps: Sequence[Tap]) -> dict[str, Any]:
    """The content of `dataset_info.json`, of the manifest's facts."""
    shape = [facts["context_size"], facts["model"]["hidden_size"]]
    array = {"shape": shape, "dtype": facts["values_dtype"], "_type": "Array2D"}
    ids = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}
    features = {hook_name(*tap): array for tap in taps} | {IDS: ids}
    return {"features": features, "description": json.dumps(facts)}


def state_of(files: Sequence[str]) -> dict[str, Any]:
    """The content of `state.json`, which `datasets.load_from_disk` reads."""
    return {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": f"clearbox-{len(files)}",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def write_saelens(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.arrow`, an Arrow IPC stream as the library `datasets` writes it."""
    size = facts["context_size"]
    count = shard.num_rows // size * size
    ids = shard.columns["token_id"].to_numpy()[:count]
    values = {hook_name(*tap): shard.values(tap).numpy()[:count] for tap in shard.taps}
    batch = contexts_of(values, ids, size)
    written = path.with_suffix(".arrow")
    with (
        pa.OSFile(str(written), "wb") as opened,
        pa.ipc.new_stream(opened, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    return [written]


def _array2d(shape: tuple[int, int], dtype: str) -> dict[str, str]:
    """The metadata of type `Array2D` in files of `datasets`."""
    return {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([shape, dtype]),
    }


def _nested(values: npt.NDArray[Any], size: int) -> pa.Array:
    """`[contexts * size, width]` as lists of lists, the storage form of `Array2D`."""
    rows = _lists(pa.array(values.reshape(-1)), values.shape[1])
    return _lists(rows, size)


def _lists(values: pa.Array, size: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
