# SPDX-License-Identifier: Apache-2.0
"""SAELens' cached activations: a Hugging Face data set of contexts.

SAELens' cached activations are data sets on disk whose entries hold an array
`[context_size, hidden_size]` under a hook point's name, and `token_ids`. Hook points
have TransformerLens' names. Rows of consecutive prompts fill the contexts; rows at the
end of a shard that do not fill a context are dropped.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vllm.capture_dataset.table import Shard

HOOK_NAMES = {
    "pre_attn": "hook_resid_pre",
    "post_attn": "hook_resid_mid",
    "post_block": "hook_resid_post",
    "mlp_in": "hook_mlp_in",
    "mlp_out": "hook_mlp_out",
}


def hook_name(layer: int, hook: str) -> str:
    """TransformerLens' name of a hook point."""
    return f"blocks.{layer}.{HOOK_NAMES[hook]}"


def write_saelens(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.arrow`, an Arrow IPC stream as the library `datasets` writes it."""
    size = facts["context_size"]
    count = shard.num_rows // size
    ids = shard.columns["token_id"].to_numpy()[: count * size]
    fields, arrays = [], []
    for tap in shard.taps:
        values = shard.values(tap).numpy()[: count * size]
        arrays.append(_nested(values, size))
        shape = size, values.shape[1]
        metadata = _array2d(shape, shard.stored_dtype)
        fields.append(pa.field(hook_name(*tap), arrays[-1].type, metadata=metadata))
    arrays.append(_lists(pa.array(np.ascontiguousarray(ids, np.int32)), size))
    fields.append(pa.field("token_ids", arrays[-1].type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
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


def _nested(values: np.ndarray[Any, np.dtype[Any]], size: int) -> pa.Array:
    """`[contexts * size, width]` as lists of lists, the storage form of `Array2D`."""
    rows = _lists(pa.array(values.reshape(-1)), values.shape[1])
    return _lists(rows, size)


def _lists(values: pa.Array, size: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
