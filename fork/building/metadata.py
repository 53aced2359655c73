# SPDX-License-Identifier: Apache-2.0
"""The distribution's metadata: upstream's, with the fork's name and additions."""

import configparser
import io
import re
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

from fork.paths import Checkout
from fork.upstream.release import Release

NAME = "vllm"
ENTRY_POINTS = {
    "vllm.capture_consumers": {
        "activation_capture": "vllm.interop.activation_capture.consumer:"
        "ActivationFilesConsumer",
        "arrow": "vllm.v1.capture.consumers.arrow:ArrowConsumer",
        "filesystem": "vllm.v1.capture.consumers.filesystem:FilesystemConsumer",
        "inline": "vllm.v1.capture.consumers.inline:InlineConsumer",
        "logging": "vllm.v1.capture.consumers.logging:LoggingConsumer",
        "memory": "vllm.v1.capture.consumers.memory:MemoryConsumer",
        "patch_source": "vllm.v1.capture.consumers.memory.patch_source:"
        "PatchSourceConsumer",
        "vllm_lens": "vllm.interop.vllm_lens.consumer:LensConsumer",
    },
    "vllm.steering_forms": {
        "reference_fork": "vllm.interop.reference_fork.form:ReferenceForkForm",
    },
    "inspect_ai": {"clearbox": "vllm.interop.inspect_ai.registry"},
}
EXTRAS = {"ray": ("ray[data]>=2.55",)}
"""Requirements of the fork's own extras: `ray` is for `vllm capture --ray`."""
# PyPI has CUDA builds of these, which break `import transformers` with a CPU torch.
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
_EXTRA = re.compile(
    r"""^(?:(?P<rest>.*?)\s+and\s+)?extra\s*==\s*['"](?P<name>[^'"]+)"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The metadata of the installed distribution."""

    version: str
    summary: str
    requires_python: str
    requires: tuple[str, ...]
    """Requirements as in `Requires-Dist`, extras included."""
    extras: tuple[str, ...]
    entry_points: dict[str, dict[str, str]]

    def install_requires(self) -> list[str]:
        """Requirements outside extras."""
        return [item for item in self.requires if _extra_of(item) is None]

    def extras_require(self) -> dict[str, list[str]]:
        """Requirements by extra."""
        table: dict[str, list[str]] = {extra: [] for extra in self.extras}
        for item in self.requires:
            extra = _extra_of(item)
            if extra is not None:
                table.setdefault(extra, []).append(_without_extra(item))
        return table


def fork_metadata(
    checkout: Checkout, release: Release, device: str, version: str
) -> Metadata:
    """Upstream's metadata with the fork's version, requirements and entry points."""
    upstream = message_from_string((release.dist_info / "METADATA").read_text())
    requires = [*upstream.get_all("Requires-Dist", []), *_own_requirements(checkout)]
    requires += [
        f'{item}; extra == "{extra}"' for extra, own in EXTRAS.items() for item in own
    ]
    if device == "cpu":
        requires = [_for_cpu(item) for item in requires if not _is_cuda_only(item)]
    return Metadata(
        version=version,
        summary=_summary(upstream),
        requires_python=upstream["Requires-Python"],
        requires=tuple(requires),
        extras=(*upstream.get_all("Provides-Extra", []), *EXTRAS),
        entry_points=_entry_points(release.dist_info / "entry_points.txt")
        | ENTRY_POINTS,
    )


def dist_info_files(
    metadata: Metadata, release: Release, checkout: Checkout
) -> dict[str, bytes]:
    """The metadata folder, which makes a tree on the path a complete distribution."""
    folder = f"{NAME}-{metadata.version}.dist-info"
    lines = ["Metadata-Version: 2.4", f"Name: {NAME}", f"Version: {metadata.version}"]
    lines += [f"Summary: {metadata.summary}", "License-Expression: Apache-2.0"]
    lines += [f"Requires-Python: {metadata.requires_python}"]
    lines += [f"Requires-Dist: {item}" for item in metadata.requires]
    lines += [f"Provides-Extra: {extra}" for extra in metadata.extras]
    files = {
        f"{folder}/METADATA": ("\n".join(lines) + "\n").encode(),
        f"{folder}/entry_points.txt": _render(metadata.entry_points).encode(),
    }
    for name, path in license_files(release, checkout).items():
        files[f"{folder}/licenses/{name}"] = path.read_bytes()
    return files


def license_files(release: Release, checkout: Checkout) -> dict[str, Path]:
    """Upstream's licence files and ours, by path in the metadata's licence folder."""
    upstream = release.dist_info / "licenses"
    files = {
        f"upstream/{path.relative_to(upstream).as_posix()}": path
        for path in sorted(upstream.rglob("*"))
        if path.is_file()
    }
    if checkout.license.exists():
        files["LICENSE"] = checkout.license
    return files


def version_module(version: str, upstream_version: str) -> bytes:
    """`vllm/_version.py`, with the same names as upstream's generated file."""
    numbers = ", ".join(part for part in upstream_version.split(".") if part.isdigit())
    local = version.partition("+")[2]
    return f'''\
"""Version of the fork; upstream's release number, then ours."""

__version__ = version = "{version}"
__version_tuple__ = version_tuple = ({numbers}, "{local}")
__commit_id__ = commit_id = None
'''.encode()


def _summary(upstream: Message) -> str:
    return f"{upstream['Summary']}, with activation capture and steering"


def _own_requirements(checkout: Checkout) -> list[str]:
    if not checkout.requirements.exists():
        return []
    lines = checkout.requirements.read_text().splitlines()
    stripped = (line.split("#")[0].strip() for line in lines)
    return [line for line in stripped if line and not line.startswith("-")]


def _is_cuda_only(requirement: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    return name is not None and name[0].lower() in _CUDA_ONLY


def _for_cpu(requirement: str) -> str:
    """Accept any build of the required torch version, not only one labelled `+cpu`."""
    return re.sub(r"^(torch==[\d.]+)\+cpu", r"\1", requirement)


def _extra_of(requirement: str) -> str | None:
    match = _EXTRA.match(requirement.partition(";")[2].strip())
    return match["name"] if match else None


def _without_extra(requirement: str) -> str:
    name, _, marker = requirement.partition(";")
    match = _EXTRA.match(marker.strip())
    assert match is not None, "only requirements of an extra come here"
    rest = match["rest"]
    return f"{name.strip()}; {rest}" if rest else name.strip()


def _entry_points(path: Path) -> dict[str, dict[str, str]]:
    parser = _parser()
    parser.read_string(path.read_text() if path.exists() else "")
    return {group: dict(parser[group]) for group in parser.sections()}


def _render(entry_points: dict[str, dict[str, str]]) -> str:
    parser = _parser()
    parser.read_dict(entry_points)
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def _parser() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keep case
    return parser
