# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.steering.plan import PackedVectors, SteeringTiers, pack
from vllm.v1.steering.vector_cache import (
    SMALLEST,
    ReceivedVectors,
    SentVectors,
)

MOST = 3 * SMALLEST


def packed(number: int) -> PackedVectors | None:
    """One of several sets of vectors: small, large, and too large to remember."""
    size = (SMALLEST // 8, SMALLEST // 4, SMALLEST // 3, MOST)[number % 4]
    vector = np.full(size, number + 1, dtype=np.float32)
    return pack({(0, "post_block"): vector}) if number else None


def request(tiers: SteeringTiers | None, client: int = 0) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=3)
    params._steering = tiers
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=client,
    )


class Connections:
    """Front ends and engines, and the messages between them."""

    def __init__(self) -> None:
        self.sent = [SentVectors(MOST) for _ in range(2)]
        self.received = [ReceivedVectors(MOST) for _ in range(2)]
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def send(
        self, tiers: SteeringTiers | None, client: int = 0, engine: int = 0
    ) -> tuple[int, SteeringTiers | None]:
        """Send a request; returns the bytes sent and the request received."""
        whole, sent = request(tiers, client), self.sent[client]
        message = sent.encoded(whole, self._encoder, engine)
        assert whole.sampling_params is not None
        assert whole.sampling_params._steering is tiers, "the front end's was changed"
        found = self._decoder.decode(message)
        self.received[engine].complete(found)
        return sum(map(len, message)), found.sampling_params._steering


configurations = st.builds(
    SteeringTiers,
    *[st.integers(0, 11).map(packed) for _ in range(3)],
)


@given(
    st.lists(
        st.tuples(st.none() | configurations, st.integers(0, 1), st.integers(0, 1)),
        max_size=25,
    )
)
def test_an_engine_is_given_what_the_front_end_was(messages: list) -> None:
    connections = Connections()
    for tiers, client, engine in messages:
        _, given_to_it = connections.send(tiers, client, engine)
        assert given_to_it == tiers
        for of_client in connections.received[engine]._passed.values():
            assert of_client._num_bytes <= MOST
            known = of_client._known.values()
            assert of_client._num_bytes == sum(len(p.data) for p in known)


def test_vectors_travel_once_and_small_ones_each_time() -> None:
    connections = Connections()
    large, small = SteeringTiers(base=packed(1)), SteeringTiers(base=packed(4))
    first, again = (connections.send(large)[0] for _ in range(2))
    assert again < first - SMALLEST
    assert connections.send(large, engine=1)[0] == first, "another engine has nothing"
    assert connections.send(large, client=1)[0] >= first, "nor has another client's"
    first, again = (connections.send(small)[0] for _ in range(2))
    assert first == again


class Failing:
    """An encoder that fails."""

    def encode(self, message: object) -> None:
        raise ValueError("a message that cannot be written")


def test_what_could_not_be_written_is_not_counted_as_sent() -> None:
    connections = Connections()
    tiers = SteeringTiers(base=packed(1))
    with pytest.raises(ValueError, match="cannot be written"):
        connections.sent[0].encoded(request(tiers), Failing(), 0)
    assert connections.send(tiers)[1] == tiers


def test_messages_of_other_kinds_go_as_they_are() -> None:
    other, encoder = ("a utility", 1), MsgpackEncoder()
    assert SentVectors().encoded(other, encoder, 0) == encoder.encode(other)
