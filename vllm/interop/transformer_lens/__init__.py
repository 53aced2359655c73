# SPDX-License-Identifier: Apache-2.0
"""Drivers that run TransformerLens 4 on an `LLM` and on a server.

`boot(llm)` and `boot_server(url)` return a `RemoteBridge`: `run_with_cache`,
`run_with_hooks` with `intervene=`, `forward` and `generate` work on any model that is
served here. The protocol is that of TransformerLens 4.3,
`model_bridge/driver_protocol.py`.
"""

from vllm.interop.transformer_lens.boot import boot, boot_server
from vllm.interop.transformer_lens.engine import ENGINE, EngineDriver
from vllm.interop.transformer_lens.server import FLAGS, ServerDriver

__all__ = ["ENGINE", "FLAGS", "EngineDriver", "ServerDriver", "boot", "boot_server"]
