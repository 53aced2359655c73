# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

from vllm.v1.worker.residual_nodes import difference, weights_of

PIECE = 1 << 20
FACTS = {"version": "1", "--capture-consumers": "{}", "weights": "a"}


def test_nodes_that_agree_have_no_difference() -> None:
    assert difference(FACTS, dict(FACTS)) is None


def test_a_difference_is_told_with_both_values_and_the_remedy() -> None:
    for name, remedy in (
        ("version", "same wheel"),
        ("weights", "copy one checkpoint"),
        ("--capture-consumers", "same options"),
    ):
        found = difference(FACTS, FACTS | {name: "other"})
        assert (
            found is not None and f"{name} is other there, and {FACTS[name]}" in found
        )
        assert remedy in found


def test_weights_differ_by_name_size_and_content(tmp_path: Path) -> None:
    def stored(
        name: str, start: bytes, rest: int, end: bytes, middle: bytes = b"x"
    ) -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        half = PIECE // 2
        content = start + b"x" * half + middle + b"x" * (half + rest) + end
        (tmp_path / name).write_bytes(content)
        return weights_of(str(tmp_path))

    first = stored("a.safetensors", b"one", 5, b"end")
    assert first == stored("a.safetensors", b"one", 5, b"end")
    others = {
        stored("b.safetensors", b"one", 5, b"end"),
        stored("a.safetensors", b"two", 5, b"end"),
        stored("a.safetensors", b"one", 6, b"end"),
        stored("a.safetensors", b"one", 5, b"add"),
        stored("a.safetensors", b"one", 5, b"end", middle=b"y"),
    }
    assert len(others | {first}) == 6
    assert weights_of("meta/model") == "meta/model"


WATCHED = """
import sys, time
from vllm.v1.worker import residual_nodes as node_watch

node_watch.get_ip = lambda: "127.0.0.1"
rank, path = int(sys.argv[1]), sys.argv[2]

def gathered(value):
    import json, os
    if rank == 0:
        with open(path + ".part", "w") as file:
            json.dump([value, [1, "far", None]], file)
        os.rename(path + ".part", path)
    while not os.path.exists(path):
        time.sleep(0.05)
    return json.load(open(path))

node_watch.watch_nodes(rank, rank, ("near", "far")[rank], gathered)
print("watching", flush=True)
time.sleep(100)
"""


def test_the_end_of_a_node_ends_the_others_with_its_name(tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WATCHED, str(rank), str(tmp_path / "places")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in both:
            assert process.stdout is not None
            while "watching" not in (line := process.stdout.readline()):
                assert line, "it ended"
        both[1].kill()
        said, _ = both[0].communicate(timeout=30)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert both[0].returncode == 1
    assert "Node far (127.0.0.1) is gone, and rank 1 with it" in said
