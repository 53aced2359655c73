# SPDX-License-Identifier: Apache-2.0
from fork.building.builder import build
from tests.fork._checkout import Mini


def test_extras_are_split_from_requirements(mini: Mini) -> None:
    metadata = build(mini.order()).metadata
    assert metadata.install_requires() == [
        "regex",
        'torch==2.13.0; platform_machine == "x86_64"',
        "pyarrow>=20",
    ]
    assert metadata.extras_require() == {
        "audio": ["av", 'soxr; sys_platform == "linux"'],
        "ray": ["ray[data]>=2.55"],
    }


def test_only_the_cpu_build_drops_what_breaks_beside_a_cpu_torch(mini: Mini) -> None:
    from dataclasses import replace

    metadata = build(replace(mini.order(), device="cuda")).metadata
    assert metadata.version == "1.2.3+clearbox.1"
    assert 'torchvision; platform_machine != "riscv64"' in metadata.requires
    assert "torchaudio" in metadata.requires
