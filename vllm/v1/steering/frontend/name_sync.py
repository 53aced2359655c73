# SPDX-License-Identifier: Apache-2.0
"""Keeps a front end's module names in step with other API server processes.

A front end reads the owner's log of changes before it looks a name up. So a module that
was registered through one server is known to all of them once the registration is
answered.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm.v1.steering.frontend.modules import Module, SteeringModules


class FollowedNames:
    """Applies the owner's log of changes to a front end's modules. Event loop only."""

    def __init__(
        self, modules: SteeringModules, ask: Callable[..., Awaitable[Any]]
    ) -> None:
        """Start with the modules that the server was started with.

        Args:
            modules: the front end's modules, which are changed here.
            ask: calls a method of the owner by name.

        """
        self._modules = modules
        self._ask = ask
        self._version = 0

    async def refresh(self) -> None:
        """Apply every change that was made through any server until now."""
        version, changes = await self._ask("steering_names", self._version)
        if version <= self._version:
            return  # A concurrent call has applied the changes.
        self._version = version
        for name, module in changes.items():
            found = None
            if module is not None:
                found = msgspec.msgpack.decode(module, type=Module)
            self._modules.put(name, found)

    async def register(self, name: Any, module: Module, replace: bool) -> None:
        """Register a module on every server.

        Raises:
            SteeringValidationError: the name is invalid or in use.

        """
        written = msgspec.msgpack.encode(module)
        await self._change(
            name, written, lambda: self._modules.check_free(name, replace)
        )

    async def unregister(self, name: Any) -> None:
        """Unregister a module on every server.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        await self._change(name, None, lambda: self._modules.check_known(name))

    async def _change(
        self, name: Any, module: bytes | None, check: Callable[[], None]
    ) -> None:
        """Change a name, after a check against the latest version of all names."""
        while True:
            await self.refresh()
            check()
            if await self._ask("change_steering_name", self._version, name, module):
                await self.refresh()
                return
