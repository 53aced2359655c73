# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace
from typing import Any

import pytest

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.steering.authority import ENABLING
from vllm.entrypoints.serve.utils.serve_args import complete, refuse_grpc


@pytest.mark.parametrize("name", [*ENABLING, "enable_lens_page"])
def test_grpc_is_refused_with_what_its_messages_cannot_carry(name: str) -> None:
    args = Namespace(grpc=True, model_tag=None, **{name: ["logging"]})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: the gRPC"):
        ServeSubcommand.cmd(args)


def test_grpc_without_our_features_is_upstreams() -> None:
    refuse_grpc(Namespace(grpc=True, model_tag=None, enable_steering=False))


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ({"capture_consumers": ["inline", "memory:max_bytes=9"]}, 1),
        ({"capture_consumers": [{"name": "patch_source"}]}, 1),
        ({"enable_patching": True}, 1),
        ({"capture_consumers": ["inline", "memory_of_mine"]}, None),
        ({}, None),
        ({"enable_patching": True, "api_server_count": 2}, 2),
        ({"enable_patching": True, "headless": True}, None),
    ],
)
def test_where_rows_are_kept_there_is_one_api_server_by_default(
    given: dict[str, Any], servers: int | None
) -> None:
    usual = {"api_server_count": None, "headless": False, "data_parallel_size": 2}
    usual |= {"capture_consumers": None, "enable_patching": False}
    args = Namespace(**usual | given)
    complete(args)
    assert args.api_server_count == servers
