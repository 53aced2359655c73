# SPDX-License-Identifier: Apache-2.0
"""Our commands list and check their own options before heavy modules are loaded."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.entrypoints.cli import engine_command
from vllm.entrypoints.cli.engine_command import (
    SERVER,
    check_before_torch,
    check_own_options,
    misspelt,
)
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

CAPTURE = ["capture", "in.jsonl", "--model", "m", "--out", "out"]
PATCH = ["patch", "clean", "corrupt", "--model", "m"]
PROBE = ["probe", "train", "--model", "m", "--data", "a.jsonl"]
PROBE += ["--out", "b.safetensors"]


def answer(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", *words])
        with pytest.raises(SystemExit) as ended:
            check_own_options(sys.argv)
    assert ended.value.code == status
    return "".join(capsys.readouterr())


def test_help_has_the_commands_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "probe", "train", "--help", status=0)
    assert text.count("(required)") == 3 and "--help=all" in text
    assert "--model MODEL         Name or folder of the model. (required)" in text
    assert "--tensor-parallel-size" not in text
    assert "--shard-size" in answer(capsys, "capture", "-h", status=0)
    assert "Try layers" in answer(capsys, "steer", "--help", status=0)
    assert "--help=all" not in answer(capsys, "steer", "show", "--help", status=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*CAPTURE, "--limit", "few"], "argument --limit: invalid int value"),
        ([*CAPTURE, "--shard-size", "2 apples"], "is not a size"),
        ([*CAPTURE, "--dtype", "float32", "--layers", "4-2"], "descending range"),
        (PROBE[:-2], "required: --out"),
        ([*PROBE, "--hook", "residual"], "is not a hook point"),
        (["steer", "extrac"], "invalid choice"),
        ([*CAPTURE, "--lyers", "3"], "--lyers; did you mean --layers?"),
        ([*PROBE, "--max-modl-len=64"], "did you mean --max-model-len?"),
        (["patch", "a", "b", "--no-enforce-eagr"], "did you mean --enforce-eager?"),
        (["steer"], "required: COMMAND"),
        ([*PATCH, "--heads", "0,few"], "'few' is neither a number nor L-L"),
        (["serve", "m", "--max-steering-ops", "few"], "invalid int value: 'few'"),
        (["serve", "m", "--capture-overload-policy=wait"], "choose from 'block'"),
        (["serve", "--enable-steerng", "m"], "did you mean --enable-steering?"),
    ],
)
def test_a_wrong_option_ends_the_command(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in answer(capsys, *words, status=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (CAPTURE[:-2], "out: give the data set's folder with --out DIR"),
        ([*CAPTURE, "--server", "http://host"], "not both"),
        (["capture", "gone.jsonl", *CAPTURE[2:]], "'gone.jsonl' is no file or folder"),
        (PATCH, "answer: give it with --answer"),
        ([*PATCH, "--metric", "kl", "--json", "no/f.json"], "there is no folder 'no'"),
    ],
)
def test_options_that_do_not_fit_end_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["vllm", *words])
    with pytest.raises(SystemExit, match=said):
        check_own_options(sys.argv)


@pytest.mark.parametrize(
    "words",
    [
        *([], ["serve", "--help"], CAPTURE, PROBE, ["capture", "--help=all"]),
        [*CAPTURE, "--dtype", "float32", "--max_tokens", "4", "--no-enforce-eager"],
        [*CAPTURE, "--tensor-par", "2", "--sae", "a=b", "--enable-patching"],
        [*CAPTURE, "--compilation-config.mode=0", "-O0", "--kv-cache-dtype", "auto"],
        ["capture", "--config", "all.yaml", "--limit", "few"],
        ["serve", "m", "--interp", "--max_steering_ops", "4", "--prot", "80"],
        ["serve", "--hook-points", "q", "all", "--sae=a=b", "--max-patch-slots=9"],
    ],
)
def test_the_rest_is_left_to_upstreams_parser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()
    texts = [{"text": f"{n}", "label": n % 2} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    argv = ["vllm", *words]
    monkeypatch.setattr(sys, "argv", argv)
    check_own_options(argv)
    assert argv == ["vllm", *words]


def test_no_option_of_a_server_is_taken_for_one_of_ours() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    words = [word for one in parser._actions for word in one.option_strings]
    assert "--enable-steering" in words
    assert not [word for word in words if misspelt(word, SERVER)]


REFUSED = [
    "capture gone.txt --model m --out o",
    "check --prompt",
    "patch a b --answer c",
    "probe eval gone --model m --data gone.csv",
    "probe train --data gone.csv --model m --out o.safetensors",
    "probe train --data gone.csv --model m --out o",
    "serve m --steering-bank-mib few",
    "steer apply --vectors gone --model m",
    "steer convert a",
    "steer eval --vectors a --pairs gone --harmless gone --model m",
    "steer extract --pairs gone --model m --out o.safetensors",
    "steer show a --feature b",
    "steer sweep --vectors a --server u --model m",
]


def test_a_command_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        f"for words in {REFUSED}:\n"
        "    sys.argv = ['/bin/vllm', *words.split()]\n"
        "    try: import vllm\n"
        "    except SystemExit as ended: assert ended.code, words\n"
        "    else: raise AssertionError(words)\n"
        "heavy = {'torch', 'transformers', 'vllm.env_override'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_command_is_checked_once_and_not_in_its_child_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = ["/bin/vllm", "probe", "train"]
    monkeypatch.setattr(sys, "argv", wrong)
    with monkeypatch.context() as child:
        child.setattr(multiprocessing, "parent_process", object)
        check_before_torch(wrong)
    with pytest.raises(SystemExit):
        check_before_torch(wrong)
    right = ["/bin/vllm", "serve", "model"]
    check_before_torch(right)
    monkeypatch.setattr(engine_command, "OWN_COMMANDS", None)
    check_own_options(right)
