# SPDX-License-Identifier: Apache-2.0
"""Names and forms of the earlier fork: accepted, or refused with the alternative."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.v1.capture.consumers._drive import context
from vllm.config import VllmConfig
from vllm.config.capture import CaptureConfig, parse_consumer
from vllm.v1.capture import engine_args
from vllm.v1.capture.capabilities import step_capabilities
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.consumers.storage.options import global_spec
from vllm.v1.capture.controller import SteeringController
from vllm.v1.capture.engine_args import capture_config, ready_instances
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.step_consumers import StepSpecs
from vllm.v1.capture.registry import check_consumer
from vllm.v1.capture.types import CaptureSpec
from vllm.v1.residual.frontend.engine_args import EngineOptions


class Ready(CaptureConsumer):
    location = "driver"

    def on_capture(self, key: Any, tensor: Any, sidecar: Any) -> None:
        """Nothing."""


class Named(Ready):
    instance_name = "mine"


class InStep(Ready):
    def on_step(self, view: Any) -> None:
        """Never called."""


class Sync(Ready):
    execution = "sync"


class Plain:
    """A consumer within the step, without a base class."""

    location = "worker"
    execution = "sync"

    def global_capture_spec(self) -> None:
        """Nothing."""

    def on_step(self, view: Any) -> None:
        """Nothing."""


def configured(*consumers: Any) -> CaptureConfig:
    args: Any = EngineOptions(capture_consumers=list(consumers))
    model: Any = SimpleNamespace(get_hidden_size=lambda: 8, dtype=torch.float32)
    nothing: Any = None
    return capture_config(args, model, nothing)


def test_the_second_ready_instance_of_a_class_has_a_number() -> None:
    first, second, third = Ready(None, {}), Ready(None, {}), Ready(None, {})  # type: ignore[arg-type]
    config = configured(first, second, third)
    assert config.driver_instances == ["Ready", "Ready#2", "Ready#3"]
    assert list(ready_instances(config).values()) == [first, second, third]
    engine_args._READY.pop(config.driver_key)


def test_two_instances_with_the_same_given_name_are_refused() -> None:
    with pytest.raises(CaptureValidationError, match="two capture consumers are named"):
        configured(Named(None, {}), Named(None, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InStep, 'only of a class with execution = "sync"'),
        (Sync, "leaves on_step undefined"),
        (SteeringController, "leaves global_capture_spec, decide undefined"),
        (Plain(), "name its entry point"),
    ],
)
def test_what_cannot_run_within_a_step_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(CaptureValidationError, match=message):
        check_consumer(kind, "plug_in")


def test_a_consumer_within_the_step_needs_no_base_class() -> None:
    check_consumer(Plain, "plug_in")
    can = step_capabilities(Plain())
    assert can.status() == {} and not can.warmup(torch.device("cpu"), torch.float32)


def test_its_names_are_here() -> None:
    from vllm.v1 import capture
    from vllm.v1.capture import consumer
    from vllm.v1.capture.step_view import StepCaptureView, StepRequestView
    from vllm.v1.worker import steering_action_queue as actions

    assert capture.SteeringController is SteeringController
    assert issubclass(SteeringController, capture.SyncCaptureConsumer)
    assert StepCaptureView and StepRequestView
    assert {"RequestSteeringOverride", "SteeringAction"} <= set(actions.__all__)
    assert consumer.SyncCaptureConsumer is capture.SyncCaptureConsumer
    assert actions.get_steering_action_queue() is None
    queue = actions.SteeringActionQueue()
    actions.install_steering_action_queue(queue)
    try:
        assert actions.get_steering_action_queue() is queue
    finally:
        actions.install_steering_action_queue(None)


def test_consumers_on_threads_steer_if_the_operator_asked_for_it() -> None:
    args: Any = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        max_dynamic_steering_configs=None,
    )
    assert not engine_args._takes_actions(args, [])
    assert engine_args._takes_actions(args, [parse_consumer("logging")])
    args.max_dynamic_steering_configs = 2
    assert engine_args._takes_actions(args, [])
    args.tensor_parallel_size = 2
    with pytest.raises(CaptureValidationError, match="with 2 ranks only consumers"):
        engine_args._takes_actions(args, [])


def test_a_consumer_within_the_step_needs_steps_that_follow_one_another() -> None:
    steps = [parse_consumer("logging")]
    args: Any = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=2,
        speculative_config=None,
        async_scheduling=None,
    )
    with pytest.raises(CaptureValidationError, match="leave out data_parallel_size"):
        engine_args._check_steps(args, steps)
    args.data_parallel_size, args.speculative_config = 1, {"method": "ngram"}
    with pytest.raises(CaptureValidationError, match="leave out speculative_config"):
        engine_args._check_steps(args, steps)
    args.speculative_config, args.pipeline_parallel_size = None, 2
    with pytest.raises(CaptureValidationError, match="add --no-async-scheduling"):
        engine_args._check_steps(args, steps)
    args.async_scheduling = False
    engine_args._check_steps(args, steps)


def test_a_consumer_within_the_step_sees_the_layers_of_one_stage() -> None:
    specs: Any = object.__new__(StepSpecs)
    hooks: Any = {"post_block": [0, 3], "pre_attn": [1]}
    specs._specs = {"mine": CaptureSpec(hooks=hooks, positions="all")}
    specs._starts = [0]
    specs.check(context())
    specs._starts = [0, 2]
    with pytest.raises(CaptureValidationError, match="'mine' sees layers .0, 1, 3."):
        specs.check(context())
    specs._specs = {"mine": CaptureSpec(hooks={"mlp_in": [0]}, positions="all")}
    with pytest.raises(CaptureValidationError, match="no hook point 'mlp_in'"):
        specs.check(context())


def test_the_configuration_has_its_other_names() -> None:
    from vllm.config.capture_consumers import CaptureConsumersConfig
    from vllm.model_executor.layers.steering import VALID_HOOK_POINT_NAMES
    from vllm.v1.capture.config import CaptureConsumerSpec, parse_consumer_spec

    spec = parse_consumer_spec("logging:level=DEBUG")
    assert isinstance(spec, CaptureConsumerSpec) and spec.params == {"level": "DEBUG"}
    assert "post_block" in VALID_HOOK_POINT_NAMES
    read: Any = VllmConfig.capture_consumers_config.fget  # type: ignore[attr-defined]
    config = CaptureConsumersConfig(consumers=[spec])
    assert read(SimpleNamespace(capture_config=config)).consumers == [spec]
    assert read(SimpleNamespace(capture_config=CaptureConfig())) is None


def test_parameters_may_be_written_as_python_writes_them(tmp_path: Path) -> None:
    text = f"filesystem:root={tmp_path},fsync=True,coalesce_max_bytes=0"
    params = FilesystemParams.parse(parse_consumer(text).params)
    assert params.fsync is True
    assert params.coalesce_max_bytes == FilesystemParams.coalesce_max_bytes
    with pytest.raises(CaptureValidationError, match="true or false"):
        FilesystemParams.parse({"root": str(tmp_path), "fsync": "yes"})


@pytest.mark.parametrize(
    ("text", "hooks"),
    [("post_block:all", {"post_block": [0, 1]}), ("pre_attn:1", {"pre_attn": [1]})],
)
def test_global_hooks_may_be_a_hook_point_and_its_layers(
    text: str, hooks: dict[str, list[int]]
) -> None:
    points = {layer: ["pre_attn", "post_attn", "post_block"] for layer in range(2)}
    config = MagicMock(capture_config=CaptureConfig(hook_points=points))
    config.model_config.dtype = torch.float32
    config.parallel_config.enable_expert_parallel = False
    given = parse_consumer(f"filesystem:root=/x,global_hooks={text}").params
    spec = global_spec(given["global_hooks"], "last_prompt", config, "filesystem")
    assert spec is not None and spec.hooks == hooks


def test_the_log_has_a_level(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = None
    consumer = LoggingConsumer(nothing, {"level": "DEBUG"})
    key: Any = ("r", 0, "post_block")
    logger = logging.getLogger("vllm.v1.capture.consumers.logging")
    logger.addHandler(caplog.handler)
    try:
        logger.setLevel(logging.DEBUG)
        facts = {"client_request_id": "r", "dtype": "float32"}
        consumer.on_capture(key, torch.ones(1, 4), facts)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    with pytest.raises(CaptureValidationError, match=r"logging\.level"):
        LoggingConsumer(nothing, {"level": "loud"})
