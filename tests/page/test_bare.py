# SPDX-License-Identifier: Apache-2.0
"""The page of a server without any of the features."""

from pathlib import Path

import pytest

from tests.page.test_page import PROMPT, show
from tests.support.browser import opened
from tests.support.models import TOKENIZER
from tests.support.server import Server

pytestmark = [pytest.mark.page, pytest.mark.e2e, pytest.mark.slow]


def test_what_a_server_lacks_is_said_with_the_flag(tmp_path: Path) -> None:
    # Beside the model the server has its log.
    (tmp_path / "model").symlink_to(TOKENIZER)
    server = Server(tmp_path / "model", "--enable-lens-page", "--enforce-eager")
    try:
        with opened() as tab:
            tab.goto(server.url + "/lens/")
            tab.wait_for_selector("textarea")
            for view, flag in {
                "lens": "--enable-readouts",
                "attention": "--enable-readouts",
                "steer": "--enable-steering",
                "patch": "--enable-patching",
                "features": "--enable-readouts",
            }.items():
                show(tab, view=view, prompt=PROMPT)
                tab.wait_for_selector(f".needs >> text={flag}")
            assert tab.errors == []
    finally:
        server.close()
