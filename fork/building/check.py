# SPDX-License-Identifier: Apache-2.0
"""Weaves a release as a trial and reports the result."""

from dataclasses import dataclass

from fork.architectures.accounting import architecture_faults
from fork.building.contents import added_files, shadowing_faults
from fork.errors import Fault
from fork.paths import Checkout
from fork.upstream.release import Release
from fork.weaving.edit_files import edit_paths
from fork.weaving.weaver import WovenFile, weave_release

TESTED = (
    "each edit's anchor matches as often as it says, each woven file compiles, each "
    "architecture leads to decoder layers or has a reason, and no added file shadows "
    "an upstream one; nothing was imported or run"
)


@dataclass(frozen=True, slots=True)
class FileReport:
    """The outcome for one file."""

    module: str
    what: str
    """`edits`, `decoder layers`, `added` or `architectures`."""
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome for a release."""

    version: str
    files: tuple[FileReport, ...]
    layer_files: int
    """Number of files that the decoder-layer weave changed."""
    woven: tuple[WovenFile, ...] = ()
    """All files that were woven."""

    @property
    def fits(self) -> bool:
        """Whether there are no faults."""
        return not any(file.faults for file in self.files)

    @property
    def summary(self) -> str:
        """What was tried, and the result, as a sentence."""
        failed = sum(bool(file.faults) for file in self.files)
        edits = sum(file.what == "edits" for file in self.files)
        verdict = "all fit" if self.fits else f"{failed} files do not fit"
        return (
            f"vLLM {self.version}: {verdict} ({edits} edit files; {self.layer_files} "
            f"files with decoder layers woven). Tested: {TESTED}."
        )

    def as_dict(self) -> dict[str, object]:
        """The report as JSON-serialisable data."""
        return {
            "upstream": self.version,
            "fits": self.fits,
            "tested": TESTED,
            "layer_files": self.layer_files,
            "files": [
                {
                    "module": file.module,
                    "what": file.what,
                    "fits": not file.faults,
                    "faults": [fault.as_dict() for fault in file.faults],
                }
                for file in self.files
            ],
        }


def check(checkout: Checkout, release: Release, jobs: int) -> Report:
    """Weave a release as a trial."""
    edits = set(edit_paths(checkout.edits))
    woven = weave_release(checkout, release, jobs)
    files = [
        FileReport(
            w.module, "edits" if w.module in edits else "decoder layers", w.faults
        )
        for w in woven
        if w.module in edits or w.faults
    ]
    shadowing = shadowing_faults(added_files(checkout), release)
    files += [FileReport(fault.module, "added", (fault,)) for fault in shadowing]
    unlisted = tuple(architecture_faults(release, woven))
    if unlisted:
        files.append(FileReport(unlisted[0].module, "architectures", unlisted))
    return Report(
        version=release.version,
        files=tuple(sorted(files, key=lambda file: file.module)),
        layer_files=sum(w.source is not None and w.module not in edits for w in woven),
        woven=tuple(woven),
    )
