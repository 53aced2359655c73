# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace

import pytest

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.grpc_refusal import OPTIONS, refuse_grpc


@pytest.mark.parametrize("attribute", OPTIONS)
def test_grpc_is_refused_with_what_its_messages_cannot_carry(attribute: str) -> None:
    args = Namespace(grpc=True, model_tag=None, **{attribute: ["logging"]})
    with pytest.raises(ValueError, match=f"{OPTIONS[attribute]}: the gRPC server"):
        ServeSubcommand.cmd(args)


def test_grpc_without_our_features_is_upstreams() -> None:
    refuse_grpc(Namespace(grpc=True, model_tag=None, enable_steering=False))
