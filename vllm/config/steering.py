# SPDX-License-Identifier: Apache-2.0
"""Configuration of steering."""

from pydantic import Field

from vllm.config.utils import config

MAX_DYNAMIC = 4
"""Requests that consumers may steer at a time, by default."""


@config
class SteeringConfig:
    """Configuration of steering."""

    enabled: bool = False
    """Whether hidden states can be steered."""
    max_configs: int = Field(default=4, gt=0)
    """Maximum number of different steering configurations in a batch. A request that
    would exceed it waits."""
    max_operations: int = Field(default=8, gt=0)
    """Maximum number of operations on one token at one hook point, separately for
    global operations and those of a request. Operations that are limited to positions
    count together where their positions may overlap."""
    bank_mib: int = Field(default=256, ge=0)
    """Device memory for the vectors of operations, in MiB, counted with the model's.
    A request whose vectors find no room there waits."""
    hooks: bool = False
    """Whether requests can have hook functions."""
    remote_code: bool = False
    """Whether such functions may come as code over HTTP."""
    max_dynamic: int = Field(default=MAX_DYNAMIC, ge=0)
    """Maximum number of requests that consumers steer by other vectors at a time."""
    modules: dict[str, str] = Field(default_factory=dict)
    """Named sets of steering vectors: name -> file."""

    @property
    def max_steering_configs(self) -> int:
        """`max_configs` under the name of its option."""
        return self.max_configs

    @property
    def bank_bytes(self) -> int:
        """`bank_mib`, in bytes."""
        return self.bank_mib << 20

    @property
    def num_rows(self) -> int:
        """Rows of each table: none, global prefill, global decode, and two per slot."""
        return 3 + 2 * self.max_configs

    def compute_hash(self) -> str:
        """Hash of what changes the compiled graph: the additions and table sizes."""
        from vllm.config.utils import hash_factors

        if not self.enabled:
            return hash_factors({"steering": 0})
        from vllm.model_executor.layers.residual.cache_key import form

        return hash_factors({"steering": self.num_rows, "form": form()})
