# SPDX-License-Identifier: Apache-2.0
"""Every kind, compared with the same arithmetic on Transformers' rows."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.captured import CapturedEngine, prompt
from tests.support.plugins import install
from tests.v1.readouts._reading import LAYERS, Modules, draw, read_out, stream
from vllm import SamplingParams
from vllm.v1.capture.dispatch.dispatcher import Dispatcher
from vllm.v1.readouts.modules import save_probe, save_translator
from vllm.v1.readouts.worker import custom
from vllm.v1.residual.sae import encode

pytestmark = pytest.mark.e2e

PROMPTS = [prompt(50, 1), prompt(7, 2), prompt(13, 3)]
"""Prompts, of which the first takes several steps."""


def close(found: Any, expected: torch.Tensor, atol: float = 1e-3) -> None:
    torch.testing.assert_close(
        torch.from_numpy(np.asarray(found)), expected, atol=atol, rtol=1e-3
    )


def within(found: Any, expected: torch.Tensor, bound: float) -> None:
    values = torch.from_numpy(np.asarray(found))
    torch.testing.assert_close(values, expected, atol=bound, rtol=0)


def close_logs(found: Any, expected: torch.Tensor) -> None:
    """Log-probabilities are within 1e-3, however small they are."""
    values = torch.from_numpy(np.asarray(found))
    torch.testing.assert_close(values, expected, atol=1e-3, rtol=0)


def same_tokens(found: Any, logs: torch.Tensor, top_k: int, tie: float = 1e-3) -> None:
    """The ids are those of the largest of `logs`, except where two are a tie."""
    best = logs.topk(top_k, dim=-1)
    ids = torch.from_numpy(np.asarray(found)).long()
    differ = ids != best.indices
    gaps = (logs.gather(-1, ids) - best.values).abs()
    assert (gaps[differ] < tie).all(), gaps[differ]


def test_a_request_that_waits_is_not_read_with_what_replaces_its_module(
    engine: CapturedEngine, tmp_path: Path
) -> None:
    files = [tmp_path / f"{one}.safetensors" for one in range(4)]
    for seed, (probe, translator) in enumerate((files[:2], files[2:])):
        save_probe(probe, draw(2, 64, seed=seed), torch.zeros(2), layer=1 + seed)
        save_translator(translator, {0: draw(64, 64, seed=seed).bfloat16()})
    places = {"p": files[::2], "t": files[1::2]}
    readouts = {
        "p": {"kind": "probe", "probe": "p", "positions": "all"},
        "t": {"kind": "lens", "translator": "t", "layers": [0], "positions": "all"},
        "norm": {"kind": "norm", "hooks": {"post_block": [1]}, "positions": "all"},
    }
    llm, params = engine.llm, SamplingParams(readouts=readouts, max_tokens=3)
    for name, (first, second) in places.items():
        for path in (second, first):
            llm.register_readout_module(name, str(path), replace=True)
    llm.enqueue([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
    for name, (_, second) in places.items():
        llm.register_readout_module(name, str(second), replace=True)
    (waited,) = llm.wait_for_completion(use_tqdm=False)
    (later,) = engine.run(PROMPTS[1:2], params)
    for name in places:
        assert waited.readouts[name].error and not waited.readouts[name].arrays
        assert later.readouts[name].error is None
        llm.unregister_readout_module(name)
    assert waited.readouts["norm"].error is None


def test_probes_by_name_and_of_requests(
    engine: CapturedEngine, modules: Modules
) -> None:
    own = draw(3, 64, seed=9)
    spec = {
        "named": {"kind": "probe", "probe": "direction", "positions": "all"},
        "own": {"kind": "probe", "vectors": own.tolist(), "layer": 2},
        "cosine": {
            "kind": "probe",
            "probe": {"vectors": own.tolist(), "cosine": True},
            "layer": 0,
        },
        "sigmoid": {
            "kind": "probe",
            "vectors": (own / 50).tolist(),
            "bias": [0.1, 0.2, 0.3],
            "activation": "sigmoid",
            "layer": 2,
            "positions": "all",
        },
    }
    for output in read_out(engine, PROMPTS, spec):
        rows, found = stream(engine, output)[:-1], output.readouts
        first = len(output.prompt_token_ids or ())
        assert found["named"].positions == list(range(len(rows)))
        close(found["named"]["values"], rows[:, 1] @ modules.vectors.T + modules.bias)
        assert found["own"].positions == list(range(first, len(rows)))
        close(found["own"]["values"], rows[first:, 2] @ own.T)
        unit = torch.nn.functional.normalize
        cosine = unit(rows[first:, 0], dim=-1) @ unit(own, dim=-1).T
        close(found["cosine"]["values"], cosine)
        pressed = rows[:, 2] @ (own / 50).T + torch.tensor([0.1, 0.2, 0.3])
        close(found["sigmoid"]["values"], pressed.sigmoid())


def test_a_lens_is_the_models_own_head_at_every_layer(
    engine: CapturedEngine, modules: Modules
) -> None:
    spec = {
        "lens": {"kind": "lens", "top_k": 4, "tokens": [5, 900], "positions": "all"},
        "tuned": {"kind": "lens", "layers": [0, 2], "translator": "tuned", "top_k": 2},
    }
    inner = engine.reference.model
    for output in read_out(engine, PROMPTS, spec):
        rows, found = stream(engine, output)[:-1], output.readouts
        with torch.no_grad():
            logs = inner.lm_head(inner.model.norm(rows)).log_softmax(dim=-1)
        close_logs(found["lens"]["logprobs"], logs.topk(4, dim=-1).values)
        same_tokens(found["lens"]["token_ids"], logs, 4)
        close_logs(found["lens"]["token_logprobs"], logs[..., [5, 900]])
        assert found["lens"].taps == tuple((n, "post_block") for n in range(LAYERS))
        first = len(output.prompt_token_ids or ())
        mapped = torch.stack(
            [rows[first:, n] + rows[first:, n] @ modules.maps[n].T for n in (0, 2)], 1
        )
        with torch.no_grad():
            logs = inner.lm_head(inner.model.norm(mapped)).log_softmax(dim=-1)
        close_logs(found["tuned"]["logprobs"], logs.topk(2, dim=-1).values)
        same_tokens(found["tuned"]["token_ids"], logs, 2)


@pytest.mark.parametrize("name", ["jump", "topk"])
def test_features_are_those_of_the_reference(
    engine: CapturedEngine, modules: Modules, name: str
) -> None:
    sae = modules.saes[name]
    hooks = {"hooks": {"post_block": [1]}, "positions": "all"}
    spec = {
        "best": {"kind": "sae", "sae": name, "top_k": 8, "positions": "all"},
        "some": {"kind": "sae", "sae": name, "features": [3, 150, 7]},
        "rows": {"kind": "rows", **hooks},
    }
    for output in read_out(engine, PROMPTS, spec):
        found = output.readouts
        own = torch.from_numpy(found["rows"]["rows"])[:, 0]
        close(own, stream(engine, output)[:-1, 1])
        # On the same rows, the sums differ by their order alone.
        activations = encode(sae, own)
        rounding = 8 * torch.finfo(own.dtype).eps * float(activations.abs().max())
        best = activations.topk(8, dim=-1)
        active = best.values > 0
        within(found["best"]["activations"], best.values, rounding)
        indices = torch.where(active, best.indices, -1)
        assert (found["best"]["features"] == indices.numpy()).all()
        first = len(output.prompt_token_ids or ())
        some = activations[first:, [3, 150, 7]]
        within(found["some"]["activations"], some, rounding)


def test_norms_and_cosines_to_the_layer_before(engine: CapturedEngine) -> None:
    spec = {
        "all": {"kind": "norm", "hooks": {"post_block": "all"}, "positions": "all"},
        "one": {"kind": "norm", "hooks": {"post_block": [2]}},
    }
    # Behind the last block, whose stream enters no other one, it is read at its end.
    spec["after"] = spec["all"] | {"after": True}
    for output in read_out(engine, PROMPTS, spec):
        rows, found = stream(engine, output)[:-1], output.readouts
        close(found["all"]["norm"], rows.norm(dim=-1))
        cosine = torch.cosine_similarity(rows[:, 1:], rows[:, :-1], dim=-1)
        close(found["all"]["cosine"][:, 1:], cosine)
        assert np.isnan(found["all"]["cosine"][:, 0]).all()
        first = len(output.prompt_token_ids or ())
        close(found["one"]["cosine"][:, 0], cosine[first:, 1])
        assert found["one"].taps == ((2, "post_block"),)
        for name in ("norm", "cosine"):
            np.testing.assert_array_equal(found["after"][name], found["all"][name])


def test_positions_ascend_where_single_ones_are_among_others(
    engine: CapturedEngine,
) -> None:
    norm = {"kind": "norm", "hooks": {"post_block": [1]}}
    listed = [2, 5, 6, 12, 14, 15, 16, 20]
    spec = {"all": norm | {"positions": "all"}, "some": norm | {"positions": listed}}
    (output,) = read_out(engine, [prompt(24)], spec)
    found = output.readouts
    assert found["some"].positions == listed
    np.testing.assert_array_equal(found["some"]["norm"], found["all"]["norm"][listed])


def test_rows_are_reduced_once_if_the_cache_is_reset_meanwhile(
    engine: CapturedEngine,
) -> None:
    """Then the engine drops the output of steps in flight, and computes them again."""
    spec = {"kind": "rows", "hooks": {"post_block": [1]}, "positions": "all_prompt"}
    both = {name: spec | {"reduce": name} for name in ("none", "sum")}
    params = SamplingParams(max_tokens=2, ignore_eos=True, readouts=both)
    own: Any = engine.llm.llm_engine
    own.add_request("reset", {"prompt_token_ids": prompt(60)}, params)
    own.step()
    assert own.engine_core.reset_prefix_cache(reset_running_requests=True)
    outputs = [one for _ in range(20) for one in own.step()]
    found = outputs[-1].readouts
    assert outputs[-1].finished and found["sum"].error is None
    close(found["sum"]["rows"], torch.from_numpy(found["none"]["rows"].sum(axis=0)))


@pytest.mark.parametrize("positions", ["all_prompt", "all", "all_generated"])
def test_reduced_rows(engine: CapturedEngine, positions: str) -> None:
    how = ("none", "mean", "sum", "max", "last")
    hooks = {"post_block": [0, 2]}
    spec = {
        name: {"kind": "rows", "hooks": hooks, "positions": positions, "reduce": name}
        for name in how
    }
    for output in read_out(engine, PROMPTS, spec):
        first = len(output.prompt_token_ids or ())
        rows = stream(engine, output)[:-1, [0, 2]]
        kept = {"all_prompt": rows[:first], "all_generated": rows[first:]}
        own, found = kept.get(positions, rows), output.readouts
        assert len(found["mean"].positions) == len(own)
        close(found["none"]["rows"], own)
        close(found["mean"]["rows"], own.mean(dim=0))
        close(found["sum"]["rows"], own.sum(dim=0), 1e-2)
        close(found["max"]["rows"], own.amax(dim=0))
        close(found["last"]["rows"], own[-1])


def test_a_cached_prompt_is_read_out_as_the_first_time(engine: CapturedEngine) -> None:
    norm = {"kind": "norm", "hooks": {"post_block": [1]}}
    text = [prompt(96, 77)]
    for positions, cached in (("all", 0), ("all_generated", 64), ([70], 64)):
        spec = {"norm": norm | {"positions": positions}}
        (output,) = read_out(engine, text, spec)
        rows = stream(engine, output)[:-1, 1].norm(dim=-1)
        kept = output.readouts["norm"].positions
        close(output.readouts["norm"]["norm"][:, 0], rows[kept])
        assert (output.num_cached_tokens or 0) >= cached


def test_every_sample_has_its_own(engine: CapturedEngine) -> None:
    spec = {"norm": {"kind": "norm", "hooks": {"post_block": [2]}}}
    (output,) = read_out(engine, [PROMPTS[1]], spec, n=3, temperature=1.0, seed=5)
    for sample in output.outputs:
        fed = [*PROMPTS[1], *sample.token_ids][:-1]
        rows = engine.reference.stream(fed)[2, "post_block"][7:]
        assert sample.readouts is not None
        close(sample.readouts["norm"]["norm"][:, 0], rows.norm(dim=-1))


def test_no_row_leaves_the_device_for_a_probe(
    engine: CapturedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("rows take a place among those that go to the host")

    monkeypatch.setattr(Dispatcher, "reserve", refuse)
    spec = {"p": {"kind": "probe", "probe": "direction", "positions": "all"}}
    for output in read_out(engine, PROMPTS, spec):
        assert output.readouts["p"].error is None


def test_a_model_without_a_head_for_a_lens_spoils_that_readout_alone(
    engine: CapturedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (head,) = engine.llm.collective_rpc(
        lambda worker: worker.model_runner.residual.readouts.head
    )
    monkeypatch.setattr(head, "refusal", "its head is a stranger")
    spec = {
        "lens": {"kind": "lens", "top_k": 1},
        "norms": {"kind": "norm", "hooks": {"post_block": [1]}},
    }
    for output in read_out(engine, PROMPTS, spec):
        assert "its head is a stranger" in output.readouts["lens"].error
        assert output.readouts["norms"].error is None


ENTROPY = """
class Scaled:
    def __init__(self, vllm_config):
        self.width = vllm_config.model_config.get_hidden_size()

    def compute(self, rows, context):
        assert rows.shape[1:] == (len(context.taps), self.width)
        return rows.float().norm(dim=-1) * context.params["by"]
