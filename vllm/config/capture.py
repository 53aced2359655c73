# SPDX-License-Identifier: Apache-2.0
"""Configuration of activation capture."""

import json
import os
import re
from ast import literal_eval
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from vllm.config.utils import config

OverloadPolicy = Literal["block", "drop", "spill"]

MIB = 1 << 20


@dataclass(frozen=True)
class ConsumerConfig:
    """The configuration of one consumer instance."""

    name: str
    """The name of an entry point in the group `vllm.capture_consumers`."""
    instance_name: str = ""
    """The name under which requests address the instance; `name` if empty."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The parameters passed to the consumer's constructor."""

    @model_validator(mode="after")
    def _default_instance_name(self) -> "ConsumerConfig":
        if not self.instance_name:
            object.__setattr__(self, "instance_name", self.name)
        return self


def parse_consumer(text: str | dict[str, Any]) -> ConsumerConfig:
    """Parse a consumer in the form of the command line, `NAME[:key=value,...]`.

    A value that is valid JSON (`8`, `true`, `[0,1]`, `{"post_block":[3]}`) is parsed as
    JSON; any other is text. The key `instance_name` names the instance. A dict with the
    fields of `ConsumerConfig`, or its text, is accepted as well.

    Raises:
        ValueError: the text does not have this form.

    """
    if isinstance(text, dict):
        unknown = text.keys() - {"name", "instance_name", "params"}
        if unknown or not isinstance(text.get("name"), str):
            raise ValueError(
                "a capture consumer is {'name', 'instance_name'?, 'params'?}, and "
                f"has the keys {sorted(text)}"
            )
        return ConsumerConfig(**text)
    stripped = text.strip()
    if stripped.startswith("{"):
        return parse_consumer(_object(stripped))
    name, _, rest = stripped.partition(":")
    if not name:
        raise ValueError(
            f"--capture-consumers {text!r}: expected NAME[:key=value,...], for "
            "example filesystem:root=/data/captures"
        )
    params: dict[str, Any] = {}
    while rest := rest.lstrip(", "):
        key, equals, value = rest.partition("=")
        if not key or not equals or "," in key:
            item = rest.partition(",")[0]
            raise ValueError(
                f"--capture-consumers {text!r}: {item!r} is not key=value; separate "
                "parameters by commas, and quote a value with a comma as JSON"
            )
        if key.strip() in params:
            raise ValueError(
                f"--capture-consumers {text!r}: {key.strip()!r} is given twice; keep "
                "one of them"
            )
        params[key.strip()], rest = _first_value(value.lstrip())
    instance_name = str(params.pop("instance_name", ""))
    return ConsumerConfig(name, instance_name, params)


def _object(text: str) -> Any:
    """Parse an object written as JSON, or as the `repr` of one from a YAML file."""
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"--capture-consumers {text!r} begins like a JSON object but is not "
                f"JSON: {error}"
            ) from None


def _first_value(text: str) -> tuple[Any, str]:
    """The value that a text begins with, and what follows it."""
    with suppress(ValueError):
        value, end = json.JSONDecoder().raw_decode(text)
        if re.match(r"\s*(,|$)", rest := text[end:]):
            return value, rest
    written, _, rest = text.partition(",")
    return written.strip(), rest


