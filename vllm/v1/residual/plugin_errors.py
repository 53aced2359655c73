# SPDX-License-Identifier: Apache-2.0
"""What the engine catches where it calls a plug-in or a user's function."""

import signal

MOST_CHARACTERS = 1000
"""Longest message of an error that is passed on."""


def is_interrupt(error: BaseException) -> bool:
    """Whether the user interrupts this process, and no plug-in raised the error.

    A server's processes handle SIGINT otherwise, so only code raises
    `KeyboardInterrupt` there. Anything else that is not an `Exception`, such as
    `SystemExit`, is an error of the plug-in and must not end the engine.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and usual


def message_of(error: BaseException) -> str:
    """The message of any error, as text that every encoder takes.

    Never fails: `__str__` of an error may raise, and its text may hold lone surrogates,
    which no message between processes can carry. They are escaped.
    """
    try:
        # A subclass of `str` may define anything.
        text = str.__getitem__(str(error), slice(MOST_CHARACTERS))
    except BaseException as problem:  # `__str__` may raise anything.
        if is_interrupt(problem):
            raise
        text = "its text is not available"
    return text.encode(errors="backslashreplace").decode()


def described(error: BaseException) -> str:
    """Class and message of any error; never fails."""
    return f"{type(error).__name__}: {message_of(error)}"
