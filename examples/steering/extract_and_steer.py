# SPDX-License-Identifier: Apache-2.0
"""Extract vectors from contrasting stories, save them, and steer by them.

python examples/steering/extract_and_steer.py --out /tmp/tone.safetensors

  layer  point       norm     of stream  in order  explained
      2  post_block   17.8...
"""

import argparse
import sys
from pathlib import Path

from demo_engine import DEMO, small_engine

from vllm import SamplingParams
from vllm.steering.extract import extract
from vllm.steering.pairs import Pair
from vllm.steering.sweep import at_scales, generate
from vllm.steering.tables import separation_table, side_by_side

sys.path.insert(0, str(DEMO))
from generate_text import documents, neutral_openings


def contrasting_stories(count: int) -> list[Pair]:
    """Cheerful and gloomy stories, in pairs."""
    stories = documents(seed=5)
    texts: dict[str, list[str]] = {"cheerful": [], "gloomy": []}
    while min(map(len, texts.values())) < count:
        story = next(stories)
        texts[story.tone].append(story.text)
    return [Pair(*sides) for sides in zip(*texts.values())][:count]


def main(arguments: list[str] | None = None) -> None:
    """Extract at two layers, write the file, and print stories with and without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    llm = small_engine(enable_readouts=True)
    found = extract(llm, contrasting_stories(40), layers=[2], position="mean")
    found.vectors.save(args.out)
    print(separation_table(found.directions))
    prompts = neutral_openings(2, seed=11)
    scales = [0.0, -1.0, 1.0]
    settings = at_scales(found.vectors, scales)
    sampling = SamplingParams(max_tokens=30, temperature=0)
    texts = generate(llm, prompts, settings, sampling)
    for number, prompt in enumerate(prompts):
        columns = [made[number].text for made in texts]
        titles = ["unsteered", *(f"times {scale:+g}" for scale in scales[1:])]
        print(f"\n{prompt}\n{side_by_side(titles, columns, 100)}")


if __name__ == "__main__":
    main()
