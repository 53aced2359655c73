# SPDX-License-Identifier: Apache-2.0
"""Pages are consistent: links, commands, options and sizes."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from fork.__main__ import main as fork_main
from tests.docs._pages import PAGES, ROOT, blocks, page_name

FORK_COMMANDS = {"build", "check", "diff", "models", "torch"}
each_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "supported_models.md"], ids=page_name
)
def test_a_written_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) < 200


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s+", "-", word) for word in words}


@each_page
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@each_page
def test_shell_blocks_name_files_and_verbs_that_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for block in blocks(page, "sh"):
        for words in _commands(block):
            if words[0] == "make":
                named = {word for word in words[1:] if "=" not in word}
                assert named <= verbs, words
            for word in words:
                if re.match(r"(examples|benchmarks|requirements|fork)/", word):
                    assert (ROOT / word).exists(), words


def _commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    simple = (line for line in lines if "'" not in line and line.strip())
    return [words for line in simple if (words := shlex.split(line, comments=True))]


def test_every_fork_command_on_the_pages_is_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    for name in FORK_COMMANDS:
        monkeypatch.setattr(
            f"fork.commands.{name}.run", lambda _arguments, name=name: seen.append(name)
        )
    commands = [
        words[3 : words.index("|")] if "|" in words else words[3:]
        for page in PAGES
        for block in blocks(page, "sh")
        for words in _commands(block)
        if words[:3] == ["python", "-m", "fork"]
    ]
    for arguments in commands:
        with pytest.raises(TypeError):  # run() returned no exit status
            fork_main(arguments)
    assert set(seen) == FORK_COMMANDS
    assert len(seen) == len(commands), capsys.readouterr().err


def test_the_pages_of_the_site_are_all_in_its_navigation() -> None:
    # A plain loader does not know the tags of Material; ours are not affected.
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"'([\w/-]+\.md)'", str(site["nav"])))
    assert listed == {
        page.relative_to(ROOT / "docs").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    }


def test_the_readme_names_the_release_that_is_pinned() -> None:
    pins = tomllib.loads((ROOT / "fork" / "upstream.toml").read_text())
    for page in ("README.md", "docs/index.md"):
        assert f" {pins['version']}" in (ROOT / page).read_text()
    assert (
        f"## {pins['version']}+{pins['revision']}"
        in (ROOT / "CHANGELOG.md").read_text()
    )


def test_the_clients_page_has_every_method() -> None:
    page = (ROOT / "docs" / "reference" / "client.md").read_text()
    source = ROOT / "client" / "clearbox_client" / "client.py"
    (client,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    methods = [one.name for one in client.body if isinstance(one, ast.FunctionDef)]
    public = [name for name in methods if not name.startswith("_")]
    assert len(public) > 20
    assert not [name for name in public if not re.search(rf"\b{name}\b", page)]