"""


def test_custom_readouts_by_name_and_as_functions(
    engine: CapturedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"readouts_{tmp_path.parent.name}".replace("-", "_")
    target = f"{name}:Scaled"
    install(tmp_path, name, ENTROPY, group="vllm.readouts", scaled=target)
    monkeypatch.syspath_prepend(str(tmp_path))

    def doubled(rows, context):
        return rows.float().norm(dim=-1) * 2

    def placed(rows, context):
        return torch.tensor(context.positions)

    def fails(rows, context):
        raise RuntimeError("not these rows")

    def leaves(rows, context):
        raise SystemExit("enough")

    logged: list[Any] = []
    monkeypatch.setattr(custom.logger, "exception", lambda *said: logged.append(said))
    hooks = {"hooks": {"post_block": [0, 2]}, "positions": "all", "kind": "custom"}
    spec = {
        "named": hooks | {"name": "scaled", "params": {"by": 2.0}},
        "given": hooks | {"fn": doubled},
        "placed": hooks | {"fn": placed},
        "wrong": hooks | {"fn": fails},
        "left": hooks | {"fn": leaves},
    }
    for output in read_out(engine, [prompt(7, 1), prompt(30, 2)], spec):
        rows = stream(engine, output)[:-1, [0, 2]]
        for kind in ("named", "given"):
            found = output.readouts[kind]
            assert found.error is None
            close(found["values"], 2 * rows.norm(dim=-1))
        where = output.readouts["placed"]
        assert where["values"].tolist() == where.positions == list(range(len(rows)))
        assert "not these rows" in output.readouts["wrong"].error
        assert output.readouts["left"].error == "SystemExit: enough"
    assert len(logged) == 2, "a kind of readout is logged once, with its traceback"
    with pytest.raises(ValueError, match="must be a Python function"):
        read_out(engine, [prompt(3)], {"x": hooks | {"fn": "print"}})
    lock = threading.Lock()
    with pytest.raises(ValueError, match="readouts.x.fn: cannot be sent"):
        read_out(engine, [prompt(3)], {"x": hooks | {"fn": lambda *_: lock}})


def test_what_a_custom_readout_returns_affects_its_own_result_only(
    engine: CapturedEngine,
) -> None:
    buffer = torch.zeros(64, 128)

    def fails_at_times(rows, context):
        if context.positions[0] % 2:
            raise ValueError(f"not at {context.positions[0]}")
        return torch.tensor(context.positions)

    def changes_shape(rows, context):
        return torch.zeros(len(rows), 1 + (context.positions[0] > 0))

    def reuses_memory(rows, context):
        own = buffer[: len(rows)]
        own[:] = torch.tensor(context.positions)[:, None]
        return own

    returned: dict[str, Any] = {
        "shaped": changes_shape,
        "sparse": lambda rows, context: torch.eye(len(rows)).to_sparse(),
        "complex": lambda rows, context: rows.sum((1, 2)).to(torch.complex64),
        "number": lambda rows, context: torch.tensor(1.0),
        "odd": lambda rows, context: rows.sum((1, 2)).to(torch.float8_e4m3fn),
        "at times": fails_at_times,
        "reused": reuses_memory,
    }
    hooks = {"hooks": {"post_block": [1]}, "positions": "all", "kind": "custom"}
    spec = {name: hooks | {"fn": fn} for name, fn in returned.items()}
    spec["own"] = {"kind": "norm", "hooks": {"post_block": [1]}, "positions": "all"}
    never = [{"readout": "reused", "index": 128, "above": 0.0}]
    (output,) = read_out(engine, [prompt(6)], spec, max_tokens=14, stop_when=never)
    found = output.readouts
    everything = list(range(19))
    close(found["own"]["norm"], stream(engine, output)[:-1, 1:2].norm(dim=-1))
    assert found["own"].positions == everything
    assert "[2] for a token, and [1] before" in found["shaped"].error
    assert found["shaped"].positions == everything[:6], "those that have values"
    refused = {"sparse": "not a dense", "complex": "not real", "number": "dimension"}
    for name, why in refused.items():
        assert why in found[name].error and not found[name].positions
    assert found["odd"].error is None and found["odd"]["values"].dtype == np.float32
    some = found["at times"]
    assert some.positions == [*range(6), *range(6, 19, 2)]
    assert some["values"].tolist() == some.positions
    assert some.error.count("ValueError: not at ") == 4
    assert some.error.endswith("; and 2 more")
    assert found["reused"]["values"][:, 0].tolist() == everything
    assert "it has no value 128" in found["reused"].error
