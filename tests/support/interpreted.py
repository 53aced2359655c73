# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in: the V2 model runner on a CPU, under Triton's interpreter.

python -m pytest -p tests.support.interpreted tests/v1/capture/engine
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

assert "vllm" not in sys.modules, "the plug-in must come before vllm is imported"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends  # noqa: E402


class _Driver:
    """A driver that reports to be available; the interpreter needs nothing else."""

    @staticmethod
    def is_active() -> bool:
        return True


def _register() -> None:
    backend: Any = SimpleNamespace(driver=_Driver, compiler=None)
    backends["cpu"] = backend


_register()
