# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fork.building.builder import MANIFEST, Faulty, build_tree
from fork.errors import BuildFailure
from tests.fork._checkout import Mini


def _snapshot(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


def test_the_tree_holds_upstream_woven_and_added_files(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    engine = (mini.out / "vllm/engine.py").read_text()
    assert engine == "def step(x):\n    y = x + 1\n    count(y)\n    return y\n"
    assert (mini.out / "vllm/data/table.json").read_text() == "{}\n"
    assert (mini.out / "vllm/ours/new.py").read_text() == "VALUE = 1\n"
    assert os.access(mini.out / "vllm/tool", os.X_OK)


def test_our_files_are_live(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    mini.write("vllm/ours/new.py", "VALUE = 2\n")
    assert (mini.out / "vllm/ours/new.py").read_text() == "VALUE = 2\n"


def test_the_tree_survives_a_move_of_the_checkout(mini: Mini, tmp_path: Path) -> None:
    build_tree(mini.order(), mini.out)
    mini.checkout.root.rename(tmp_path / "moved")
    assert (tmp_path / "moved/build/cpu/vllm/ours/new.py").read_text() == "VALUE = 1\n"


def test_the_tree_imports_under_the_fork_version(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    code = (
        "import importlib.metadata as m, vllm, vllm._version as v; "
        "print(vllm.__file__, v.__version__, v.__version_tuple__, m.version('vllm'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(mini.out)},
        cwd=mini.checkout.root,  # contains a folder vllm/ that must not shadow the tree
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == [
        str(mini.out / "vllm/__init__.py"),
        "1.2.3+clearbox.1.cpu (1, 2, 3, 'clearbox.1.cpu') 1.2.3+clearbox.1.cpu\n",
    ]


def test_the_metadata_is_upstreams_and_ours(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    folder = mini.out / "vllm-1.2.3+clearbox.1.cpu.dist-info"
    found = importlib.metadata.PathDistribution(folder)
    assert found.requires == [
        "regex",
        'torch==2.13.0; platform_machine == "x86_64"',
        'av; extra == "audio"',
        'soxr; sys_platform == "linux" and extra == "audio"',
        "pyarrow>=20",
        'ray[data]>=2.55; extra == "ray"',
    ]
    groups = {point.group for point in found.entry_points}
    assert groups == {
        "console_scripts",
        "vllm.general_plugins",
        "vllm.steering_forms",
        "vllm.capture_consumers",
        "inspect_ai",
    }
    assert (folder / "licenses/upstream/LICENSE").read_text() == "upstream's\n"
    assert (folder / "licenses/LICENSE").read_text() == "ours\n"


def test_a_second_build_places_nothing(mini: Mini, capsys) -> None:
    build_tree(mini.order(), mini.out)
    before = (mini.out / MANIFEST).read_bytes()
    capsys.readouterr()
    build_tree(mini.order(), mini.out)
    assert "0 placed, 0 removed" in capsys.readouterr().out
    assert (mini.out / MANIFEST).read_bytes() == before


def test_new_files_are_linked_and_removed_ones_unlinked(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    mini.write("vllm/ours/later.py", "")
    (mini.checkout.overlay / "ours/new.py").unlink()
    build_tree(mini.order(), mini.out)
    assert sorted(os.listdir(mini.out / "vllm/ours")) == ["later.py"]


def test_an_emptied_folder_goes(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    (mini.out / "vllm/ours/__pycache__").mkdir()
    (mini.checkout.overlay / "ours/new.py").unlink()
    build_tree(mini.order(), mini.out)
    assert not (mini.out / "vllm/ours").exists()


def test_only_a_changed_edit_file_is_woven_again(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    woven: list[str] = []
    from fork.weaving import weaver

    original = weaver.weave_file

    def record(task: weaver.Task) -> weaver.WovenFile:
        woven.append(task.module)
        return original(task)

    monkeypatch.setattr(weaver, "weave_file", record)
    build_tree(mini.order(), mini.out)
    build_tree(mini.order(), mini.out)
    assert woven == ["vllm/engine.py"]
    path = mini.checkout.edits / "vllm/engine.py"
    path.write_text(path.read_text().replace("count(y)", "tally(y)"))
    build_tree(mini.order(), mini.out)
    assert woven == ["vllm/engine.py"] * 2
    assert "tally(y)" in (mini.out / "vllm/engine.py").read_text()


def test_a_removed_edit_file_restores_upstream(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    (mini.checkout.edits / "vllm/engine.py").unlink()
    build_tree(mini.order(), mini.out)
    assert "count" not in (mini.out / "vllm/engine.py").read_text()


def test_a_file_changed_in_the_tree_is_restored_and_the_cache_untouched(
    mini: Mini,
) -> None:
    build_tree(mini.order(), mini.out)
    (mini.out / "vllm/data/table.json").write_text("changed")
    build_tree(mini.order(), mini.out)
    assert (mini.out / "vllm/data/table.json").read_text() == "{}\n"


def test_large_files_are_linked_to_the_cache_and_read_only(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    stat = (mini.out / "vllm/big.so").stat()
    assert stat.st_nlink == 2
    assert stat.st_mode & 0o222 == 0
    assert (mini.out / "vllm/engine.py").stat().st_nlink == 1


def test_stale_bytecode_goes_with_its_source(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    cached = mini.out / "vllm/__pycache__"
    cached.mkdir()
    for name in ("engine", "__init__"):
        (cached / f"{name}.cpython-311.pyc").touch()
    (mini.checkout.edits / "vllm/engine.py").unlink()
    build_tree(mini.order(), mini.out)
    assert os.listdir(cached) == ["__init__.cpython-311.pyc"]


def test_an_edit_file_needs_its_upstream_module(mini: Mini) -> None:
    edits = mini.checkout.edits
    (edits / "vllm/engine.py").rename(edits / "vllm/motor.py")
    with pytest.raises(Faulty, match="edits vllm/motor.py, which does not exist"):
        build_tree(mini.order(), mini.out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EDITS = []", "say in a docstring"),
        ('"""Why."""', "needs a list EDITS"),
        ('"""Why."""\nEDITS = [1]', "edits of fork.language only"),
        ('"""Why."""\nimport nothing_here', "does not load"),
    ],
)
def test_a_broken_edit_file_is_named(mini: Mini, text: str, message: str) -> None:
    mini.write("fork/edits/vllm/engine.py", text)
    with pytest.raises(Faulty, match=f"fork/edits/vllm/engine.py.*{message}"):
        build_tree(mini.order(), mini.out)


def test_a_failed_build_reports_everything_and_changes_nothing(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    before = _snapshot(mini.out)
    edits = mini.checkout.edits / "vllm/engine.py"
    edits.write_text(edits.read_text().replace("y = x + 1", "y = x + 2"))
    mini.write("vllm/data/table.json", "ours")
    mini.write("vllm/ours/later.py", "")
    with pytest.raises(Faulty) as caught:
        build_tree(mini.order(), mini.out)
    assert {fault.kind for fault in caught.value.faults} == {
        "MissingAnchor",
        "Shadowing",
    }
    assert _snapshot(mini.out) == before


def test_a_failed_first_build_leaves_nothing(mini: Mini) -> None:
    mini.write("vllm/data/table.json", "ours")
    with pytest.raises(Faulty):
        build_tree(mini.order(), mini.out)
    assert not mini.out.exists()


def test_an_update_that_was_cut_off_is_repaired(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tree(mini.order(), mini.out)
    (mini.checkout.edits / "vllm/engine.py").unlink()
    mini.write("vllm/ours/later.py", "")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("fork.building.builder._place", fail)
        with pytest.raises(OSError, match="disk full"):
            build_tree(mini.order(), mini.out)
    assert "count" in (mini.out / "vllm/engine.py").read_text()
    build_tree(mini.order(), mini.out)
    assert "count" not in (mini.out / "vllm/engine.py").read_text()


def test_a_folder_that_no_build_made_is_left_alone(mini: Mini) -> None:
    mini.out.mkdir(parents=True)
    (mini.out / "mine.txt").write_text("precious")
    with pytest.raises(BuildFailure, match="was not made by fork build"):
        build_tree(mini.order(), mini.out)
    assert (mini.out / "mine.txt").read_text() == "precious"


def test_the_manifest_names_every_file(mini: Mini) -> None:
    build_tree(mini.order(), mini.out)
    manifest = json.loads((mini.out / MANIFEST).read_text())
    assert set(manifest) | {MANIFEST} == set(_snapshot(mini.out))
