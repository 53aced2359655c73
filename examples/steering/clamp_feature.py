# SPDX-License-Identifier: Apache-2.0
"""Train a small sparse autoencoder on the demo model and clamp one of its features.

python examples/steering/clamp_feature.py

  explained 0.93; feature 24 reaches 47.7
  unsteered        The sky was blue, and the air smelled of spring. ...
  clamped to 0.0   The sky was dark, and the air smelled of rotten leaves. ...
  ...
"""

import tempfile
from pathlib import Path

import torch
from demo_engine import small_engine
from small_sae import LAYER, rows_of, stories, train

from vllm import LLM, SamplingParams
from vllm.steering.sae import encode, load_sae

PROMPT = "Anna went to the garden after lunch."


def tell(llm: LLM, title: str, **steering: object) -> None:
    """Print the story that one request generates."""
    params = SamplingParams(max_tokens=24, temperature=0, **steering)  # type: ignore[arg-type]
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    print(f"  {title:<16} {output.outputs[0].text.strip()}")


def main() -> None:
    """Train an SAE, register it, clamp the feature that separates the tones."""
    llm = small_engine(capture_consumers=["inline"])
    gloomy, cheerful = (
        rows_of(llm, [story for story, tone in told if tone == wanted])
        for told in [list(stories(96))]
        for wanted in ("gloomy", "cheerful")
    )
    with tempfile.TemporaryDirectory() as made:
        explained = train(torch.cat([gloomy, cheerful]), Path(made))
        llm.register_readout_module("small", made)
        sae = load_sae(made)
    means = [encode(sae, rows).mean(dim=0) for rows in (gloomy, cheerful)]
    feature = int((means[1] - means[0]).argmax())
    most = float(encode(sae, cheerful)[:, feature].max())
    print(f"  explained {explained:.2f}; feature {feature} reaches {most:.1f}")
    tell(llm, "unsteered")
    for value in (0.0, most):
        entry = {"op": "feature", "sae": "small", "feature": feature, "value": value}
        where = {"post_block": {LAYER: entry}}
        tell(llm, f"clamped to {value:.1f}", steering_vectors=where)


if __name__ == "__main__":
    main()
