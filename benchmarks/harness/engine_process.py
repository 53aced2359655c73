# SPDX-License-Identifier: Apache-2.0
"""An engine in its own process, with the environment of a given Python.

Run as a script, this is the child process. It imports only what upstream has, so that
both sides can run it.
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

# For `benchmarks`; at the end, as the checkout has a folder `vllm` too.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.child import ENVIRONMENT, Child, answers, requests


class EngineProcess(Child):
    """The parent's side; a request names a method and its arguments."""

    def __init__(self, python: Path, log: Path, threads: int) -> None:
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        super().__init__(
            [python, Path(__file__).resolve()], log, environment, log.parent
        )

    def do(self, what: str, **arguments: Any) -> Any:
        """Call a method of the engine in the child and return its result.

        Raises:
            RuntimeError: the process failed; its log says why.

        """
        return self.ask({"what": what, **arguments})


class _Engine:
    """The child's side; its methods are the requests."""

    def __init__(self) -> None:
        self._llm: Any = None

    def identity(self) -> dict[str, Any]:
        """The vLLM in this process, by its files and its distributions."""
        from importlib.metadata import distributions

        import torch

        import vllm

        names = {d.metadata["Name"]: d.version for d in distributions()}
        return {
            "file": vllm.__file__,
            "distributions": {n: v for n, v in names.items() if "vllm" in n.lower()},
            "has_capture": "vllm.v1.capture" in _modules_below(vllm.__file__),
            "torch": torch.__version__,
        }

    def load(self, model: str, dtype: str, eager: bool) -> None:
        """Load a model and drop the previous one."""
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.model_executor.models import registry

        # It would inspect the model's class in a new process, as the other side's file
        # of the same name has replaced what it had kept.
        registry._run_in_subprocess = lambda inspect: inspect()
        if self._llm is not None:
            self._llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        self._llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=eager,
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=32,
            seed=0,
        )

    def outputs(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Greedy tokens, with the logprobs of prompt and generated tokens."""
        done = self._generate(prompts, max_tokens, logprobs=5, prompt_logprobs=2)
        return [
            {
                "tokens": list(request.outputs[0].token_ids),
                "logprobs": _numbers(request.outputs[0].logprobs),
                "prompt_logprobs": _numbers(request.prompt_logprobs),
            }
            for request in done
        ]

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
        """Wall time and CPU time of all threads for one batch."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._generate(prompts, max_tokens)
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
        }

    def _generate(
        self, prompts: list[list[int]], max_tokens: int, **more: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            **more,
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        done: list[Any] = self._llm.generate(inputs, params, use_tqdm=False)
        return done


def _modules_below(package_file: str) -> set[str]:
    root = Path(package_file).parent
    return {f"vllm.v1.{p.name}" for p in (root / "v1").iterdir() if p.is_dir()}


def _numbers(steps: Any) -> list[Any]:
    """The candidates of each step in order; JSON preserves floats exactly."""
    return [
        step and [[token, entry.logprob, entry.rank] for token, entry in step.items()]
        for step in steps
    ]


def _serve() -> None:
    answer, engine = answers(), _Engine()
    for request in requests():
        answer(getattr(engine, request.pop("what"))(**request))


if __name__ == "__main__":
    _serve()
