# SPDX-License-Identifier: Apache-2.0
"""clearbox-client with a real server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clearbox_client import ClearboxError, Client

from tests.support.hf_reference import Reference, relative_error
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [20, 30, 40, 50, 60, 70]
CAPTURE = {"inline": {"hooks": {"post_block": [0, 2]}, "positions": "all"}}
FIELDS: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(capture_server: Server) -> Client:
    return Client(capture_server.url)


@pytest.fixture(scope="module")
def reference(capture_model: Path) -> Reference:
    return Reference(capture_model)


def test_rows_are_the_models_with_their_tokens(
    client: Client, reference: Reference
) -> None:
    reply = client.complete(PROMPT, capture=CAPTURE, tokens=True, **FIELDS)
    assert reply.prompt_token_ids == PROMPT and reply.token_ids is not None
    fed = [*PROMPT, *reply.token_ids][:-1]
    expected = reference.stream(fed)
    assert list(reply.rows) == [(0, "post_block"), (2, "post_block")]
    for tap, rows in reply.rows.items():
        assert rows.positions == list(range(10)) and rows.token_ids == fed
        assert rows.tokens is not None and len(rows.tokens) == 10
        assert relative_error(torch.from_numpy(rows.values), expected[tap]) < 1e-4
    assert reply.rows.stacked().shape == (2, 10, 64)
    assert "<svg" in reply._repr_html_()


def test_many_prompts_are_answered_in_order(client: Client) -> None:
    prompts: list[Any] = [PROMPT[:3], [{"role": "user", "content": "hi"}], PROMPT[:5]]
    replies = client.complete_many(prompts, concurrency=2, progress=False, **FIELDS)
    assert replies[0].prompt_token_ids == PROMPT[:3]
    assert replies[1].text == client.chat(prompts[1], **FIELDS).text
    assert replies[2].prompt_token_ids == PROMPT[:5]
    with pytest.raises(ClearboxError) as caught:
        client.complete_many([PROMPT, PROMPT], capture={"nobody": {}}, **FIELDS)
    assert caught.value.status == 400


def test_log_probabilities_are_the_models(client: Client, reference: Reference) -> None:
    found = client.logprobs(PROMPT)
    logits = reference.model(torch.tensor([PROMPT])).logits[0]
    logs = logits.detach().log_softmax(-1)
    wanted = [float(logs[at, token]) for at, token in enumerate(PROMPT[1:])]
    assert [text for text, _ in found] == client.token_texts(PROMPT)
    assert np.isnan(found[0][1])
    assert np.allclose([value for _, value in found[1:]], wanted, atol=1e-3)


def test_a_chat_carries_rows(client: Client) -> None:
    chat = [{"role": "user", "content": "a short story"}]
    reply = client.chat(chat, capture=CAPTURE, **FIELDS)
    assert len(reply.rows[0, "post_block"]) > 5
    assert "".join(c.text for c in client.stream(chat, **FIELDS)) == reply.text
