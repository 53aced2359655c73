# SPDX-License-Identifier: Apache-2.0
"""What cannot be swept is refused before anything runs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patching._toy import LONGEST, VOCABULARY, Toy
from vllm.entrypoints.serve.patch.client import spans_of
from vllm.patching.alignment import align
from vllm.patching.grid import Prompt, Span, columns_of, prompt_of
from vllm.patching.planning import Sweep, plan_of
from vllm.v1.steering.errors import SteeringValidationError

CLEAN, CORRUPT = [1, 2, 3, 4, 5], [1, 2, 6, 4, 5]
ASKED: dict[str, Any] = {"prompt": CORRUPT, "other": CLEAN, "answer": 7, "foil": 8}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(source=PROMPTS, target=PROMPTS)
def test_aligned_tokens_of_unequal_prompts_are_equal(
    source: list[int], target: list[int]
) -> None:
    found = align(source, target)
    pairs = [(p, found.source_of(p)) for p in range(len(target))]
    places = [other for _, other in pairs if other is not None]
    assert places == sorted(set(places)) and all(p < len(source) for p in places)
    if len(source) == len(target):
        assert pairs == [(p, p) for p in range(len(target))]
        return
    assert all(source[o] == target[p] for p, o in pairs if o is not None)
    unaligned = [p for p, other in pairs if other is None]
    assert found.as_json()["unaligned_positions"] == unaligned
    shorter = min(len(source), len(target))
    assert found.prefix + found.suffix <= shorter
    if found.prefix + found.suffix < shorter:  # Neither end could be longer.
        assert source[found.prefix] != target[found.prefix]
        assert source[-found.suffix - 1] != target[-found.suffix - 1]


def prompt(*texts: str) -> Prompt:
    return Prompt(tuple(range(len(texts))), texts)


FRANCE = prompt("The", " capital", " of", " Fr", "ance", " is", " the", " capital")
JAPAN = prompt("The", " capital", " of", " Japan", " is", " the", " capital")


def columns(raw: Any, target: Prompt = FRANCE, source: Prompt = JAPAN) -> Any:
    texts = source.texts, target.texts
    number = {text: n for n, text in enumerate({*texts[0], *texts[1]})}
    ids = [[number[text] for text in one] for one in texts]
    return columns_of(raw, target, source, align(*ids), "positions")


def test_a_span_is_a_column_for_each_of_its_tokens() -> None:
    of, fr, ance = columns([{"span": "of France"}])
    assert (of.targets, of.sources) == ((2,), (2,))
    assert fr.sources == ance.sources == () and fr.reason and ance.reason
    (shifted,) = columns([Span(" is")])
    assert (shifted.targets, shifted.sources) == ((5,), (4,))
    fr, ance = columns([Span("France", source="Japan")])
    assert ance.sources == (3,) and "more" in str(fr.reason)
    (second,) = columns([{"span": "capital", "occurrence": 1}])
    assert second.targets == (7,)


def test_an_earlier_forks_client_sends_all_of_a_span() -> None:
    sent = spans_of([Span("France", source="Japan"), 3])
    assert sent == [{"span": "France", "occurrence": 0, "source": "Japan"}, 3]


def test_positions_count_from_the_end_and_stay_together_in_groups() -> None:
    last, group = columns([-1, [0, 1, 7]])
    assert (last.targets, last.sources) == ((7,), (6,))
    assert (group.targets, group.sources) == ((0, 1, 7), (0, 1, 6))
    assert [one.targets for one in columns("all")] == [(p,) for p in range(8)]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([8], "no position of a prompt of 8"),
        ([-9], "no position"),
        ([True], "no position"),
        ([], "must be"),
        ("last", "must be"),
        ([[]], "distinct"),
        ([[1, 1]], "distinct"),
        ([[7, -1]], "distinct"),
        ([{"span": "Spain"}], "no text"),
        ([{"span": ""}], "no text"),
        ([{"span": "capital"}], "2 times"),
        ([{"span": "capital", "occurrence": 2}], "2 times"),
        ([{"span": "of", "occurrence": "1"}], "number"),
        ([{"span": "of", "nth": 1}], "keys"),
        ([{"span": "of", "source": 1}], "text"),
        ([Span("of", source="Spain")], "no text"),
    ],
)
def test_columns_that_are_not_there_are_refused(raw: Any, words: str) -> None:
    with pytest.raises(SteeringValidationError, match=words) as found:
        columns(raw)
    assert str(found.value.parameter).startswith("positions")


def test_the_texts_of_tokens_join_to_the_prompt() -> None:
    data = "Hé 😀 wor".encode()

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    found = prompt_of(list(data), decode)
    assert "".join(found.texts) == "Hé 😀 wor"
    assert len(found.tokens_of("😀", None, "p")) >= 1
    assert found.tokens_of("wor", None, "p")[-1] == len(data) - 1


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCABULARY]}, "prompt"),
        ({"prompt": "text without a tokenizer"}, "prompt"),
        ({"prompt": [1] * LONGEST}, "prompt"),
        ({"prompt": [1] * (LONGEST - 2), "answer": [1, 2, 3]}, "prompt"),
        ({"other": None}, "clean_prompt"),
        ({"other": None, "run": "gone"}, "source_run"),
        ({"other": [1, "2"]}, "clean_prompt"),
        ({"hooks": []}, "hooks"),
        ({"hooks": "attn"}, "hooks"),
        ({"hooks": ["post_block", "resid_post"]}, "hooks"),
        ({"hooks": "mlp_in"}, "hooks"),
        ({"layers": [3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": "x"}, "layers"),
        ({"heads": [0]}, "heads"),
        ({"positions": [5]}, "positions[0]"),
        ({"positions": [0] * 90_000}, "layers"),
        ({"metric": "accuracy"}, "metric"),
        ({"metric": "probe:"}, "metric"),
        ({"metric": "kl"}, "answer"),
        ({"answer": None}, "answer"),
        ({"answer": []}, "answer"),
        ({"answer": " Paris"}, "answer"),
        ({"answer": [VOCABULARY]}, "answer"),
        ({"answer": True}, "answer"),
        ({"foil": None}, "foil"),
        ({"foil": 7}, "foil"),
        ({"effect": "both"}, "effect"),
        ({"source": "zeros", "metric": "recovered"}, "metric"),
        ({"other": [1], "prompt": [2, 3], "positions": "all"}, "positions"),
    ],
)
def test_what_cannot_be_swept_is_refused(change: Any, parameter: str) -> None:
    toy = Toy()
    with pytest.raises(SteeringValidationError) as found:
        plan_of(Sweep(**{**ASKED, **change}), toy.engine)
    assert found.value.parameter == parameter
    assert not toy.asked


def test_a_kept_run_must_fit_its_prompt() -> None:
    toy = Toy()
    toy.sweep(**ASKED, run="kept", layers=[1])
    again = plan_of(Sweep(**ASKED, run="kept", layers=[1]), toy.engine)
    assert again.capture is None and again.num_same == 0
    alone = {**ASKED, "other": None, "run": "kept"}
    assert plan_of(Sweep(**alone), toy.engine).source is None
    for change, parameter in (
        ({"prompt": [1, 2]}, "source_run"),
        ({"metric": "kl", "answer": None, "foil": None}, "metric"),
        ({"metric": "recovered"}, "metric"),
        ({"other": [1, 2]}, "clean_prompt"),
    ):
        with pytest.raises(SteeringValidationError) as found:
            plan_of(Sweep(**{**alone, **change}), toy.engine)
        assert found.value.parameter == parameter


def test_a_cell_of_each_layer_is_checked_before_anything_runs() -> None:
    toy = Toy()
    plan_of(Sweep(**ASKED, alpha=0.5, mask={"indices": [9]}), toy.engine)
    assert len(toy.checked) == 3
    ((entry,),) = toy.checked[0]["post_block"].values()
    assert entry["alpha"] == 0.5 and entry["mask"] == {"indices": [9]}
