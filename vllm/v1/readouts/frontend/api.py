# SPDX-License-Identifier: Apache-2.0
"""Methods of `LLM` and `AsyncLLM` that manage readout modules."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.readouts.core.engine import added_counters
from vllm.v1.readouts.engine_args import described_file
from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.modules import check_place
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.engine_call import call_engine, call_engines
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.plain_data import MAX_NAME, is_name
from vllm.v1.residual.tap import HOOK_NAMES, Tap, resolve_tap

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


def register(
    self: "LLM",
    name: str,
    path: str,
    layer: int | None = None,
    hook: str | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Register a probe, a translator or an SAE under a name.

    Args:
        self: the engine.
        name: the name by which readouts refer to the module.
        path: a file or folder that the front end and the workers can read.
        layer: 0-based layer of an SAE, in place of the one that its file states.
        hook: hook point of that layer, `post_block` by default, or an address.
        replace: whether to replace a module of the same name. Requests that have
            started keep it; those that wait get an error in place of its results.

    Returns:
        The module's description, see `ModuleInfo.describe`.

    Raises:
        ReadoutValidationError: an argument or the file is invalid; nothing changed.

    """
    engine = self.llm_engine
    info = _checked(engine, name, path, _tap(layer, hook), replace)
    call_engine(
        engine.engine_core,
        "load_readout_module",
        name,
        path,
        info.tap,
        info.fingerprint,
    )
    _front_end(engine).modules.put(name, info)
    return info.describe()


def unregister(self: "LLM", name: str) -> None:
    """Unregister a module. Requests that have already started keep it.

    Raises:
        ReadoutValidationError: no module has this name.

    """
    engine = self.llm_engine
    _known(engine, name)
    call_engine(engine.engine_core, "unload_readout_module", name)
    _front_end(engine).modules.put(name, None)


def get(self: "LLM") -> dict[str, Any]:
    """The registered modules, counters by kind of readout, and limits."""
    engine = self.llm_engine
    return _described(engine, call_engine(engine.engine_core, "readout_status"))


async def async_register(
    self: "AsyncLLM",
    name: str,
    path: str,
    layer: int | None = None,
    hook: str | None = None,
    replace: bool = False,
    kind: str = "",
) -> dict[str, Any]:
    """As `register`; `kind` may restrict the module to `sae` or `module`."""
    front_end = await _refreshed(self)
    # On a thread: a file may hold gigabytes.
    info = await asyncio.to_thread(
        _checked, self, name, path, _tap(layer, hook), replace, kind
    )

    async def load() -> None:
        with _refused():
            await self.engine_core.call_utility_async(
                "load_readout_module", name, path, info.tap, info.fingerprint
            )

    if front_end.followed is None:
        await load()
        front_end.modules.put(name, info)
    else:
        before = _having(self).get(name)
        check = partial(_check_free, self, name, replace)
        await front_end.followed.load(name, info, before, check, load)
    return info.describe()


async def async_unregister(self: "AsyncLLM", name: str, kind: str = "") -> None:
    """As `unregister`; `kind` may restrict the module to `sae` or `module`."""
    front_end = await _refreshed(self)
    _known(self, name, kind)
    with _refused():
        await self.engine_core.call_utility_async("unload_readout_module", name)
    if front_end.followed is None:
        front_end.modules.put(name, None)
    else:
        await front_end.followed.unregister(name, lambda: None)


async def async_get(self: "AsyncLLM") -> dict[str, Any]:
    """As `get`; counters are those of all engines."""
    await _refreshed(self)
    counters = await call_engines(self.engine_core, "readout_status")
    return _described(self, added_counters(counters))


@contextmanager
def _refused() -> Iterator[None]:
    """Convert a refusal by the engine core, whose text alone crosses processes."""
    try:
        yield
    except Exception as error:
        text = str(error).partition("_readout_module method failed: ")[2]
        if not text.startswith("name: "):
            raise
        raise fail(text.partition(" (parameter=")[0], "name", None) from error


def _front_end(engine: Any) -> Any:
    """The object in which the features of a front end meet."""
    return engine.input_processor.residual


async def _refreshed(engine: "AsyncLLM") -> Any:
    """As `_front_end`, once it knows what other API servers have registered."""
    front_end = _front_end(engine)
    if front_end.followed is not None:
        await front_end.followed.refresh()
    return front_end


def _having(engine: Any) -> Mapping[str, ModuleInfo]:
    """The modules of an engine that reads out or steers.

    Raises:
        ReadoutValidationError: it does neither.

    """
    known: KnownModules | None = _front_end(engine).modules
    if known is None:
        raise fail(
            "this server has neither readouts nor steering; start it with "
            "--enable-readouts or --enable-steering, or LLM(enable_readouts=True) "
            "offline",
            "name",
            None,
        )
    return known.all


def _tap(layer: Any, hook: Any) -> Tap | None:
    """The place that is given for an SAE; None if none is."""
    if layer is None and hook is None:
        return None
    hook = "post_block" if hook is None else hook
    index = layer_index(layer)
    if layer is not None and (index is None or index < 0):
        raise fail("layer must be a 0-based index", "layer", layer)
    tap = resolve_tap(index, hook) if isinstance(hook, str) else None
    if tap is None:
        raise fail(
            f"hook must be one of {list(HOOK_NAMES)}, or an address such as "
            "post_block.3 without another layer",
            "hook",
            hook,
        )
    if tap[0] is None:
        raise fail("layer is needed with hook", "layer", layer)
    return tap[0], tap[1]


def _checked(
    engine: Any,
    name: Any,
    path: Any,
    tap: Tap | None,
    replace: bool,
    kind: str = "",
) -> ModuleInfo:
    _having(engine)
    if not is_name(name):
        raise fail(f"name must be text of 1 to {MAX_NAME} characters", "name", name)
    _check_free(engine, name, replace)
    if not isinstance(path, str) or not path:
        raise fail("path must name a file or folder on the server", "path", path)
    model = engine.vllm_config.model_config
    info = ModuleInfo(**described_file(name, path, model, kind, tap))
    if tap is not None and info.kind != "sae":
        raise fail(
            f"layer: those of a {info.kind} are in its file, and a readout may give "
            "others; leave out layer and hook",
            "layer",
            tap[0],
        )
    check_place(info, engine.vllm_config.capture_config.hook_points or {})
    return info


def _check_free(engine: Any, name: Any, replace: bool) -> None:
    if name in _having(engine) and not replace:
        raise fail(
            f'name: a module {name!r} exists; unregister it first, or set "replace": '
            "true",
            "name",
            name,
        )


def _known(engine: Any, name: Any, kind: str = "") -> None:
    having = {
        known: info
        for known, info in _having(engine).items()
        if not kind or (info.kind == "sae") == (kind == "sae")
    }
    if not isinstance(name, str) or name not in having:
        what = {"": "module", "sae": "SAE", "module": "probe or translator"}[kind]
        raise fail(
            f"name: there is no {what} {shown(name)}; there are {sorted(having)}",
            "name",
            name,
        )


def _described(engine: Any, counters: dict[str, Any]) -> dict[str, Any]:
    config = engine.vllm_config.readout_config
    known = _front_end(engine).modules
    modules = {} if known is None else known.all
    return {
        "enabled": config.enabled,
        "modules": {name: one.describe() for name, one in modules.items()},
        "counters": counters,
        "limits": {"max_top_k": config.max_top_k},
    }
