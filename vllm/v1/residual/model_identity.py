# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, against which vectors are checked."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_BLOCK = 4096
_SAMPLED_BYTES = 64 << 20
"""Bytes that are read of a model, in blocks spread over each of its tensors."""
_LARGEST_HEADER = 100_000_000
"""Bytes of the largest header of a safetensors file, as the format's library has it."""
_LEAST_BLOCKS = 4
"""Blocks of a tensor, however many tensors there are."""


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
        called = next(iter(aliases), name)
        self.title = Path(called).name if Path(called).is_absolute() else called
        """What messages call it: its served name. Responses hide paths of folders."""
        self._aliases = {name, Path(name).name, *aliases}
        self._digest = digest
        text = hf_config.get_text_config()
        self.architecture: str = next(iter(hf_config.architectures or ()), "")
        self.model_type: str = hf_config.model_type
        # Some configurations use other names for these fields; the check is then
        # skipped.
        self.hidden_size: int | None = getattr(text, "hidden_size", None)
        both = getattr(text, "is_encoder_decoder", False)
        counted = "decoder_layers" if both else "num_hidden_layers"
        self.num_layers: int | None = getattr(text, counted, None)

    @cached_property
    def weights(self) -> str:
        """The digest of the weights; empty if it is unknown."""
        return self._digest()

    def differs(self, model: str, weights: str) -> str:
        """What shows that a file was made for another model; empty if nothing does.

        The digests of the weights decide; if one of them is unknown, the names do.

        Args:
            model: the name of its model; empty if it names none.
            weights: the digest of its model's weights, likewise.

        Returns:
            `weights` or `model`.

        """
        here = self.weights if weights else ""
        if here:
            return "" if weights == here else "weights"
        return "" if not model or self.is_named(model) else "model"

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
    """SHA-256 over samples of every tensor; empty if there are no files of weights.

    The samples are 64 MiB in blocks of 4 KiB, spread evenly over each tensor, with its
    name, dtype and shape; a model of 64 MiB is read whole. Tensors are sorted by name,
    so the digest does not depend on the files into which they are divided. Files of
    other formats than safetensors count as one tensor each. 16 GB take 0.4 s from the
    page cache. A change of single rows may be missed.
    """
    tensors = sorted(
        tensor
        for number, file in enumerate(_weight_files(model, revision))
        for tensor in _tensors(file, number)
    )
    if not tensors:
        return ""
    blocks = max(_SAMPLED_BYTES // (_BLOCK * len(tensors)), _LEAST_BLOCKS)
    digest = hashlib.sha256()
    opened: dict[Path, int] = {}
    try:
        for tensor in tensors:
            if tensor.file not in opened:
                opened[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            digest.update(f"{tensor.name} {tensor.form} {tensor.size}\n".encode())
            for start, size in _samples(tensor, blocks):
                digest.update(os.pread(opened[tensor.file], size, start))
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return digest.hexdigest()


class _Tensor(NamedTuple):
    """Where a tensor lies; sorted by its name."""

    name: str
    form: str
    """Its dtype and shape."""
    size: int
    """Bytes."""
    file: Path
    start: int
    """Offset in the file."""


def _tensors(file: Path, number: int) -> list[_Tensor]:
    """The tensors of a safetensors file; another file is a tensor as a whole."""
    if file.suffix == ".safetensors":
        try:
            return _in_safetensors(file)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # Loading the model says what is wrong with the file.
    return [_Tensor(f"file {number}", "", file.stat().st_size, file, 0)]


def _in_safetensors(file: Path) -> list[_Tensor]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(size)
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return [
        _Tensor(
            name,
            f"{entry['dtype']} {entry['shape']}",
            entry["data_offsets"][1] - entry["data_offsets"][0],
            file,
            8 + size + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def _samples(tensor: _Tensor, blocks: int) -> Iterator[tuple[int, int]]:
    """The offset and size of each sample: all of the tensor, or blocks of it."""
    if tensor.size <= blocks * _BLOCK:
        yield tensor.start, tensor.size
        return
    last = tensor.size - _BLOCK
    for number in range(blocks):
        yield tensor.start + last * number // (blocks - 1), _BLOCK


def _weight_files(model: str, revision: str | None) -> list[Path]:
    folder = _folder(model, revision)
    if folder is None:
        return []
    return next((found for p in _WEIGHTS if (found := sorted(folder.glob(p)))), [])


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
