# SPDX-License-Identifier: Apache-2.0
"""Keeps a front end's module names in step with other API server processes.

A front end reads the owner's log of changes before it looks a name up. So a module that
was registered through one server is known to all of them once the registration is
answered.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm.v1.steering.errors import fail

RESERVED = b""
"""In place of a module that is being loaded: the name is taken, and not yet known."""


class FollowedNames:
    """Applies the owner's log of changes to a front end's modules. Event loop only."""

    def __init__(
        self,
        kind: str,
        form: Any,
        put: Callable[[str, Any], None],
        ask: Callable[..., Awaitable[Any]],
    ) -> None:
        """Start with the modules that the server was started with.

        Args:
            kind: of the modules, as the owner's logs are called.
            form: their class.
            put: adds or replaces a module of this front end; None removes it.
            ask: calls a method of the owner by name.

        """
        self._kind = kind
        self._form = form
        self._put = put
        self._ask = ask
        self._version = 0
        self._reserved: set[str] = set()

    async def refresh(self) -> None:
        """Apply every change that was made through any server until now."""
        version, changes = await self._ask("module_names", self._kind, self._version)
        if version <= self._version:
            return  # A concurrent call has applied the changes.
        self._version = version
        for name, module in changes.items():
            if module == RESERVED:
                self._reserved.add(name)
                continue
            self._reserved.discard(name)
            found = None
            if module is not None:
                found = msgspec.msgpack.decode(module, type=self._form)
            self._put(name, found)

    async def register(self, name: Any, module: Any, check: Callable[[], None]) -> None:
        """Register a module on every server; `check` refuses a name in use."""
        await self._change(name, msgspec.msgpack.encode(module), check)

    async def load(
        self,
        name: Any,
        module: Any,
        before: Any,
        check: Callable[[], None],
        load: Callable[[], Awaitable[Any]],
    ) -> None:
        """Register a module on every server once the workers have loaded it.

        Args:
            name: its name.
            module: the module.
            before: the one that it replaces; None if there is none.
            check: refuses a name in use.
            load: loads it in all workers; if it fails, nothing changes.

        """
        await self._change(name, RESERVED, check)
        try:
            await load()
        except BaseException:
            module = before
            raise
        finally:
            told = None if module is None else msgspec.msgpack.encode(module)
            await self._change(name, told)

    async def unregister(self, name: Any, check: Callable[[], None]) -> None:
        """Unregister a module on every server; `check` refuses an unknown name."""
        await self._change(name, None, check)

    async def _change(
        self,
        name: Any,
        module: bytes | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Change a name, after a check against the latest version of all names."""
        while True:
            await self.refresh()
            if check is not None:
                check()
                if name in self._reserved:
                    raise fail(
                        f"name: {name!r} is being registered through another server; "
                        "choose another name, or try again",
                        "name",
                        name,
                    )
            if await self._ask(
                "change_module_name", self._kind, self._version, name, module
            ):
                await self.refresh()
                return
