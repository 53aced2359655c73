# SPDX-License-Identifier: Apache-2.0
"""Early checks of vector files, before the engine starts, which takes minutes.

The hook points of each layer are known once the model is loaded; everything else is
checked here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.v1.residual.before_fork import end_openmp_threads
from vllm.v1.residual.sizes import num_layers, torch_dtype
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend.admission import SteeringAdmission
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.spec.files import read_module
from vllm.v1.steering.spec.named import NamedFiles
from vllm.v1.steering.spec.parse import HOOKS, SteeredModel
from vllm.v1.steering.spec.provenance import Source, norms_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.config.steering import SteeringConfig


def check_files(
    config: "SteeringConfig", model_config: "ModelConfig", named: NamedFiles
) -> None:
    """Read every file, and refuse those that do not fit the model or the limits.

    Args:
        config: has the paths by module name, and the limits.
        model_config: the model's configuration.
        named: the probes and SAEs that entries may name.

    Raises:
        SteeringValidationError: a file is invalid; the message names the module, the
            file, the problem and the remedy.

    """
    layers = range(num_layers(model_config))
    model = SteeredModel(
        dict.fromkeys(layers, HOOKS),
        model_config.get_hidden_size(),
        torch_dtype(model_config),
        config.max_operations,
        config.bank_bytes,
        model_config.max_model_len,
        named,
    )
    admission = SteeringAdmission(model, SteeringModules())
    for name, path in config.modules.items():
        with about_module(name, path):
            module = read_module(path)
            parsed = admission.parse_named(module.vectors)
            module.provenance.check_norms(norms_of(parsed), Source(path))
            admission.checked(parsed)
    end_openmp_threads()


@contextmanager
def about_module(name: str, path: str) -> Iterator[None]:
    """Add the module's name to errors, because several files may be checked."""
    try:
        yield
    except SteeringValidationError as error:
        raise SteeringValidationError(
            f"--steering-modules {name}={path}: {error.args[0]}",
            parameter=error.parameter,
            value=error.value,
        ) from error
