# SPDX-License-Identifier: Apache-2.0
"""Mounts the page `/lens`, static files that use only the public HTTP API."""

from argparse import Namespace
from pathlib import Path

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cache-Control": "no-cache",  # A browser asks whether a file has changed.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page(StaticFiles):
    """The files of the page, with headers that forbid all that they do not need."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file of the page."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def attach_router(app: FastAPI, args: Namespace) -> None:
    """Mount the page, if the server was started with `--enable-lens-page`.

    The files hold nothing of the server and need no key. The routes that they call do.
    """
    if args.enable_lens_page:
        # In a built tree the files are links into the checkout.
        page = Page(directory=STATIC, html=True, follow_symlink=True)
        app.mount("/lens", page, name="lens")
