# SPDX-License-Identifier: Apache-2.0
"""Named vectors where several API server processes share an engine: a front end's part.

A front end follows the owner's log of changes: it asks for what is new before it looks
a name up. So a module that was registered through one server is known to all of them
when the answer is there.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm.v1.steering.frontend.modules import Module, SteeringModules


class FollowedNames:
    """Keeps a front end's modules as the owner knows them. Event loop only."""

    def __init__(
        self, modules: SteeringModules, ask: Callable[..., Awaitable[Any]]
    ) -> None:
        """Know the modules that the server was started with.

        Args:
            modules: of the front end; changed here.
            ask: calls a method of the owner.

        """
        self._modules = modules
        self._ask = ask
        self._version = 0

    async def refresh(self) -> None:
        """Take over what was changed through any server until now."""
        version, changes = await self._ask("steering_names", self._version)
        if version <= self._version:
            return  # Another call was faster.
        self._version = version
        for name, module in changes.items():
            found = None
            if module is not None:
                found = msgspec.msgpack.decode(module, type=Module)
            self._modules.put(name, found)

    async def register(self, name: Any, module: Module, replace: bool) -> None:
        """Add a named set on every server.

        Raises:
            SteeringValidationError: the name is no name, or taken on one of them.

        """
        written = msgspec.msgpack.encode(module)
        await self._change(
            name, written, lambda: self._modules.check_free(name, replace)
        )

    async def unregister(self, name: Any) -> None:
        """Remove a named set on every server.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        await self._change(name, None, lambda: self._modules.check_known(name))

    async def _change(
        self, name: Any, module: bytes | None, check: Callable[[], None]
    ) -> None:
        """Change a name, checked against the last version of all names."""
        while True:
            await self.refresh()
            check()
            if await self._ask("change_steering_name", self._version, name, module):
                await self.refresh()
                return
