# SPDX-License-Identifier: Apache-2.0
"""Fields of a wrong kind are refused at the door, or the engine core can read them.

A request that its decoder refuses would end the thread that receives requests, and with
it all later ones.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fork.request_fields import NAMES
from vllm import SamplingParams
from vllm.v1.residual.frontend.front_end import NO_FRONT_END
from vllm.v1.serial_utils import MsgpackEncoder

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2.5, float("nan"), 10**30, "no", "", b"x"),
    *([], (), set(), {}, [1], [None], {"a": 1}, {1: 2}, {"inline": {}}),
    *(np.float32(1), np.zeros(3), torch.zeros(3), object(), len),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_admitted_without_the_features_can_be_read(name: str) -> None:
    admitted = 0
    for value in VALUES:
        try:
            params = SamplingParams(**{name: value})
            NO_FRONT_END.admit("r", params, 5)
        except ValueError as error:
            assert name in str(error), error
            continue
        admitted += 1
        encoded = MsgpackEncoder().encode(params)[0]
        msgspec.msgpack.decode(encoded, type=SamplingParams)
    assert admitted, "the default is admitted"
