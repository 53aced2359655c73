# SPDX-License-Identifier: Apache-2.0
"""The forms of pictures that matplotlib writes."""

from pathlib import Path

from vllm.v1.residual.numbers import Fail


def check_form(path: Path, parameter: str, fail: Fail) -> None:
    """Check that matplotlib knows the form that a file's name ends in, if in any.

    Args:
        path: the picture.
        parameter: what names it.
        fail: makes the error.

    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise fail(
            f"{parameter}: {path.name!r} is no picture; it must end in .png or another "
            f"of {sorted(known)}",
            parameter,
            str(path),
        )
