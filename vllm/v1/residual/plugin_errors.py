# SPDX-License-Identifier: Apache-2.0
"""What the engine's thread catches where it calls a plug-in or a user's function."""

import signal


def is_interrupt(error: BaseException) -> bool:
    """Whether the user interrupts this process, and no plug-in raised the error.

    A server's processes handle SIGINT otherwise, so only code raises
    `KeyboardInterrupt` there. Anything else that is not an `Exception`, such as
    `SystemExit`, is an error of the plug-in and must not end the engine.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and usual
