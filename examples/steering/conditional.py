# SPDX-License-Identifier: Apache-2.0
"""Steer only where a probe fires: gloomy stories are changed, others are not.

python examples/steering/conditional.py

  gloomy, unsteered        The painter told me a sad secret, and both wept. ...
  gloomy, where it fires   The painter told me a sad secret, and both were sad. ...
  cheerful, unsteered      She found a pretty ring and was glad. ...
  cheerful, where it fires She found a pretty ring and was glad. ...
"""

from demo_engine import TONE, small_engine

from vllm import LLM, SamplingParams
from vllm.steering.vectors import load_vectors

PROMPTS = {
    "gloomy": "A filthy dog barked at Anna.",
    "cheerful": "Anna smiled. The roses were lovely.",
}


def tell(llm: LLM, prompt: str, **steering: object) -> str:
    """The story that one request generates."""
    params = SamplingParams(max_tokens=24, temperature=0, **steering)  # type: ignore[arg-type]
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return str(output.outputs[0].text.strip())


def main() -> None:
    """Generate both stories with and without the condition."""
    llm = small_engine()
    tone = load_vectors(TONE).vectors[2, "post_block"]
    # Decided once for each story, at the last token of its prompt.
    gloomy = {"probe": tone, "cosine": True, "below": 0.1, "scope": "prompt"}
    gloomy |= {"layer": 2, "hook": "post_block"}
    entry = {"vector": tone, "scale": 3.0, "when": gloomy}
    for name, prompt in PROMPTS.items():
        print(f"  {name + ', unsteered':<24} {tell(llm, prompt)}")
        steered = tell(llm, prompt, steering_vectors={"post_block": {2: entry}})
        print(f"  {name + ', where it fires':<24} {steered}")


if __name__ == "__main__":
    main()
