# SPDX-License-Identifier: Apache-2.0
import dataclasses
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models import TOKENIZER
from vllm.config.capture import CaptureConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.engine_args import capture_config
from vllm.v1.capture.errors import CaptureValidationError


def configured(*arguments: str, **more: Any) -> CaptureConfig:
    """The configuration of a server started with these arguments.

    `more` are fields of `EngineArgs` that the command line does not have.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    start = ["--model", str(TOKENIZER), "--capture-consumers", "logging"]
    chosen = parser.parse_args([*start, *arguments])
    model = SimpleNamespace(
        get_hidden_size=lambda: 2048,
        is_encoder_decoder=False,
        get_total_num_hidden_layers=lambda: 16,
        dtype=torch.bfloat16,
    )
    scheduler = SimpleNamespace(max_num_batched_tokens=8192)
    args = dataclasses.replace(EngineArgs.from_cli_args(chosen), **more)
    return capture_config(args, model, scheduler)  # type: ignore[arg-type]


def test_without_options_the_engine_waits_for_its_consumers() -> None:
    config = configured()
    assert config.overload_policy == "block"
    assert (config.dispatch_queue_size, config.dispatch_queue_bytes) == (1024, 2**28)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Pretend to have a GPU with this much memory."""
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: gib << 30)


@pytest.mark.parametrize(
    ("gib", "utilization", "mib"), [(80, 0.9, 1024), (80, 0.15, 512), (4, 0.9, 256)]
)
def test_on_a_gpu_whole_steps_have_room_within_a_share_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, utilization: float, mib: int
) -> None:
    on_a_gpu(monkeypatch, gib)
    chosen = configured("--gpu-memory-utilization", str(utilization)).staging_bytes
    assert chosen == mib << 20


def test_staging_of_a_named_size_has_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, 80)
    assert configured("--capture-staging-bytes", "9000").staging_bytes == 9000


def test_staging_of_less_than_a_row_is_refused() -> None:
    given = ("--capture-consumers", "inline", "--capture-staging-bytes")
    with pytest.raises(ValueError, match="of 4096 bytes.*give at least 8192"):
        configured(*given, "8191")
    assert configured(*given, "8192").rows_per_step(4096) == 1


def test_without_a_gpu_staging_memory_is_small() -> None:
    assert configured().staging_bytes == 256 << 20


def test_overload_options_reach_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "spill"
    config = configured(
        *("--capture-overload-policy", "spill"),
        *("--capture-dispatch-queue-size", "7"),
        *("--capture-dispatch-queue-bytes", "4096"),
        *("--capture-spill-dir", str(folder)),
        *("--capture-spill-max-bytes", "12345"),
    )
    assert config.overload_policy == "spill"
    assert (config.dispatch_queue_size, config.dispatch_queue_bytes) == (7, 4096)
    assert (config.spill_folder, config.spill_max_bytes) == (folder, 12345)
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_spill_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "below")
    with pytest.raises(CaptureValidationError) as refused:
        configured("--capture-overload-policy", "spill", "--capture-spill-dir", folder)
    assert "--capture-spill-dir" in str(refused.value)
    assert folder in str(refused.value)


def test_spilling_without_a_folder_uses_a_temporary_one_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "vllm-capture-spill").write_text("of another user, who came first")
    assert configured("--capture-overload-policy", "spill").spill_folder.is_dir()


def test_an_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configured("--capture-overload-policy", "ignore")
    assert "block" in capsys.readouterr().err


def test_graphsafe_keys_are_accepted_under_both_names() -> None:
    options = ("--capture-graphsafe-key", "3:post_block")
    config = configured(*options, capture_graphsafe_keys=["resid_pre.0", "all:all"])
    assert config.graphsafe_keys == ["3:post_block", "resid_pre.0", "all:all"]
    one = configured(capture_graphsafe_key="3:post_block")
    assert one.graphsafe_keys == ["3:post_block"]


