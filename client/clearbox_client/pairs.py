# SPDX-License-Identifier: Apache-2.0
"""The texts of a stream with their values."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from clearbox_client.errors import InputError, understood
from clearbox_client.replies import Chunk
from numpy.typing import NDArray


def paired(
    chunks: Iterable[Chunk], readout: str, array: str = "values"
) -> Iterator[tuple[str, NDArray[Any] | None]]:
    """Yield `(text, values)` of a stream's first choice, in order.

    The values of a token arrive with the chunk after the one that brings its text,
    because the model computes a token after it was sampled. A text is yielded when its
    values are there. Values of the prompt are left out.

    Args:
        chunks: what `Client.stream` yields.
        readout: the name of a readout of the request.
        array: the name of one of its arrays.

    Yields:
        A text, and the values `[tokens, ...]` of its tokens, mostly of one; None if it
        has none, as the last token, which is not fed to the model.

    Raises:
        InputError: the stream has no such readout or array.

    """
    waiting: list[tuple[str, int]] = []
    """Texts without values, and their numbers of tokens."""
    values: dict[int, Any] = {}
    begin: int | None = None
    """The position of the first token of `waiting`."""
    for chunk in chunks:
        if chunk.index:
            continue
        with understood(200):
            choice = (chunk.raw.get("choices") or [{}])[0]
            count = len(choice.get("token_ids") or ())
            if chunk.text or count:
                waiting.append((chunk.text, count))
            if (found := chunk.readouts.get(readout)) is not None:
                if array not in found.arrays:
                    message = f"{readout} has no {array!r}; it has {[*found.arrays]}"
                    raise InputError(message, "array", array)
                if begin is None:
                    begin = int(found.num_prompt_tokens or 0)
                values.update(zip(found.positions, found[array]))
        while waiting and begin is not None:
            text, count = waiting[0]
            if any(begin + n not in values for n in range(count)):
                break
            own = [values.pop(begin + n) for n in range(count)]
            del waiting[0]
            begin += count
            yield text, np.stack(own) if own else None
    if begin is None and waiting:
        message = f"the stream has no readout {readout!r}; ask for it with readouts"
        raise InputError(message, "readout", readout)
    for text, count in waiting:
        begin = begin or 0
        places = range(begin, begin + count)
        known = [values[place] for place in places if place in values]
        begin += count
        yield text, np.stack(known) if known else None
