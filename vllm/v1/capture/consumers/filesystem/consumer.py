# SPDX-License-Identifier: Apache-2.0
"""`FilesystemConsumer`, which writes rows to files in one of three layouts."""

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.capture.consumers.filesystem.layouts import Layouts
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.sharded import FileShard
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS
from vllm.v1.capture.consumers.storage.codecs import parse_codec
from vllm.v1.capture.consumers.storage.files import path_part, places_of
from vllm.v1.capture.consumers.storage.sink import StorageSink
from vllm.v1.capture.errors import fail
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.plain_data import plain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class FilesystemConsumer(StorageSink):
    """Writes the rows of each request to files once it has ended.

    A `CaptureSink`. The result's payload is the list of paths of the `.bin` files,
    which are complete when the result is returned. For the formats see
    `docs/capture/files.md`.
    """

    reads_client_spec: ClassVar[bool] = True
    remembers_specs: ClassVar[bool] = False
    takes_readouts: ClassVar[bool] = True

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self._params = parsed = FilesystemParams.parse(params)
        layouts = Layouts(parsed, FileShard)
        super().__init__("filesystem", vllm_config, parsed, layouts)

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """As of `CaptureConsumer`."""
        FilesystemParams.parse(params)

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Parse a `FilesystemCaptureRequest`, or a dict with its fields.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        raw, where = plain(raw), f"capture.{self.instance_name or 'filesystem'}"
        extra = ("request_id", "tag", "layout", "codec", "readouts")
        spec = parse_spec(raw, ctx, where, extra)
        for name in ("request_id", "tag"):
            if raw.get(name) is not None:
                path_part(raw[name], f"{where}.{name}")
        layout = raw.get("layout")
        if layout is not None and layout not in LAYOUTS:
            raise fail(
                f"{where}.layout must be one of {list(LAYOUTS)}",
                f"{where}.layout",
                layout,
            )
        if raw.get("codec") is not None:
            parse_codec(raw["codec"], f"{where}.codec")
        return spec

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        """The paths that a request's rows are written to; see `PathLocks`."""
        return places_of(raw, request_id, num_samples, self._params.default_tag)
