# SPDX-License-Identifier: Apache-2.0
"""Loads an SAE from a path, after detection of its layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl

from vllm.v1.residual.file_facts import split_facts
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.sae.dictionary_learning import read_dictionary_learning
from vllm.v1.residual.sae.files import bad_file, fail
from vllm.v1.residual.sae.fold import RawSAE, folded
from vllm.v1.residual.sae.gemma_scope import read_gemma_scope
from vllm.v1.residual.sae.goodfire import is_goodfire, read_goodfire
from vllm.v1.residual.sae.llama_scope import FIRST_WEIGHTS, read_llama_scope
from vllm.v1.residual.sae.qwen_scope import is_qwen_scope, read_qwen_scope
from vllm.v1.residual.sae.record import SparseAutoencoder
from vllm.v1.residual.sae.saelens import read_saelens_sae
from vllm.v1.residual.sae.sparsify import read_sparsify
from vllm.v1.residual.tap import Tap, resolve_tap

Read: TypeAlias = Callable[[Path], RawSAE]

FOLDERS: tuple[tuple[str, Read, tuple[str, ...]], ...] = (
    # SAELens comes before layouts that share one of its file names.
    ("saelens", read_saelens_sae, ("cfg.json", "sae_weights.safetensors")),
    ("sparsify", read_sparsify, ("cfg.json", "sae.safetensors")),
    ("gemma_scope", read_gemma_scope, ("params.npz",)),
    ("gemma_scope", read_gemma_scope, ("params.safetensors",)),
    ("llama_scope", read_llama_scope, ("hyperparams.json", str(FIRST_WEIGHTS))),
    ("llama_scope", read_llama_scope, ("config.json", "sae_weights.safetensors")),
    ("dictionary_learning", read_dictionary_learning, ("config.json", "ae.pt")),
)
"""Layouts, their readers, and the files by which a folder is recognised."""

FILES = frozenset(name for _, _, names in FOLDERS for name in names)
"""Files whose path stands for their folder's."""

_EXPECTED = (
    "SAELens (cfg.json and sae_weights.safetensors), sparsify (cfg.json and "
    "sae.safetensors), Gemma Scope (params.npz or params.safetensors), Llama Scope "
    "(hyperparams.json and checkpoints/final.safetensors, or config.json and "
    "sae_weights.safetensors), dictionary_learning (config.json and ae.pt), Qwen Scope "
    "(a file layerN.sae.pt) or Goodfire (a file NAME-SAE-lN.pth)"
)


def load_sae(path: str | Path, tap: Tap | None = None) -> SparseAutoencoder:
    """Load a sparse autoencoder or transcoder from a file or folder, on the CPU.

    Args:
        path: a folder, or a file inside one; a file alone for Qwen Scope and Goodfire.
            `?layer=12&hook=mlp_in` may follow, in place of `tap`.
        tap: `(layer, hook point)` that it reads, if the file does not contain it. A
            transcoder writes where its file states.

    Raises:
        SAEFileError: the path does not exist, has none of the known layouts,
            or is invalid, or its architecture cannot be computed from one token's row.

    """
    place, said = split_facts(Path(path).expanduser())
    if said:
        appended = _tap_of(said, path)
        if tap not in (None, appended):
            raise fail(
                f"layer: another place is given after the path, {said!r}, than beside "
                "it; leave out one of them",
                "layer",
                appended[0],
            )
        tap = appended
    if not place.exists():
        raise bad_file(place, "there is no such file or folder")
    inside = place.name in FILES
    for candidate in (place, place.parent) if inside else (place,):
        if found := _layout(candidate):
            layout, read = found
            name = candidate.absolute().name
            return _at(folded(read(candidate), name, layout), tap)
    raise bad_file(place, f"is not an SAE of a known layout: {_EXPECTED}")


def _layout(path: Path) -> tuple[str, Read] | None:
    """The layout of a file or folder, and its reader; None if it has none of ours."""
    for layout, read, names in FOLDERS:
        if all((path / name).is_file() for name in names):
            return layout, read
    if is_qwen_scope(path):
        return "qwen_scope", read_qwen_scope
    return ("goodfire", read_goodfire) if is_goodfire(path) else None


def is_sae(path: Path) -> bool:
    """Whether a path can only be that of an SAE, by its name."""
    alone = is_qwen_scope(path) or is_goodfire(path)
    return path.is_dir() or path.name in FILES or alone


def _tap_of(said: str, path: str | Path) -> Tap:
    """The tap in `layer=12&hook=mlp_in`."""
    facts = parse_qsl(said, keep_blank_values=True)
    values = dict(facts)
    layer = layer_index(values.get("layer", ""))
    tap = None
    if values.keys() == {"layer", "hook"} and len(facts) == 2 and layer is not None:
        tap = resolve_tap(layer, values["hook"])
    if tap is None or tap[0] is None:
        raise fail(
            f"path: {said!r} does not say where the SAE reads; write "
            '"?layer=12&hook=mlp_in" after the path',
            "path",
            str(path),
        )
    return tap[0], tap[1]


def _at(sae: SparseAutoencoder, tap: Tap | None) -> SparseAutoencoder:
    if tap is None:
        return sae
    reads = replace(sae.reads, tap=tap)
    return replace(sae, reads=reads, writes=sae.writes if sae.is_transcoder else reads)
