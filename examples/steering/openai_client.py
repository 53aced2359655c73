# SPDX-License-Identifier: Apache-2.0
"""Steer a server with OpenAI's client; the fields travel in `extra_body`.

vllm serve examples/demo_model/weights --served-model-name demo --enable-steering \
    --steering-modules tone=examples/steering/tone.safetensors &
python examples/steering/openai_client.py

  unsteered: ...
"""

import argparse
from pathlib import Path
from typing import Any

from openai import BadRequestError, OpenAI

from vllm.steering.vectors import load_vectors

TONE = Path(__file__).parent / "tone.safetensors"
PROMPT = "Anna went to the garden after lunch."


def main(arguments: list[str] | None = None) -> None:
    """Complete and chat, steered by name and by vectors; then an invalid request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(arguments)
    client = OpenAI(base_url=args.url, api_key=args.api_key)

    def complete(**steering: Any) -> str:
        answer = client.completions.create(
            model=args.model,
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            extra_body=steering,
        )
        return answer.choices[0].text.strip()

    entry = {"vector": load_vectors(TONE).vectors[2, "post_block"].tolist()}
    gloomy = {"post_block": {"2": {**entry, "scale": -1.0}}}
    print(f"unsteered: {complete()}")
    print(f"by name:   {complete(steering_name='tone')}")
    print(f"by vector: {complete(steering_vectors=gloomy)}")
    print("chat:      ", end="")
    for chunk in client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "How was the weather?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"decode_steering_vectors": gloomy},
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    try:
        complete(steering_vectors={"post_block": {"99": entry}})
    except BadRequestError as error:
        print(f"\nrefused:   {error.body['message']}")  # type: ignore[index]


if __name__ == "__main__":
    main()
