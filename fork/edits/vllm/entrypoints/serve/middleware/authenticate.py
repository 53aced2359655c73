# SPDX-License-Identifier: Apache-2.0
"""Routes that need the steering key do not need the server's key too."""

from fork.language import add_import, first

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.steering.authority import "
        "has_own_authority, needs_server_key",
        why="Has the list of these routes.",
    ),
    first(
        scope="AuthenticationMiddleware.__call__",
        insert="""
if has_own_authority(scope):
    return self.app(scope, receive, send)
if needs_server_key(scope) and not self.verify_token(Headers(scope=scope)):
    response = JSONResponse(content={"error": "Unauthorized"}, status_code=401)
    return response(scope, receive, send)
""",
        why="A client sends a single key, which these routes check themselves. Other "
        "routes that may capture or steer need the server's key.",
    ),
]
