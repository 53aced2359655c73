# SPDX-License-Identifier: Apache-2.0
"""A probe: is a sentence happy or sad, judged by the row of its last token?"""

import numpy as np
from real import HAPPY, SAD, model

from vllm import SamplingParams

SPEC = {"inline": {"hooks": {"post_block": [20]}, "positions": "last_prompt"}}
NEW = ["Our team won the cup!", "My dog died today.", "What a lovely surprise."]


def main(llm):
    params = SamplingParams(max_tokens=1, capture=SPEC)
    outputs = llm.generate([*HAPPY, *SAD, *NEW], params, use_tqdm=False)
    found = [output.capture_results["inline"].payload for output in outputs]
    rows = np.stack([one[20, "post_block"][0].numpy() for one in found])
    happy, sad = rows[: len(HAPPY)].mean(0), rows[len(HAPPY) : -len(NEW)].mean(0)
    scores = (rows[-len(NEW) :] - (happy + sad) / 2) @ (happy - sad)
    for text, score in zip(NEW, scores):
        print("happy" if score > 0 else "sad  ", text)


if __name__ == "__main__":
    main(model())
