# SPDX-License-Identifier: Apache-2.0
"""Fakes installed packages with plug-ins."""

from pathlib import Path


def install(
    folder: Path,
    name: str,
    source: str,
    group: str = "vllm.capture_consumers",
    **entries: str,
) -> None:
    """Write a module `name` to `folder`, with entry points `consumer="module:Class"`.

    `folder` must be on `sys.path`, and in `PYTHONPATH` for other processes.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    lines = [f"{entry} = {target}" for entry, target in entries.items()]
    text = "\n".join([f"[{group}]", *lines, ""])
    (info / "entry_points.txt").write_text(text)
    (folder / f"{name}.py").write_text(source)


HOOKS = '''
def scale(ctx, h, by=2.0):
    """Scales the stream, and keeps the rows that it was given."""
    ctx.saved.setdefault("rows", []).append(h.clone())
    return h * by


def fails(ctx, h):
    raise RuntimeError("it is meant to")
'''

MEAN = '''
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.selectors import parse_spec


class Mean(CaptureConsumer):
    """Returns the mean row of each key."""

    reads_client_spec = True
    required_sidecar_fields = frozenset({"positions"})

    def __init__(self, vllm_config, params):
        self.scale = params.get("scale", 1)

    def validate_client_spec(self, raw, ctx):
        return parse_spec(raw, ctx, "capture.mean")

    def on_capture(self, key, tensor, sidecar):
        assert len(sidecar["positions"]) == len(tensor)
        return tensor.mean(0) * self.scale
'''
