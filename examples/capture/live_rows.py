# SPDX-License-Identifier: Apache-2.0
"""Print the norms of residual rows, token by token, while the model generates.

python examples/capture/live_rows.py "The old house by the river"

  position  token          layer 0   layer 5
         0  '<|bos|>'        53.69    951.89
         1  'The'            32.34    160.60
  ...
"""

import argparse
import asyncio

from small import DEMO_MODEL, SMALL

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def show(engine: AsyncLLM, prompt: str, layers: list[int]) -> None:
    """Print the norm of each row as soon as it arrives."""
    spec = {"hooks": {"post_block": layers}, "positions": "all"}
    params = SamplingParams(
        max_tokens=24,
        capture={"inline": spec},
        output_kind=RequestOutputKind.DELTA,  # each output holds what is new
    )
    taps = [(layer, "post_block") for layer in layers]
    heads = "".join(f"{f'layer {layer}':>10}" for layer in layers)
    print(f"position  {'token':12}{heads}")
    decode, printed = engine.get_tokenizer().decode, 0
    async for output in engine.generate(prompt, params, "live"):
        # The last output has all rows; the last two have not been printed yet.
        rows = output.capture_results["inline"].payload
        for index, position in enumerate(rows.positions.get(taps[0], [])):
            if position < printed:
                continue
            norms = [rows[tap][index].float().norm().item() for tap in taps]
            token = decode([rows.token_ids[taps[0]][index]])
            print(f"{position:8}  {token!r:12}" + "".join(f"{n:10.2f}" for n in norms))
            printed = position + 1


async def main(prompt: str) -> None:
    """Start an engine with the consumer that returns rows."""
    arguments = AsyncEngineArgs(str(DEMO_MODEL), capture_consumers=["inline"], **SMALL)
    engine = AsyncLLM.from_engine_args(arguments)
    await show(engine, prompt, [0, 5])
    engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The old house by the river")
    asyncio.run(main(parser.parse_args().prompt))