def test_a_whole_configuration_is_refused_with_what_to_use() -> None:
    with pytest.raises(CaptureValidationError, match=r"capture_consumers=\[\.\.\.\]"):
        configured(capture_consumers_config_override=CaptureConfig())


def test_the_front_end_that_drops_the_fields_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(CaptureValidationError, match="Rust front end"):
        configured()


@pytest.mark.parametrize(
    "given",
    [
        "filesystem:fsync=maybe,root=ROOT",
        "arrow:root=ROOT,format=csv",
        "inline:max_inflight_bytes=-1",
        "memory:max_bytes=0",
        "patch_source:most=1",
        "logging:instance_name=log,level=LOUD",
    ],
)
def test_wrong_parameters_are_refused_before_the_model_is_loaded(
    tmp_path: Path, given: str
) -> None:
    name = "log" if "log" in given else given.partition(":")[0]
    with pytest.raises(CaptureValidationError, match=f"'{name}' rejects") as refused:
        configured("--capture-consumers", given.replace("ROOT", str(tmp_path)))
    assert refused.value.parameter == "capture_consumers"


def test_a_class_in_place_of_its_instance_is_refused_by_name() -> None:
    arguments: Any = EngineArgs(
        model=str(TOKENIZER), capture_consumers=[LoggingConsumer]
    )
    with pytest.raises(CaptureValidationError, match="LoggingConsumer' is a class"):
        capture_config(arguments, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", ["3", "post_block:3", "-1:post_block", "²:post_block", "3:x"]
)
def test_a_key_that_is_no_layer_and_hook_is_refused(key: str) -> None:
    with pytest.raises(CaptureValidationError, match="LAYER:HOOK"):
        configured(f"--capture-graphsafe-key={key}")


@pytest.mark.parametrize("key", ["16:post_block", "post_block.16"])
def test_a_key_of_a_layer_that_the_model_lacks_is_refused(key: str) -> None:
    with pytest.raises(CaptureValidationError, match="layers are 0 to 15"):
        configured("--capture-graphsafe-key", key)


def test_options_of_the_activation_store_reach_the_configuration(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "new"
    config = configured(
        *("--activation-store-gb", "1.5", "--activation-store-path", str(folder)),
        *("--activation-store-disk-gb", "0.5"),
    )
    assert (config.store_bytes, config.store_disk_bytes) == (
        1_500_000_000,
        500_000_000,
    )
    assert config.store_path == str(folder) and not list(folder.iterdir())
    assert configured().store_bytes == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gb": 0}, "--activation-store-gb 0: it must be a number above 0"),
        ({"gb": "2GB"}, "--activation-store-gb '2GB': it must be a number"),
        ({"gb": float("nan")}, "--activation-store-gb nan"),
        ({"path": "/x", "disk_gb": 1}, "--activation-store-path '/x': it needs"),
        ({"gb": 1, "path": "/x"}, "it needs --activation-store-disk-gb"),
        ({"gb": 1, "disk_gb": 2}, "it needs --activation-store-path"),
        ({"gb": 1, "disk_gb": -2, "path": "/x"}, "--activation-store-disk-gb -2"),
        ({"gb": 1, "path": "/dev/null/x", "disk_gb": 1}, "cannot be written to"),
        ({"gb": 1, "path": "/tmp", "disk_gb": 1e7}, "GB free; give less than that"),
    ],
)
def test_an_activation_store_that_cannot_be_is_refused(
    options: dict[str, Any], named: str
) -> None:
    given = {f"activation_store_{name}": value for name, value in options.items()}
    with pytest.raises(CaptureValidationError) as refused:
        configured(**given)
    assert named in str(refused.value) and refused.value.parameter in given


def test_an_activation_store_needs_the_prefix_cache_and_a_consumer() -> None:
    with pytest.raises(CaptureValidationError, match="--no-enable-prefix-caching"):
        configured("--activation-store-gb", "1", "--no-enable-prefix-caching")
    with pytest.raises(CaptureValidationError, match="needs a consumer"):
        configured("--activation-store-gb", "1", capture_consumers=[])
