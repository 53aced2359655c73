# SPDX-License-Identifier: Apache-2.0
"""The operation of each job, on its rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.v1.readouts.modules import ProbeModule, TranslatorModule
from vllm.v1.readouts.worker.attribution import Attribution, Directions
from vllm.v1.readouts.worker.custom import CustomReadouts
from vllm.v1.readouts.worker.head import Head, top_values
from vllm.v1.readouts.worker.jobs import Job, ReadingRequest
from vllm.v1.readouts.worker.kinds import (
    Arrays,
    inline_probe,
    norms,
    probe_values,
    stacked,
)
from vllm.v1.readouts.worker.pending import JobResult
from vllm.v1.readouts.worker.sae import sae_values
from vllm.v1.residual.sae import SparseAutoencoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Logits(NamedTuple):
    """What ranks have computed together of a lens, of which little is kept."""

    values: torch.Tensor  # [R, vocabulary]


class Operations:
    """Computes jobs on the device. Engine thread only."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        head: Head,
        attribution: Attribution,
        requests: Mapping[str, ReadingRequest],
        device: torch.device,
    ) -> None:
        """Start without custom readouts.

        Args:
            vllm_config: the engine's configuration.
            head: of the model.
            attribution: the linear form of the head.
            requests: those with readouts, by id; kept up to date by the caller.
            device: the device of the model.

        """
        self._head = head
        self._attribution = attribution
        self._requests = requests
        self._device = device
        self._custom = CustomReadouts(vllm_config)

    def lens_of_ranks(self, job: Job, rows: torch.Tensor | str) -> Logits | Arrays:
        """What tensor-parallel ranks compute together of a lens. A collective.

        Args:
            job: of the lens; one that no rank refuses.
            rows: `[R, hidden_size]`, or the text of the error why rank 0 has none;
                only the number counts on other ranks.

        Returns:
            The logits, or the result itself if they are too many to be kept.

        Raises:
            Exception: a rank has failed.

        """
        _, top_k, tokens, translator = job.key
        error: Exception | None = None
        count = job.num_rows
        own = self._head.no_rows(count)
        adapters = self._adapters(job) if self._head.has_adapters else None
        if isinstance(rows, str):
            error = RuntimeError(rows)
        elif self._head.keeps_logits:
            try:
                own = rows if translator is None else translated(job, rows, translator)
            except Exception as raised:
                error = raised
        if count > self._head.rows_at_once:
            return self._head.lens_values(own, top_k, tokens, adapters, error)
        found = self._head.shared_logits(own, adapters, error)
        return {} if found is None else Logits(found)

    def compute(
        self, job: Job, rows: torch.Tensor | Logits, result: JobResult
    ) -> Arrays:
        """The arrays of a job's result.

        Args:
            job: not one that reduces rows.
            rows: `[R, width]`, what is read of each row.
            result: gets the errors of entries.

        """
        if isinstance(rows, Logits):
            _, top_k, tokens, _ = job.key
            return top_values(rows.values, top_k, tokens)
        match job.key:
            case ("probe", ProbeModule() as module):
                return probe_values(module, rows)
            case ("probes", *_):
                return self._own_probes(job, rows)
            case ("lens", *_) if self._head.refusal:
                # An error of these requests: the step has others as well.
                refused = f"no lens on this model: {self._head.refusal}"
                result.errors.update(dict.fromkeys(range(len(job.entries)), refused))
                return {}
            case ("lens", top_k, tokens, translator):
                if translator is not None:
                    rows = translated(job, rows, translator)
                adapters = self._adapters(job) if self._head.has_adapters else None
                return self._head.lens_values(rows, top_k, tokens, adapters)
            case ("sae", SparseAutoencoder() as sae, top_k, features):
                return sae_values(sae, rows, top_k, features)
            case ("attribution", Directions() as directions):
                return self._attribution.compute(job, rows, directions)
            case ("norm",):
                return norms(job, rows)
            case ("custom", *_):
                return self._custom_values(job, rows, result)
        return {"rows": rows}

    def _stacked(self, job: Job) -> ProbeModule:
        """Probes given in requests, as one for each row."""
        if "stacked" not in job.kept:
            job.kept["stacked"] = stacked(self._modules(job))
        found: ProbeModule = job.kept["stacked"]
        return found

    def _modules(self, job: Job) -> list[ProbeModule]:
        if "probes" not in job.kept:
            job.kept["probes"] = [
                inline_probe(entry.readout.probe, self._device)
                for entry in job.entries
                if entry.readout.probe is not None
            ]
        found: list[ProbeModule] = job.kept["probes"]
        return found

    def _adapters(self, job: Job) -> list[int]:
        """For each row of a job, the number of its request's LoRA adapter."""
        return [
            self._requests[entry.req_id].adapter
            for entry in job.entries
            for _ in range(entry.num_rows)
        ]

    def _own_probes(self, job: Job, rows: torch.Tensor) -> Arrays:
        """Probes given in requests: a single product if each entry has one row."""
        if all(entry.count == 1 for entry in job.entries):
            return probe_values(self._stacked(job), rows)
        modules = self._modules(job)
        parts = [
            probe_values(module, rows[entry.first : entry.first + entry.num_rows])
            for module, entry in zip(modules, job.entries)
        ]
        return {"values": torch.cat([part["values"] for part in parts])}

    def _custom_values(self, job: Job, rows: torch.Tensor, result: JobResult) -> Arrays:
        found: Arrays = {}
        for number, entry in enumerate(job.entries):
            own = rows[entry.first : entry.first + entry.num_rows]
            own = own.view(entry.count, len(entry.readout.taps), -1)
            request = self._requests[entry.req_id]
            values = self._custom.compute(entry, result.shift, own, request)
            if isinstance(values, str):
                result.errors[number] = values
            else:
                found[str(number)] = values
        return found


def translated(
    job: Job, rows: torch.Tensor, translator: TranslatorModule
) -> torch.Tensor:
    """Apply to each of the rows `[R, hidden_size]` the linear map of its layer."""
    if "layers" not in job.kept:
        job.kept["layers"] = _rows_by_layer(job, rows.device)
    out = torch.empty_like(rows)
    for layer, index in job.kept["layers"].items():
        own = rows[index]
        mapped = own @ translator.weights[layer].T
        if layer in translator.biases:
            mapped = mapped + translator.biases[layer]
        out[index] = own + mapped if translator.residual else mapped
    return out


def _rows_by_layer(job: Job, device: torch.device) -> dict[int, torch.Tensor]:
    found: dict[int, list[int]] = {}
    for entry in job.entries:
        taps = entry.readout.taps
        for number in range(entry.num_rows):
            layer = taps[number % len(taps)][0]
            found.setdefault(layer, []).append(entry.first + number)
    return {layer: torch.tensor(rows).to(device) for layer, rows in found.items()}