def prepare_folder(folder: Path) -> None:
    """Create a folder for files of rows, and test that it is writable.

    Raises:
        OSError: it is not.

    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder, buffering=0) as file:
        file.write(b"\0")


def _host_share() -> int:
    from vllm.v1.residual.machine import HOST_SHARE, memory_bytes

    return memory_bytes() // HOST_SHARE


@config
class CaptureConfig:
    """Configuration of activation capture."""

    consumers: list[ConsumerConfig] = Field(default_factory=list)
    """The consumer instances that receive captured rows."""
    driver_instances: list[str] = Field(default_factory=list)
    """Names of instances passed ready-made to the `LLM`; set by it."""
    driver_truncating: list[str] = Field(default_factory=list)
    """Those of them with `truncates`: they accept rows that may be discarded later."""
    driver_key: str = ""
    """Key of the ready-made instances in a registry of the `LLM`'s process."""
    optional_points: list[str] = Field(default_factory=list)
    """The hook points that the layers get beside those of the stream.

    They prevent fusions in their places, which makes a decode step slower even if
    nothing is captured."""
    hook_points: dict[int, list[str]] | None = None
    """The hook points of each layer, set once the model is loaded."""
    point_shapes: dict[int, dict[str, tuple[int, int]]] = Field(default_factory=dict)
    """`PointShape` of the hook points that have heads or another width than the stream,
    by layer and name; set once the model is loaded."""
    missing: dict[str, str] = Field(default_factory=dict)
    """Why enabled hook points are not there that no layer has, by name; set once the
    model is loaded."""
    staging: list[dict[str, int]] = Field(default_factory=list)
    """The staging memory of each rank of an engine, set once the model is loaded."""
    staging_bytes: int = Field(default=256 * MIB, gt=0)
    """Size in bytes of staging memory on the device.

    One step may capture half of it, with readouts a third; a step that would capture
    more is given fewer prompt tokens. Engine arguments without a size choose a larger
    one on a GPU; see `default_staging_bytes`."""
    host_memory_bytes: int = Field(default_factory=_host_share, gt=0)
    """Host memory, in bytes, that a worker may hold for captured rows. It includes
    shared memory that is lent to front ends and holds their callers' tensors."""
    dispatch_queue_size: int = Field(default=1024, gt=0)
    """Maximum number of packets in the queue of a consumer."""
    dispatch_queue_bytes: int = Field(default=256 * MIB, gt=0)
    """Maximum bytes of rows in the queue of a consumer."""
    overload_policy: OverloadPolicy = "block"
    """What happens when a consumer's queue is full: `block` slows down the engine,
    `drop` drops rows and notes it in the result, `spill` writes them to disk."""
    spill_dir: str = ""
    """Directory for `spill`; if empty, one in the system's temporary directory."""
    spill_max_bytes: int = Field(default=8192 * MIB, gt=0)
    """Maximum bytes that a worker may spill; beyond that, `spill` acts as `block`."""
    store_bytes: int = Field(default=0, ge=0)
    """Host memory, in bytes, of an engine's activation store; 0 for none."""
    store_path: str = ""
    """Folder for the rows of the activation store that leave its memory."""
    store_disk_bytes: int = Field(default=0, ge=0)
    """Maximum bytes of rows in it."""
    step_consumers: list[ConsumerConfig] = Field(default_factory=list)
    """Consumers that run within each step, on the engine's thread."""
    takes_actions: bool = False
    """Whether consumers may change the steering while the engine runs."""
    readouts: bool = False
    """Whether requests can use readouts, which also need staged rows."""
    graphsafe_keys: list[str] = Field(default_factory=list)
    """`LAYER:HOOK`, accepted for compatibility: every key is graph-safe."""

    @field_validator("consumers", mode="before")
    @classmethod
    def _parse_consumers(cls, value: Any) -> Any:
        return [
            entry if isinstance(entry, ConsumerConfig) else parse_consumer(entry)
            for entry in value
        ]

    @model_validator(mode="after")
    def _distinct_instances(self) -> "CaptureConfig":
        names = [entry.instance_name for entry in self.consumers]
        names += self.driver_instances
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two capture consumers are named {name!r}; give one of them "
                    "another instance_name"
                )
        return self

    @property
    def enabled(self) -> bool:
        """Whether rows are captured, for consumers or for readouts."""
        return bool(self.consumers or self.driver_instances or self.readouts)

    def has_hook_point(self, layer: int, hook: str) -> bool:
        """Whether a layer of the loaded model, in any stage, has a hook point."""
        return hook in (self.hook_points or {}).get(layer, ())

    @property
    def spill_folder(self) -> Path:
        """The directory for the policy `spill`; by default one of the user's own."""
        default = Path(gettempdir()) / f"vllm-capture-spill-{os.getuid()}"
        return Path(self.spill_dir or default)

    def rows_per_step(self, row_bytes: int) -> int:
        """The number of rows, of `row_bytes` bytes each, that a step may capture.

        Staging memory holds two steps, and with readouts a third, whose rows do not
        leave the device.

        Raises:
            ValueError: not even one row.

        """
        steps = 3 if self.readouts else 2
        rows = self.staging_bytes // row_bytes // steps
        if not rows:
            raise ValueError(
                f"--capture-staging-bytes {self.staging_bytes} has no room for a row "
                f"of {row_bytes} bytes in each of {steps} steps; give at least "
                f"{steps * row_bytes}, or leave it out"
            )
        return rows

    def compute_hash(self) -> str:
        """Hash of what changes the compiled graph: the taps, and staging memory's size.

        Compiled code asserts the sizes that it was compiled for.
        """
        from vllm.config.utils import hash_factors

        factors: dict[str, object] = {"capture": 0, "points": self.optional_points}
        if self.enabled:
            from vllm.model_executor.layers.residual.cache_key import form

            factors |= {"capture": self.staging_bytes, "form": form()}
            factors["readouts"] = self.readouts  # More staging memory.
            factors["takes_actions"] = self.takes_actions  # More table rows.
        return hash_factors(factors)
