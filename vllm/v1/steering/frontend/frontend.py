# SPDX-License-Identifier: Apache-2.0
"""Steering in the front end: admission of requests and changes of global vectors."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.residual.before_fork import end_openmp_threads
from vllm.v1.residual.engine_call import call_engine
from vllm.v1.residual.model_identity import identity_of
from vllm.v1.residual.plain_data import MAX_NAME
from vllm.v1.residual.sizes import num_layers, torch_dtype
from vllm.v1.steering.errors import SteeringValidationError, as_refused, fail
from vllm.v1.steering.frontend.admission import (
    SteeringAdmission,
    check_kinds,
    request_fields,
    set_fields,
)
from vllm.v1.steering.frontend.modules import Module, SteeringModules
from vllm.v1.steering.global_vectors import SharedVectors
from vllm.v1.steering.plan import SteeringTiers
from vllm.v1.steering.spec.describe import describe, describe_applied
from vllm.v1.steering.spec.files import inner_point, read_module
from vllm.v1.steering.spec.matrix import check_no_whole_prompt
from vllm.v1.steering.spec.named import NamedFiles
from vllm.v1.steering.spec.parse import HOOKS, SteeredModel
from vllm.v1.steering.spec.placement import placement_of
from vllm.v1.steering.spec.provenance import (
    Provenance,
    Source,
    norms_of,
    parse_registered,
)
from vllm.v1.steering.spec.sources import Runs, Sources, no_run

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.steering import SteeringConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine


def check_files(
    config: "SteeringConfig", model_config: "ModelConfig", named: NamedFiles
) -> None:
    """Read every file, and refuse those that do not fit the model or the limits.

    Called before the engine starts, which takes minutes. The hook points of each layer
    are known once the model is loaded; everything else is checked here.

    Args:
        config: has the paths by module name, and the limits.
        model_config: the model's configuration.
        named: the probes and SAEs that entries may name.

    Raises:
        SteeringValidationError: a file is invalid; the message names the module, the
            file, the problem and the remedy.

    """
    layers = range(num_layers(model_config))
    model = SteeredModel(
        dict.fromkeys(layers, HOOKS),
        model_config.get_hidden_size(),
        torch_dtype(model_config),
        config.max_operations,
        config.bank_bytes,
        model_config.max_model_len,
        named,
    )
    admission = SteeringAdmission(model, SteeringModules())
    for name, path in config.modules.items():
        with about_module(name, path):
            module = read_module(path)
            parts = [v for v in module.vectors.values() if isinstance(v, Mapping)]
            if any(map(inner_point, chain(*parts))):
                continue  # Only the loaded model knows how wide rows are there.
            parsed = admission.parse_named(module.vectors)
            module.provenance.check_norms(norms_of(parsed), Source(path))
            admission.checked(parsed)
    end_openmp_threads()


@contextmanager
def about_module(name: str, path: str) -> Iterator[None]:
    """Add the module's name to errors, because several files may be checked."""
    try:
        yield
    except SteeringValidationError as error:
        raise SteeringValidationError(
            f"--steering-modules {name}={path}: {error.args[0]}",
            parameter=error.parameter,
            value=error.value,
        ) from error


DISABLED = (
    "this engine does not steer; start it with --enable-steering, or "
    "LLM(enable_steering=True) offline"
)


class Change(NamedTuple):
    """A checked change of the global vectors."""

    tiers: SteeringTiers
    applied: list[dict[str, Any]]
    """The entries as they were parsed, for the response."""


class NoSteering:
    """The null object for an engine without steering: it refuses every use."""

    shared = SharedVectors()
    """The global vectors: none."""

    def admit(
        self, params: "SamplingParams", num_prompt: int, resumable: bool = False
    ) -> None:
        """Refuse a request that asks for steering.

        Raises:
            SteeringValidationError: the request asks for steering, or has a field that
                the engine core could not read.

        """
        check_kinds(params)
        for name in request_fields():
            value = getattr(params, name)
            if value is not None:
                raise fail(f"{name}: {DISABLED}", name, value)
        if params.steering_receipt:
            raise fail(f"steering_receipt: {DISABLED}", "steering_receipt", True)

    def change(self, raw: Mapping[str, Any], replace: bool) -> Change:
        """Refuse."""
        raise fail(f"vectors: {DISABLED}", "vectors", raw.get("vectors"))

    def enabled(self) -> "SteeringFrontend":
        """Refuse."""
        raise fail(f"steering: {DISABLED}", "enable_steering", False)


