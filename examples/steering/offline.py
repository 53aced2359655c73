# SPDX-License-Identifier: Apache-2.0
"""Steer in Python: one request, all requests, and by name.

python examples/steering/offline.py

  unsteered    The weather was dreadful, with thick fog above the trees. ...
  cheerful     The sky was blue, and the air smelled of spring. ...
  ...
"""

from demo_engine import TONE, small_engine

from vllm import LLM, SamplingParams
from vllm.steering.vectors import load_vectors

PROMPT = "Anna went to the garden after lunch."


def tell(llm: LLM, title: str, **steering: object) -> None:
    """Print the story that one request generates."""
    params = SamplingParams(max_tokens=24, temperature=0, **steering)  # type: ignore[arg-type]
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    print(f"  {title:<22} {output.outputs[0].text.strip()}")


def main() -> None:
    """Show each way to steer."""
    llm = small_engine(steering_modules={"tone": str(TONE)})
    tone = load_vectors(TONE)
    tell(llm, "unsteered")
    tell(llm, "cheerful", steering_vectors=tone.spec(1.0))
    tell(llm, "gloomy", steering_vectors=tone.spec(-1.0))
    tell(llm, "cheerful prompt only", prefill_steering_vectors=tone.spec(1.0))
    tell(llm, "by name", steering_name="tone")
    # A request's own vectors are added to those that it names.
    tell(
        llm, "by name, less twice", steering_name="tone", steering_vectors=tone.spec(-2)
    )
    llm.set_steering(vectors=tone.spec(-1.0))
    tell(llm, "everything gloomy")
    llm.clear_steering()
    # Only the stream's component along the vector is removed.
    entry = {"vector": tone.vectors[2, "post_block"], "op": "project_out"}
    tell(llm, "without any tone", steering_vectors={"post_block": {2: entry}})


if __name__ == "__main__":
    main()
