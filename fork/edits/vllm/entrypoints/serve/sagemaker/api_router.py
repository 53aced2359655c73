# SPDX-License-Identifier: Apache-2.0
"""Large bodies of `/invocations` do not hold the event loop."""

from fork.language import add_import, replace

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import adapter_header",
        why="Puts the adapter of the header into the body.",
    ),
    replace(
        scope="_attach_router.invocations",
        anchor='sagemaker_standards.inject_adapter_id(adapter_path="model")',
        by="adapter_header.bounded(\n"
        '    sagemaker_standards.inject_adapter_id(adapter_path="model"),\n'
        '    "X-Amzn-SageMaker-Adapter-Identifier",\n'
        ")",
        why="The decorator serializes the whole body again, as text and as JSON.",
    ),
]
