# SPDX-License-Identifier: Apache-2.0
"""Which model this is, as far as vectors are concerned."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        """Take note of a model.

        Args:
            name: its folder or its name on a hub.
            hf_config: its configuration, as transformers loads it.
            aliases: other names it goes by.
            digest: gives the digest of its weights, or nothing if it is unknown.

        """
        self.name = name
        self._aliases = {name, Path(name).name, *aliases}
        self._digest = digest
        text = hf_config.get_text_config()
        self.architecture: str = next(iter(hf_config.architectures or ()), "")
        self.model_type: str = hf_config.model_type
        # A few configurations have other names for these; then nobody checks them.
        self.hidden_size: int | None = getattr(text, "hidden_size", None)
        self.num_layers: int | None = getattr(text, "num_hidden_layers", None)

    @cached_property
    def weights(self) -> str:
        """The digest of the weights; empty if it is unknown."""
        return self._digest()

    def is_named(self, name: str) -> bool:
        """Whether the model goes by a name, or by the last part of a path."""
        return name in self._aliases or Path(name).name in self._aliases


def identity_of(vllm_config: "VllmConfig") -> ModelIdentity:
    """The identity of an engine's model."""
    model = vllm_config.model_config
    served = model.served_model_name
    aliases = [served] if isinstance(served, str) else list(served or ())
    return ModelIdentity(
        model.model,
        model.hf_config,
        aliases,
        lambda: digest_of_weights(model.model, model.revision),
    )


def identity_of_path(name: str) -> ModelIdentity:
    """The identity of a model that is not loaded: of a folder, or from the hub's cache.

    Raises:
        OSError: there is no such model.

    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name)
    return ModelIdentity(name, config, digest=lambda: digest_of_weights(name))


def digest_of_weights(model: str, revision: str | None = None) -> str:
    """SHA-256 over samples of a model's weight files; empty if none are found.

    Of each file: its size, and 64 KiB at its beginning, in its middle and at its end.
    So it costs milliseconds for a model of any size, does not depend on names, and
    differs between a model and a fine-tuned copy.
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
