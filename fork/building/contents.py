# SPDX-License-Identifier: Apache-2.0
"""The contents of a built tree: for each path, where its content comes from."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fork.errors import Fault
from fork.paths import Checkout
from fork.upstream.release import Release

WEAVE_AT_RUN_TIME = "vllm/model_executor/residual_weave"
"""Path of the decoder-layer weave in the tree."""


@dataclass(frozen=True, slots=True)
class Copied:
    """An unchanged upstream file, or the fork's compiled library."""

    path: Path
    fingerprint: str
    """Changes when the content does: the hash of what the file is made of."""


@dataclass(frozen=True, slots=True)
class Text:
    """A woven or generated file."""

    data: bytes

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        return f"text {hashlib.sha256(self.data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Added:
    """A file of the fork, linked from the tree."""

    path: Path

    @property
    def fingerprint(self) -> str:
        """Changes when the link does; the linked content may change at any time."""
        return f"link {self.path}"


Content = Copied | Text | Added
Contents = dict[str, Content]


def added_files(checkout: Checkout) -> dict[str, Path]:
    """The files that the fork adds, by path in the tree.

    They include packages beside `vllm` and the decoder-layer weave, which also weaves
    layers from outside the release when their model is loaded.
    """
    added = {
        path.relative_to(root).as_posix(): path
        for folder, root in (
            (checkout.overlay, checkout.root),
            (checkout.packages, checkout.packages),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_debris(path.relative_to(root))
    }
    return added | {
        f"{WEAVE_AT_RUN_TIME}/{path.name}": path
        for path in sorted(checkout.weave.glob("*.py"))
    }


def top_packages(paths: Iterable[str]) -> list[str]:
    """The packages that a tree has, without the metadata folder beside them."""
    tops = {path.partition("/")[0] for path in paths if "/" in path}
    return sorted(top for top in tops if top.isidentifier())


def _is_debris(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or "__pycache__" in path.parts or path.suffix in (".pyc", ".orig")


def shadowing_faults(added: Iterable[str], release: Release) -> list[Fault]:
    """A fault for each added file that also exists upstream."""
    upstream = set(release.files())
    return [
        Fault(
            origin=path,
            module=path,
            kind="Shadowing",
            sentence=f"{path} would replace a file of vLLM {release.version}: rename "
            f"it, or edit the upstream file with fork/edits/{path}.",
        )
        for path in added
        if path in upstream
    ]


def assemble(
    checkout: Checkout,
    release: Release,
    woven: dict[str, str],
    generated: dict[str, bytes],
) -> Contents:
    """The contents of the tree: upstream's files, then woven, generated and added ones.

    Later ones replace earlier ones of the same path.
    """
    contents: Contents = {
        path: Copied(release.root / path, f"upstream {release.sha256}")
        for path in release.files()
    }
    contents |= {path: Text(source.encode()) for path, source in woven.items()}
    contents |= {path: Text(data) for path, data in generated.items()}
    contents |= {path: Added(file) for path, file in added_files(checkout).items()}
    return contents
