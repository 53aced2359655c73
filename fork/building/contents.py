# SPDX-License-Identifier: Apache-2.0
"""What a built tree holds: for each path, where its content comes from."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fork.paths import Checkout
from fork.upstream.release import Release
from fork.weaving.faults import Fault

WEAVE_AT_RUN_TIME = "vllm/model_executor/residual_weave"
"""Where the weave of decoder layers is when it is installed."""


@dataclass(frozen=True, slots=True)
class Original:
    """An upstream file, as it is."""

    path: Path
    release: str
    """Hash of the wheel, which stands for the content."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        return f"upstream {self.release}"


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
    """A file of the fork, linked to."""

    path: Path

    @property
    def fingerprint(self) -> str:
        """Changes when the link does; the content behind it is live."""
        return f"link {self.path}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A library of the fork, compiled from its sources."""

    path: Path
    digest: str
    """Hash of all that it is made from."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        return f"compiled {self.digest}"


Content = Original | Text | Added | Compiled
Contents = dict[str, Content]


def added_files(checkout: Checkout) -> dict[str, Path]:
    """The files the fork adds, by their path in the tree.

    The weave of decoder layers is among them: layers whose class is in no release
    are woven when their model is loaded. So are the packages beside `vllm`.
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
    """A fault for each added file that upstream has too: the fork only adds files."""
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
    """The contents of the tree: upstream, woven and generated files over it, ours."""
    contents: Contents = {
        path: Original(release.root / path, release.sha256) for path in release.files()
    }
    contents |= {path: Text(source.encode()) for path, source in woven.items()}
    contents |= {path: Text(data) for path, data in generated.items()}
    contents |= {path: Added(file) for path, file in added_files(checkout).items()}
    return contents
