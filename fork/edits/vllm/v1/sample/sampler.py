# SPDX-License-Identifier: Apache-2.0
"""Sweeps ask for log-probabilities of tokens that they name, beside other requests."""

from fork.language import add_import, after

EDITS = [
    add_import(
        "from vllm.v1.worker.sampled_logprobs import beside_named",
        why="Joins the two kinds of log-probabilities of a batch.",
    ),
    after(
        scope="Sampler.forward",
        anchor="""
logprobs_tensors = self.gather_logprobs(
    raw_logprobs, num_logprobs, token_ids=sampled
)
""",
        insert="""
if logprob_token_ids_tensors is not None:
    named = sampling_metadata.logprob_token_ids
    logprob_token_ids_tensors = beside_named(
        logprobs_tensors, logprob_token_ids_tensors, named
    )
""",
        why="Requests that name no tokens would lose theirs to those of a sweep.",
    ),
]
