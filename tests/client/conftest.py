# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.client._server import Handler


@pytest.fixture
def handler() -> type[Handler]:
    return type("Own", (Handler,), {"connections": set(), "more": threading.Event()})


@pytest.fixture
def url(handler: type[Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    handler.more.set()
    server.shutdown()
    server.server_close()
