# SPDX-License-Identifier: Apache-2.0
"""What matplotlib needs to write a picture."""

from pathlib import Path

from vllm.v1.residual.numbers import Fail


def check_picture(path: Path | None, parameter: str, instead: str, fail: Fail) -> None:
    """Check that a picture can be written, before an engine is started.

    Args:
        path: the picture; None if it is only shown.
        parameter: what names it.
        instead: what to do without matplotlib.
        fail: makes the error, for a missing folder, without matplotlib, or for a form
            that it does not know.

    """
    if path is not None and not path.absolute().parent.is_dir():
        folder = str(path.parent)
        message = f"{parameter}: there is no folder {folder!r}; create it first"
        raise fail(message, parameter, folder)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise fail(
            f"{parameter}: pictures need matplotlib: pip install matplotlib; {instead}",
            parameter,
            None if path is None else str(path),
        ) from None
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix and path.suffix[1:].lower() not in known:
        raise fail(
            f"{parameter}: {path.name!r} is no picture; it must end in .png or another "
            f"of {sorted(known)}",
            parameter,
            str(path),
        )
