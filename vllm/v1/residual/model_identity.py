# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, against which vectors are checked."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE_BYTES = 1 << 16


class ModelIdentity:
    """A model's names and shape, and a digest of its weights."""

    def __init__(
        self,
        name: str,
        hf_config: Any,
        aliases: Sequence[str] = (),
        digest: Callable[[], str] = str,
    ) -> None:
        """Describe a model.

        Args:
            name: the model's folder, or its name on a hub.
            hf_config: the model's configuration, as transformers loads it.
            aliases: other names of the model, such as served names.
            digest: returns the digest of its weights, empty if it is unknown; called
                once.

        """
        self.name = name
        self._aliases = {name, Path(name).name, *aliases}
        self._digest = digest
        text = hf_config.get_text_config()
        self.architecture: str = next(iter(hf_config.architectures or ()), "")
        self.model_type: str = hf_config.model_type
        # Some configurations use other names for these fields; the check is then
        # skipped.
        self.hidden_size: int | None = getattr(text, "hidden_size", None)
        self.num_layers: int | None = getattr(text, "num_hidden_layers", None)

    @cached_property
    def weights(self) -> str:
        """The digest of the weights; empty if it is unknown."""
        return self._digest()

    def is_named(self, name: str) -> bool:
        """Whether a name, or the last part of a path, is one of the model's names."""
        return name in self._aliases or Path(name).name in self._aliases


def identity_of(vllm_config: "VllmConfig") -> ModelIdentity:
    """The identity of an engine's model."""
    return identity_of_config(vllm_config.model_config)


def identity_of_config(model: "ModelConfig") -> ModelIdentity:
    """The identity of a configured model."""
    served = model.served_model_name
    aliases = [served] if isinstance(served, str) else list(served or ())
    return ModelIdentity(
        model.model,
        model.hf_config,
        aliases,
        lambda: digest_of_weights(model.model, model.revision),
    )


def identity_of_path(name: str) -> ModelIdentity:
    """The identity of a model that is not loaded, from a folder or the hub's cache.

    Raises:
        OSError: the model is not found.

    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name)
    return ModelIdentity(name, config, digest=lambda: digest_of_weights(name))


def digest_of_weights(model: str, revision: str | None = None) -> str:
    """SHA-256 over samples of a model's weight files; empty if there are none.

    The samples are each file's size, and 64 KiB at its start, middle and end. This
    takes milliseconds for a model of any size, does not depend on names, and differs
    between a model and a fine-tuned copy.
    """
    folder = _folder(model, revision)
    if folder is None:
        return ""
    files = next((found for p in _WEIGHTS if (found := sorted(folder.glob(p)))), [])
    digest = hashlib.sha256()
    for file in files:
        digest.update(_sample(file))
    return digest.hexdigest() if files else ""


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        parts = [size.to_bytes(8, "little")]
        for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
            opened.seek(start)
            parts.append(opened.read(_SAMPLE_BYTES))
    return b"".join(parts)