class SteeringFrontend(NoSteering):
    """The front end of an engine with steering enabled."""

    def __init__(
        self, vllm_config: "VllmConfig", named: NamedFiles, runs: Runs = no_run
    ) -> None:
        """Read the configured modules from their files.

        Args:
            vllm_config: the engine's configuration.
            named: the probes and SAEs that entries may name.
            runs: finds the kept runs from which entries may take rows.

        Raises:
            SteeringValidationError: a file is invalid or was made for another model.

        """
        points = vllm_config.capture_config.hook_points or {}
        self.named = named
        """The probes and SAEs that entries may name."""
        self.modules = SteeringModules()
        model = SteeredModel(
            points,
            vllm_config.model_config.get_hidden_size(),
            torch_dtype(vllm_config.model_config),
            vllm_config.steering_config.max_operations,
            vllm_config.steering_config.bank_bytes,
            vllm_config.model_config.max_model_len,
            self.named,
            placement_of(vllm_config),
            Sources(runs, self.modules.get),
            vllm_config.capture_config.missing,
            vllm_config.capture_config.point_shapes,
        )
        servers = vllm_config.parallel_config._api_process_count
        self.admission = SteeringAdmission(model, self.modules, servers == 1)
        self.shared = self.admission.shared
        self.identity = identity_of(vllm_config)
        for name, path in vllm_config.steering_config.modules.items():
            with about_module(name, path):
                self._load(name, path)

    def _load(self, name: str, path: str) -> None:
        module = read_module(path)
        found, _ = self._checked(name, module.vectors, module.provenance, Source(path))
        self.modules.register(name, found)

    def admit(
        self, params: "SamplingParams", num_prompt: int, resumable: bool = False
    ) -> None:
        """Check a request's steering fields and replace them by resolved vectors.

        Args:
            params: the request's parameters; `max_tokens` is final.
            num_prompt: number of prompt tokens.
            resumable: whether more of the prompt may follow.

        """
        self.admission.admit(params, num_prompt, resumable)

    def change(self, raw: Mapping[str, Any], replace: bool) -> Change:
        """Check a change of the global vectors, given by field."""
        if all(value is None for value in raw.values()):
            raise fail(
                f"give at least one of {list(set_fields())}; to remove all vectors "
                "clear them",
                "vectors",
                None,
            )
        parsed = self.admission.parse_named(raw)
        tiers = self.admission.checked(parsed, keep_zeros=not replace)
        check_no_whole_prompt(tiers)
        return Change(tiers, describe_applied(parsed))

    def enabled(self) -> "SteeringFrontend":
        """This front end, as its engine steers."""
        return self

    def describe_model(self) -> dict[str, Any]:
        """The layers with their hook points."""
        model = self.admission.model
        return {
            "layers": {
                str(layer): list(names)
                for layer, names in sorted(model.hook_points.items())
            },
            "hidden_size": model.hidden_size,
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def describe_modules(self) -> dict[str, Any]:
        """The named sets with the norms of their vectors."""
        return {
            name: {**describe(one.tiers), "metadata": one.provenance.facts()}
            for name, one in self.modules.all.items()
        }

    def prepare(
        self, name: Any, raw: Any, metadata: Any
    ) -> tuple[Module, dict[str, Any]]:
        """Check a module before it is registered; returns it with its description."""
        source = Source(str(name)[:MAX_NAME], is_file=False)
        said = parse_registered(metadata, source)
        return self._checked(name, raw, said, source)

    def _checked(
        self, name: Any, raw: Any, said: Provenance, source: Source
    ) -> tuple[Module, dict[str, Any]]:
        """Check that a module fits this model; returns it with its description."""
        said.check_model(self.identity, source)
        parsed = self.admission.parse_named(raw)
        norms = norms_of(parsed)
        said.check_norms(norms, source)
        said = dataclasses.replace(said, norms=norms)
        tiers = self.admission.checked(parsed)
        description = {**describe(tiers), "metadata": said.facts()}
        answer = {"name": name, **description, "applied": describe_applied(parsed)}
        return Module(tiers, said), answer


NO_STEERING_FRONTEND = NoSteering()

CLEARED = Change(SteeringTiers(), [])


def open_frontend(
    engine: "LLMEngine | AsyncLLM", named: NamedFiles, runs: Runs
) -> NoSteering:
    """Create the front end that admits an engine's requests."""
    if not engine.vllm_config.steering_config.enabled:
        return NO_STEERING_FRONTEND
    return SteeringFrontend(engine.vllm_config, named, runs)


class SteeringControl:
    """`set_steering`, `clear_steering` and `get_steering` of an offline engine."""

    def __init__(self, engine: "LLMEngine", named: NamedFiles, runs: Runs) -> None:
        self.frontend = open_frontend(engine, named, runs)
        self._core: Any = engine.engine_core

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = call_engine(self._core, method, *args)
        return found

    def set(self, raw: Mapping[str, Any], replace: bool) -> dict[str, Any]:
        """Change the global vectors, given by field, on every rank or on none."""
        change = self.frontend.change(raw, replace)
        state = self._change(change, replace)
        return {**state, "applied": change.applied}

    def clear(self) -> dict[str, Any]:
        """Remove the global vectors."""
        self.frontend.enabled()
        return self._change(CLEARED, True)

    def _change(self, change: Change, replace: bool) -> dict[str, Any]:
        with self.frontend.shared.changing(change.tiers, replace):
            try:
                return self._call("set_steering", change.tiers, replace)
            except Exception as error:
                raise as_refused(error) from error

    def get(self) -> dict[str, Any]:
        """The norms of the global vectors, and the number of slots in use."""
        self.frontend.enabled()
        return self._call("get_steering")
