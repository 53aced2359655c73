# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' `RemoteBridge` on an engine or a server."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.interop.transformer_lens.engine import ENGINE, EngineDriver
from vllm.interop.transformer_lens.server import ServerDriver

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def boot(model: "LLM | str", **engine: Any) -> Any:
    """Create a TransformerLens `RemoteBridge` on an engine.

    Args:
        model: an `LLM` started with `ENGINE`, or the name or path of a model to start;
            then `close` stops the engine.
        engine: further arguments of `LLM`, if `model` is a name.

    Raises:
        ValueError: the given engine lacks a feature that the driver needs.

    """
    from vllm.entrypoints.llm import LLM

    owned = isinstance(model, str)
    llm: LLM = LLM(model, **ENGINE | engine) if owned else model  # type: ignore[arg-type, assignment]
    config = llm.llm_engine.vllm_config.model_config
    return _bridge(
        config.hf_config,
        config.model,
        config.dtype,
        lambda bridge_config, architecture: EngineDriver(
            llm, bridge_config, architecture, owned=owned
        ),
    )


def boot_server(
    url: str,
    *,
    checkpoint: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
) -> Any:
    """Create a TransformerLens `RemoteBridge` on a server; needs `clearbox-client`.

    Args:
        url: the address of a server started with
            `vllm.interop.transformer_lens.FLAGS`.
        checkpoint: name or path of the model's configuration and tokenizer; by default
            the path that the server reports.
        api_key: the server's key, if it has one.
        timeout: most seconds for a response.

    Raises:
        ValueError: the server lacks a feature that the driver needs.
        clearbox_client.ClearboxError: the server does not answer, or refuses the key.

    """
    from clearbox_client import Client
    from transformers import AutoConfig, AutoTokenizer

    client = Client(url, api_key=api_key, timeout=timeout)
    name = checkpoint or client.models()[0]["root"]
    config = AutoConfig.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    return _bridge(
        config,
        name,
        config.dtype,
        lambda bridge_config, architecture: ServerDriver(
            client, bridge_config, architecture, tokenizer
        ),
    )


def _bridge(
    config: Any, name: str, dtype: Any, driver_of: Callable[[Any, str], Any]
) -> Any:
    from transformer_lens.factories.architecture_adapter_factory import (
        ArchitectureAdapterFactory,
    )
    from transformer_lens.model_bridge.sources._bridge_builder import (
        build_bridge_config_from_hf,
        configure_tokenizer,
    )

    from vllm.interop.transformer_lens.bridge import ServedBridge

    architecture: str = (config.architectures or [""])[0]
    bridge_config = build_bridge_config_from_hf(config, architecture, name, dtype)
    driver = driver_of(bridge_config, architecture)
    driver.tokenizer = configure_tokenizer(driver.tokenizer, bridge_config)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    return ServedBridge(adapter, driver.tokenizer, driver)
