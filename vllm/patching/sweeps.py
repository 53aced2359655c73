# SPDX-License-Identifier: Apache-2.0
"""`patch_sweep`, `ablation_sweep` and `causal_trace`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from vllm.patching.planning import Sweep
from vllm.patching.result import Found, PatchResult

if TYPE_CHECKING:
    from clearbox_client import Client

    from vllm import LLM

Tokens: TypeAlias = str | int | Sequence[int] | None
"""An answer: text, a token's id, or ids; several tokens are predicted one by one."""
Text: TypeAlias = str | Sequence[int]
"""A prompt: text, or token ids."""


class Axes(TypedDict, total=False):
    """The arguments that all sweeps share."""

    answer: Tokens
    foil: Tokens
    hooks: str | Sequence[str]
    """Names of hook points, `("post_block",)` if they are left out."""
    layers: Any
    """A selector of layers, `"all"` if it is left out."""
    positions: Any
    """`"all"`, `"together"` (in one cell), or a list of positions, of lists of
    positions that are patched together, and of `Span`."""
    heads: Any
    """A list of heads, or `"all"`, at hook points that have heads; else whole rows."""
    metric: str
    """`logprob` of the answer, `logit_diff` to the foil, `recovered` (its share of the
    way from the corrupt run to the clean one), `kl` from the clean run's distribution
    (over its likely tokens and all others together, in nats), or `probe:NAME`."""
    alpha: float
    """The weight of the inserted row, 1 to replace."""
    mask: Any
    """Weights of its dimensions, or `{"indices": [...]}`."""
    resume: bool
    """Accepted, and changes nothing: each cell runs all layers. To begin at the patched
    one was built and measured, and was only 1.1 times as fast."""
    progress: bool
    """Whether a long sweep shows a bar."""
    on_cell: Callable[[Found], Any] | None
    """Called with each cell once its value is known."""


def patch_sweep(
    llm: "LLM | Client",
    clean: Text | None,
    corrupt: Text,
    *,
    effect: str = "denoise",
    run: str | None = None,
    **axes: Unpack[Axes],
) -> PatchResult:
    """Patch one prompt with rows of another's run, one place after another.

    Prompts of different lengths are aligned by their common beginning and end.

    Args:
        llm: an engine with `enable_patching=True`, or a client of such a server.
        clean: the prompt that has the answer.
        corrupt: the prompt that does not.
        effect: `"denoise"` inserts the clean run's rows into the corrupt prompt,
            `"noise"` the corrupt run's rows into the clean prompt.
        run: the name of the run from which rows come: one that is kept, or under which
            it stays afterwards; None drops it.
        axes: as `Axes`; `answer` is needed, and `foil` for `logit_diff`, the default.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    prompt, other = (corrupt, clean) if effect == "denoise" else (clean, corrupt)
    return _swept(llm, axes, prompt=prompt, other=other, effect=effect, run=run)


def ablation_sweep(
    llm: "LLM | Client",
    prompt: Text,
    *,
    source: Any = "zeros",
    noise: float = 3.0,
    seed: int = 0,
    **axes: Unpack[Axes],
) -> PatchResult:
    """Overwrite a prompt's rows by what carries no information, one after another.

    Args:
        llm: as for `patch_sweep`.
        prompt: the prompt.
        source: `"zeros"`, `"mean"` (over the prompt, of that layer), `"noise"` (the
            row with Gaussian noise added), the name of a steering module, or a row.
        noise: the noise, as a multiple of the rows' standard deviation.
        seed: of the noise.
        axes: as `Axes`.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    return _swept(llm, axes, prompt=prompt, source=source, noise=noise, seed=seed)


def causal_trace(
    llm: "LLM | Client",
    prompt: Text,
    subject: Any,
    *,
    noise: float = 3.0,
    seed: int = 0,
    **axes: Unpack[Axes],
) -> PatchResult:
    """Disturb a subject's embeddings, and restore one place after another.

    The corrupt run is the prompt with Gaussian noise added to the rows that enter the
    first layer; cells restore rows of the run without noise.

    Args:
        llm: as for `patch_sweep`.
        prompt: the prompt.
        subject: text in the prompt, a `Span`, or positions.
        noise: the noise, as a multiple of the standard deviation of these rows over the
            prompt.
        seed: of the noise.
        axes: as `Axes`; the metric is `logprob` if there is no foil.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if axes.get("foil") is None:
        axes.setdefault("metric", "logprob")
    return _swept(llm, axes, prompt=prompt, subject=subject, noise=noise, seed=seed)


def _swept(llm: Any, axes: Axes, **asked: Any) -> PatchResult:
    from vllm.patching import offline, remote

    given: dict[str, Any] = {**axes, **asked}
    given.pop("resume", None)
    progress, on_cell = given.pop("progress", True), given.pop("on_cell", None)
    run = remote.run if hasattr(llm, "patch_events") else offline.run
    return run(llm, Sweep(**given), progress, on_cell, given.get("run") is not None)
