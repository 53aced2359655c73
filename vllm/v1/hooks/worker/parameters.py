# SPDX-License-Identifier: Apache-2.0
"""Access to whole parameters of a model that is sharded over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_pp_group, get_tp_group


class Parameters:
    """The parameters that hook functions request. Engine thread only.

    Every call is a collective operation: all tensor-parallel ranks run the same
    functions on the same rows.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without prefetched parameters."""
        self._model = model
        self._prefetched: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor:
        """Return a parameter, gathered over tensor-parallel ranks.

        Raises:
            KeyError: this pipeline stage does not have the parameter, and it was not
                prefetched.

        """
        if name in self._prefetched:
            return self._prefetched[name]
        found = self._own(name)
        if found is None:
            raise KeyError(
                f"no parameter {name!r} here; fused weights have vLLM's names, and "
                "those of other pipeline stages must be prefetched"
            )
        return _gathered(found, self._vocab_rows(name))

    def prefetch(self, names: Sequence[str]) -> list[str]:
        """Keep whole parameters on every rank of every pipeline stage.

        Returns:
            The names that no stage has.

        """
        missing = []
        for name in names:
            own = self._own(name)
            whole = None if own is None else _gathered(own, self._vocab_rows(name))
            shared = _from_owner(whole)
            if shared is None:
                missing.append(name)
            else:
                self._prefetched[name] = shared
        return missing

    def clear(self) -> None:
        """Drop prefetched parameters."""
        self._prefetched.clear()

    def _own(self, name: str) -> torch.Tensor | None:
        return dict(self._model.named_parameters(remove_duplicate=False)).get(name)

    def _vocab_rows(self, name: str) -> int | None:
        """The rows of the vocabulary without padding, if the parameter has such."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return getattr(owner, "org_vocab_size", None)


def _gathered(own: torch.Tensor, vocab_rows: int | None) -> torch.Tensor:
    """Gather a parameter of which each tensor-parallel rank has a shard."""
    whole = own.detach()
    dim = getattr(own, "output_dim", None)
    if dim is None:
        dim = getattr(own, "input_dim", None)
    if dim is not None and get_tp_group().world_size > 1:
        whole = get_tp_group().all_gather(whole.contiguous(), dim)
    return whole if vocab_rows is None else whole[:vocab_rows]


def _from_owner(own: torch.Tensor | None) -> torch.Tensor | None:
    """Broadcast from the first pipeline stage that has the tensor."""
    group = get_pp_group()
    if group.world_size == 1:
        return own
    described: Any = None if own is None else (tuple(own.shape), own.dtype)
    every: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(every, described, group=group.cpu_group)
    src = next((rank for rank, one in enumerate(every) if one is not None), None)
    if src is None:
        return None
    shape, dtype = every[src]
    here = own is not None and group.rank_in_group == src
    tensor = own.contiguous() if here and own is not None else None
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=group.device)
    return group.broadcast(tensor, src=src)
