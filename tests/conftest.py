# SPDX-License-Identifier: Apache-2.0
import gc
import inspect
import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.scripts import Run
from tests.support.starts import shorten
from tests.support.subprocess import MARK

ROOT = Path(__file__).parents[1]

# Tests start engines in their own process, small, and without a network. The variables
# are read when vllm is imported, so they are set before any test module is.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Set, so that the examples, which are quiet, do not change them for other tests.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
os.environ.setdefault("PYTHONWARNINGS", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

# Threads that synchronize in every kernel cost seconds per step as soon as another
# process needs a core, and gain nothing with models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch does not quote the paths of its libraries for the C++ compiler.
if " " in sys.prefix:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# The system chooses cores: engines of several processes must not be pinned to one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# No deadline, because the machine also runs engines.
settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def read_the_environment_anew() -> None:
    """Clear upstream's cache of environment variables after each test."""
    if "vllm.envs" in sys.modules:
        sys.modules["vllm.envs"].disable_envs_cache()


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the launch state for tests that call ops of taps directly.

    It may be set by an earlier engine, and is reset after each test.
    """
    from vllm.model_executor.layers.residual.capture_op import Launch
    from vllm.model_executor.layers.residual.steer_op import EarlyAdditions

    monkeypatch.setattr(Launch, "taps", frozenset())
    monkeypatch.setattr(Launch, "families", (frozenset(),))
    monkeypatch.setattr(Launch, "known", None)
    monkeypatch.setattr(Launch, "whole", False)
    yield
    EarlyAdditions.begun.clear()


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the consumers of `demo_llm` write: `tables` and `files`."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def demo_llm(demo_root: Path) -> Iterator[Any]:
    """An engine of the demo model with all features, for commands and examples."""
    from vllm import LLM

    opened = LLM(
        str(ROOT / "examples/demo_model/weights"),
        dtype="float32",
        enforce_eager=True,
        max_logprobs=-1,
        capture_consumers=[
            "inline",
            f"arrow:root={demo_root}/tables",
            f"filesystem:root={demo_root}/files,default_layout=sharded",
        ],
        enable_steering=True,
        max_steering_configs=16,
        steering_modules={"tone": str(ROOT / "examples/steering/tone.safetensors")},
        enable_readouts=True,
        enable_patching=True,
        hook_points=["z"],
    )
    yield opened
    opened.llm_engine.engine_core.shutdown()


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run code as a script in `tmp_path`, with the examples; returns its output.

    In this process, as most of a script's time is the import of vLLM. Engines are
    eager, which scripts do not need, and are stopped after the test.
    """
    from vllm import LLM

    opened: list[LLM] = []
    begin = LLM.__init__

    def begin_eagerly(llm: LLM, *arguments: Any, **options: Any) -> None:
        begin(llm, *arguments, **{"enforce_eager": True} | options)
        opened.append(llm)

    def run(*code: str) -> str:
        (tmp_path / "script.py").write_text("\n".join(code))
        runpy.run_path("script.py", run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setattr(LLM, "__init__", begin_eagerly)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield run
    for llm in opened:
        llm.llm_engine.engine_core.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[object]:
    """Let engines start quickly beside thousands of tests."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        try:
            return (yield)
        finally:
            patch.undo()
            gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Iterator[None]:
    """Stop a session's engine after the last of its tests, which are consecutive.

    Beside an engine without experts in a process none with experts can start.
    """
    yield
    shared = _shared_fixture(item)
    if shared is None or shared.scope != "session":
        return
    following = None if nextitem is None else _shared_with_others(nextitem)
    is_over = following != _shared_with_others(item)
    if is_over and inspect.isgeneratorfunction(shared.func):
        shared.finish(item._request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Escape captured text that is not valid Unicode: processes send it as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.hookimpl(trylast=True)  # when `-m` and `-k` have chosen
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Order the tests: long ones first, and those that share a fixture together.

    `make test` gives each process one group after another (`--dist loadgroup`). An
    engine or a server then starts once, not once in each process, and the processes
    end at about the same time.
    """
    shared = {item: name for item in items if (name := _shared_with_others(item))}
    sizes = Counter(shared.values())
    if hasattr(config, "workerinput"):
        # As pytest-xdist 3.8 writes its marks, which pytest 9.2 does not read.
        for item, name in shared.items():
            item._id = type(item._id).parse(f"{item.nodeid}@{name}")
            assert item.nodeid.endswith(name), "pytest reads another name"

    def rank(item: pytest.Item) -> tuple[bool, bool, int, str, bool]:
        name = shared.get(item, "")
        is_long = bool(item.get_closest_marker("e2e"))
        is_last = bool(item.get_closest_marker("last"))
        return not _is_apart(item), not is_long, -sizes[name], name, is_last

    items.sort(key=rank)


def _shared_with_others(item: pytest.Item) -> str | None:
    """The fixture that a test shares, with its parameter.

    Each value of a parameter has an engine of its own.
    """
    fixture = _shared_fixture(item)
    if fixture is None:
        return None
    chosen = item.callspec.indices if hasattr(item, "callspec") else {}
    name = fixture.argname
    return f"{fixture.baseid}:{name}:{chosen.get(name, 0)}"


def _shared_fixture(item: pytest.Item) -> Any:
    """The first fixture of wide scope that a test uses; None if there is none.

    Rather one with an end, such as an engine that is stopped after its last test.
    """
    if not isinstance(item, pytest.Function):
        return None
    used = item._fixtureinfo.name2fixturedefs
    # Fixtures of the widest scope come first.
    wide = [
        fixture
        for name in item.fixturenames
        if name in used
        and (fixture := used[name][-1]).scope != "function"
        and fixture.baseid.startswith("tests")
    ]
    ended = [one for one in wide if inspect.isgeneratorfunction(one.func)]
    return next(iter(ended or wide), None)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect tests in folders `apart` only in processes that other tests start."""
    is_apart = collection_path.parent.name == "apart"
    return True if is_apart and not os.environ.get(MARK) else None


def _is_apart(item: pytest.Item) -> bool:
    """Whether the test runs many tests in another process."""
    return item.path.name == "test_apart.py"
