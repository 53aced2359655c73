# SPDX-License-Identifier: Apache-2.0
"""The base of storage consumers whose requests choose what is captured, and where."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.capture.consumers.storage.files import path_part
from vllm.v1.capture.consumers.storage.params import StorageParams
from vllm.v1.capture.consumers.storage.sink import StorageSink
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.plain_data import plain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class FilesConsumer(StorageSink):
    """Writes what a request's spec selects to a place with its tag and name.

    A spec has `hooks`, `positions`, `readouts`, `tag` and `request_id`, of which
    `hooks` or `readouts` is required.
    """

    reads_client_spec: ClassVar[bool] = True
    takes_readouts: ClassVar[bool] = True
    params_class: ClassVar[type[StorageParams]]
    more_keys: ClassVar[tuple[str, ...]] = ()
    """Further keys of a spec."""

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self._params: Any = self.params_class.parse(params)
        super().__init__(self._params.kind, vllm_config, self._params)

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """As of `CaptureConsumer`."""
        cls.params_class.parse(params)

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Parse a spec, an object or one with these attributes.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        where = f"capture.{self.instance_name or self.params_class.kind}"
        raw = plain(raw)
        keys = ("request_id", "tag", "readouts", *self.more_keys)
        spec = parse_spec(raw, ctx, where, keys)
        self._check(raw, spec, ctx, where)
        for name in ("request_id", "tag"):
            if raw.get(name) is not None:
                path_part(raw[name], f"{where}.{name}")
        return spec

    @abstractmethod
    def _check(
        self, raw: dict[str, Any], spec: CaptureSpec, ctx: CaptureContext, where: str
    ) -> None:
        """Check what only this consumer reads or refuses."""
