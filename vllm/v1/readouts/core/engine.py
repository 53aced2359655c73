# SPDX-License-Identifier: Apache-2.0
"""Implementations of the engine core's methods for readouts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm.v1.readouts.errors import fail
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def load_readout_module(
    core: "EngineCore",
    name: str,
    path: str,
    tap: tuple[int, str] | None = None,
    fingerprint: str = "",
) -> None:
    """Load a module on all ranks, or on none if one of them fails.

    Args:
        core: the engine core.
        name: the name to register.
        path: a file or folder that all workers can read.
        tap: `(layer, hook)` for an SAE that does not state its own.
        fingerprint: of the module's weights.

    Raises:
        ReadoutValidationError: it would replace an SAE that steering uses.

    """
    _check_unused(core, name)
    place = None if tap is None else (int(tap[0]), str(tap[1]))
    rpc = core.model_executor.collective_rpc
    try:
        rpc(load_module, args=(name, path, place, fingerprint))
    except Exception:
        rpc(unload_module, args=(name,))
        _saes(core).pop(name, None)
        raise
    _saes(core)[name] = fingerprint


def unload_readout_module(core: "EngineCore", name: str) -> None:
    """Unload a module on all ranks.

    Raises:
        ReadoutValidationError: it is an SAE that steering uses.

    """
    _check_unused(core, name)
    _saes(core).pop(name, None)
    core.model_executor.collective_rpc(unload_module, args=(name,))


def _saes(core: "EngineCore") -> dict[str, str]:
    scheduler: Any = core.scheduler
    found: dict[str, str] = scheduler.residual.steering.saes
    return found


def _check_unused(core: "EngineCore", name: str) -> None:
    engine: Any = core
    if users := engine.residual.users_of(core, name):
        raise fail(f"name: {name!r} is steered by: {users}", "name", name)


def readout_status(core: "EngineCore") -> dict[str, Any]:
    """`{"rows", "seconds"}` by kind of readout, summed over ranks; CPU seconds."""
    return added_counters(core.model_executor.collective_rpc(readout_counters))


def added_counters(
    parts: Iterable[dict[str, dict[str, float]]],
) -> dict[str, dict[str, float]]:
    """The sum of what ranks or engines have counted, by kind of readout."""
    total: dict[str, dict[str, float]] = {}
    for part in parts:
        for kind, counts in part.items():
            own = total.setdefault(kind, {"rows": 0, "seconds": 0.0})
            for name, value in counts.items():
                own[name] += value
    return total


def decoded_rows(
    core: "EngineCore", rows: bytes, count: int, top_k: int | None = None
) -> list[dict[str, Any]]:
    """Logits `[count, vocabulary]` of rows that were sent as float32.

    Or the ids and values of the `top_k` largest.

    Raises:
        ValueError: readouts are off, or the model has no head that supports this.

    """
    _check_enabled(core)
    arguments = rows, count, top_k
    ranks = core.model_executor.collective_rpc(decode_rows, args=arguments)
    return [_sent(one) for one in next(found for found in ranks if found is not None)]


def unembedding_rows(core: "EngineCore", tokens: list[int]) -> list[dict[str, Any]]:
    """The unembedding's rows of tokens, `[tokens, hidden_size]`.

    Args:
        core: the engine core.
        tokens: ids that the vocabulary has.

    Raises:
        ValueError: readouts are off, or the weights are not kept as they are.

    """
    _check_enabled(core)
    ranks = core.model_executor.collective_rpc(unembedding_rows_on_rank, args=(tokens,))
    # Each rank has the rows of its own tokens, and zeros for the others'.
    found = [rows for rows in ranks if rows is not None]
    whole = found[0][0]
    for rows, own in found[1:]:
        whole[own] = rows[own]
    return [_sent(whole)]


def _check_enabled(core: "EngineCore") -> None:
    if not core.vllm_config.readout_config.enabled:
        raise ValueError(
            "readouts are not enabled; start the engine with --enable-readouts"
        )


def _sent(tensor: Any) -> dict[str, Any]:
    """A tensor as the engine core's messages carry it."""
    plain = tensor.contiguous()
    return {
        "dtype": str(plain.dtype).removeprefix("torch."),
        "shape": list(plain.shape),
        "data": plain.view(torch.uint8).numpy().ravel().data,
    }


# What workers run, by `collective_rpc`: sent by name, so they stay at module level.


def load_module(
    worker: Any, name: str, path: str, tap: Tap | None, fingerprint: str
) -> None:
    """For `collective_rpc`: load a probe, translator or SAE."""
    worker.model_runner.residual.modules.load(name, path, tap, fingerprint)


def unload_module(worker: Any, name: str) -> None:
    """For `collective_rpc`: unload a probe, translator or SAE."""
    worker.model_runner.residual.modules.unload(name)


def readout_counters(worker: Any) -> dict[str, dict[str, float]]:
    """For `collective_rpc`: number of rows read out, and seconds it took, by kind."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return {}
    return {
        kind: {"rows": one.rows, "seconds": one.seconds}
        for kind, one in readouts.counters.items()
    }


def decode_rows(worker: Any, rows: bytes, count: int, top_k: int | None) -> Any:
    """For `collective_rpc`: float32 logits of rows in float32, on the first rank.

    Of the `top_k` largest the ids come before them. None on ranks that get no logits or
    have no head.

    Raises:
        ValueError: the model has no head that supports this.

    """
    runner = worker.model_runner
    readouts = runner.residual.readouts
    if readouts is None:
        return None
    if readouts.head.refusal:
        raise ValueError(readouts.head.refusal)
    given = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(count, -1)
    with torch.inference_mode():
        placed = given.to(runner.device, worker.vllm_config.model_config.dtype)
        logits = readouts.head.logits(placed)
        if logits is None:
            return None
        if top_k is None:
            return (logits.float().cpu(),)
        top = torch.topk(logits.float(), min(top_k, logits.shape[-1]), dim=-1)
        return top.indices.cpu(), top.values.cpu()


def unembedding_rows_on_rank(worker: Any, tokens: list[int]) -> Any:
    """For `collective_rpc`: rows of the unembedding, and which are this rank's."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return None
    rows, _, own = readouts.head.unembedding(tokens)
    return rows.detach().cpu(), own.cpu()
