# SPDX-License-Identifier: Apache-2.0
"""A server in the place of an `LLM`, for sweeps and evaluations.

Without it a user of a model that is served must load it again, on GPUs of its own.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from clearbox_client import Client, Reply

from vllm import RequestOutput, SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

if TYPE_CHECKING:
    from vllm.v1.residual.model_identity import ModelIdentity

CONCURRENCY = 32
"""Requests at once."""
AS_IDS = "token_id:"


class ServerEngine:
    """What sweeps and evaluations use of an `LLM`, on a server with steering.

    An evaluation also needs readouts there, and `--max-logprobs -1`.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        """Connect to a server.

        Raises:
            clearbox_client.ClearboxError: the server does not answer, or refuses.

        """
        self.client = Client(url, api_key=api_key)
        (about, *_) = self.client.models()
        self._root = str(about["root"])
        self.model_config = SimpleNamespace(max_model_len=int(about["max_model_len"]))

    @property
    def identity(self) -> "ModelIdentity | None":
        """The model's identity, if its folder is on this machine."""
        from vllm.v1.residual.model_identity import identity_of_path

        return identity_of_path(self._root) if Path(self._root).is_dir() else None

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """As `LLM.generate` and `LLM.chat`.

        Raises:
            clearbox_client.ClearboxError: the server has refused a request.

        """
        each = repeat(params) if isinstance(params, SamplingParams) else params
        _ = self.client.model  # Asked once, not by each thread.
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._ask, prompts, each))

    chat = generate

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _ask(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        fields: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "n": params.n,
            "prompt_logprobs": params.prompt_logprobs,
            "steering_vectors": params.steering_vectors,
            "readouts": params.readouts,
        }
        if params.logprobs is not None:
            fields["return_tokens_as_token_ids"] = True
        if isinstance(prompt, list):
            if params.logprobs is not None:
                fields |= {"logprobs": True, "top_logprobs": params.logprobs}
            return _output(self.client.chat(prompt, **fields))
        asked = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        return _output(self.client.complete(asked, logprobs=params.logprobs, **fields))


def _output(reply: Reply) -> RequestOutput:
    choices = reply.raw["choices"]
    told = reply.raw.get("prompt_logprobs") or choices[0].get("prompt_logprobs")
    made = RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=reply.prompt_token_ids,
        prompt_logprobs=told and [entry and _by_id(entry) for entry in told],
        outputs=[
            CompletionOutput(
                index=number,
                text=text,
                token_ids=choice["token_ids"],
                cumulative_logprob=None,
                logprobs=_first(choice["logprobs"]),
                finish_reason=choice["finish_reason"],
            )
            for number, (choice, text) in enumerate(zip(choices, reply.texts))
        ],
        finished=True,
    )
    own: Any  # Has what is used of the engine's results.
    for choice, own in zip(made.outputs, reply.readouts_of):
        choice.readouts = own
    return made


def _by_id(entry: dict[str, Any]) -> dict[int, Logprob]:
    return {int(token): Logprob(one["logprob"]) for token, one in entry.items()}


def _first(told: dict[str, Any] | None) -> Any:
    """The distribution of the first generated token, as flat log-probabilities."""
    if told is None:
        return None
    if "content" in told:
        entries = told["content"][0]["top_logprobs"]
        found = {one["token"]: one["logprob"] for one in entries}
    else:
        found = told["top_logprobs"][0]
    return SimpleNamespace(
        token_ids=[int(token.removeprefix(AS_IDS)) for token in found],
        logprobs=list(found.values()),
    )
