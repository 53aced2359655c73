# SPDX-License-Identifier: Apache-2.0
"""interp-engine's `EngineAPI` on a Clearbox engine, and its server's routes.

The interface is that of interp-engine 1.14, `api.py` and `server/schemas.py`.
"""
