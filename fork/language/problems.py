# SPDX-License-Identifier: Apache-2.0
"""The reasons why an edit may not fit a module, each rendered as a sentence."""

from dataclasses import dataclass


def _in(scope: str) -> str:
    return f'in scope "{scope}"' if scope else "at the module level"


@dataclass(frozen=True, slots=True)
class MissingScope:
    """No class or function has this dotted path."""

    scope: str
    elsewhere: tuple[str, ...] = ()
    """Definitions with the same last name, where the scope may have moved."""

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        hint = ""
        if self.elsewhere:
            hint = " (moved? the name is defined as " + ", ".join(self.elsewhere) + ")"
        return f'needs scope "{self.scope}", which {module} does not have{hint}'


@dataclass(frozen=True, slots=True)
class MissingAnchor:
    """The anchor matches nowhere in the module."""

    scope: str

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        return f"matches nothing {_in(self.scope)} of {module}"


@dataclass(frozen=True, slots=True)
class Moved:
    """The anchor matches, but in other scopes than the one the edit names."""

    scope: str
    found_in: tuple[str, ...]

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        places = ", ".join(_in(scope) for scope in self.found_in)
        return f"matches nothing {_in(self.scope)} of {module}; it is now {places}"


@dataclass(frozen=True, slots=True)
class WrongCount:
    """The anchor matches more or fewer places than the edit expects."""

    scope: str
    found: int
    expected: int

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        return (
            f"matches {self.found} places {_in(self.scope)}, expected {self.expected},"
        )


@dataclass(frozen=True, slots=True)
class AlreadyApplied:
    """The module already has what the edit would add."""

    scope: str

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        return f"is already applied {_in(self.scope)} of {module}"


@dataclass(frozen=True, slots=True)
class Unfit:
    """The place exists but cannot take this edit."""

    reason: str

    def text(self, module: str) -> str:
        """What follows the edit in the sentence."""
        return f"cannot be applied to {module}: {self.reason}"


Finding = MissingScope | MissingAnchor | Moved | WrongCount | AlreadyApplied | Unfit


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding with its context: edit, module and release."""

    edit_file: str
    line: int
    operation: str
    subject: str
    module: str
    version: str
    finding: Finding

    @property
    def kind(self) -> str:
        """Name of the finding's class, for machine-readable reports."""
        return type(self.finding).__name__

    def sentence(self) -> str:
        """One sentence naming edit file, operation, anchor, module and version."""
        return (
            f"{self.edit_file}:{self.line}: {self.operation} `{self.subject}` "
            f"{self.finding.text(self.module)} (vLLM {self.version})."
        )
