# SPDX-License-Identifier: Apache-2.0
"""Hook points for layers from outside the release, woven when the model is loaded.

Layers of the Transformers library and of plug-ins are analysed like upstream's at
build time. If the analysis succeeds, the layer becomes an instance of a subclass whose
`forward` has the taps. As the layer already exists, conditions on its configuration
have one known outcome, and the classes of its norms are known.
"""

import __future__

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.residual import tap
from vllm.model_executor.residual_weave.rules import NEVER_GIVEN, Rule

logger = init_logger(__name__)

_ON_SELF = re.compile(
    r"(not )?self(\.[a-zA-Z_]\w*)+"
    r"( (is|is not|==|!=|<|>|<=|>=) (None|True|False|-?\d+|\"[^\"]*\"|'[^']*'))?"
)
"""Conditions that compare an attribute of `self` with a constant."""
_Outcomes = tuple[tuple[str, bool], ...]
_Key = tuple[type[nn.Module], _Outcomes, tuple[str, ...], tuple[tuple[str, str], ...]]
_woven: dict[_Key, type[nn.Module]] = {}
"""Equal layers share a subclass, so that their compiled graphs stay equal."""


class NotWoven(Exception):
    """The layer cannot be woven; the message says why."""


def weave_layer(layer: nn.Module) -> None:
    """Give `layer` hook points, by making it an instance of a woven subclass.

    Called once per layer, after loading and before compilation.

    Raises:
        NotWoven: the analysis failed; the layer is unchanged.

    """
    cls = type(layer)
    if "forward" in vars(layer):
        raise NotWoven("its forward was replaced when it was loaded")
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    source = _source(owner)
    rule = _rule(layer, owner, source)
    key = (cls, tuple(rule.cases[0].items()), rule.adding, tuple(rule.made.items()))
    if key not in _woven:
        _woven[key] = _subclass(cls, owner, source, rule)
    layer.__class__ = _woven[key]


def _source(owner: type) -> str:
    module = sys.modules.get(owner.__module__)
    if module is None or vars(module).get(owner.__name__) is not owner:
        raise NotWoven(
            f"{owner.__qualname__} is not defined at the top level of a module"
        )
    try:
        return inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise NotWoven(f"its source cannot be read: {error}") from error


def _rule(layer: nn.Module, owner: type, source: str) -> Rule:
    """The facts that the instance has and the source does not."""
    children = dict(layer.named_children())
    return Rule(
        reason="woven when it was loaded",
        cases=({**NEVER_GIVEN, **dict(_outcomes(layer, owner, source))},),
        adding=tuple(name for name, child in children.items() if _adds(child)),
        made={name: type(child).__name__ for name, child in children.items()},
    )


def _adds(module: nn.Module) -> bool:
    """Whether the module is a norm of vLLM's that adds its two arguments."""
    if not isinstance(module, RMSNorm | GemmaRMSNorm):
        return False
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return owner.__module__.startswith("vllm.")


def _outcomes(layer: nn.Module, owner: type, source: str) -> Iterator[tuple[str, bool]]:
    """The conditions of `forward` on the layer's configuration, with their outcomes."""
    for node in ast.walk(_forward(source, owner.__name__)):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else []
        for part in (inner for test in tests for inner in ast.walk(test)):
            text = ast.get_source_segment(source, part) or ""
            if isinstance(part, ast.expr) and _ON_SELF.fullmatch(text):
                value = _evaluated(text, layer)
                if isinstance(value, bool | int | str | list | tuple | None):
                    yield text, bool(value)


def _evaluated(text: str, layer: nn.Module) -> object:
    """The value of a condition that reads attributes of `self` and nothing else."""
    try:
        return eval(text, {"__builtins__": {}}, {"self": layer})
    except AttributeError:
        return NotImplemented  # the branch that reads it may never run


def _forward(source: str, name: str) -> ast.FunctionDef:
    """`forward` of the class `name` at the top level of `source`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "forward":
                    return part
    raise NotWoven(f"{name} does not define its forward in its body")


def _subclass(
    cls: type[nn.Module], owner: type, source: str, rule: Rule
) -> type[nn.Module]:
    # Imported late: reading sources is slow to import and rarely needed.
    from vllm.model_executor.residual_weave.decoder_layers import weave_classes

    result = weave_classes(source, {owner.__name__: rule})
    if result.problems:
        raise NotWoven(result.problems[0].removeprefix(f"{owner.__name__}: "))
    assert result.source is not None, "a layer without a problem was not woven"
    (layer,) = result.layers
    members = {
        "forward": _compiled(owner, _forward(result.source, owner.__name__)),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    woven = type(cls.__name__, (cls,), members)
    logger.info("Hook points of %s: %s", cls.__name__, ", ".join(layer.points))
    return tap.tapped(*layer.points, partial=layer.partial)(woven)


def _compiled(owner: type, forward: ast.FunctionDef) -> FunctionType:
    """Compile `forward` as a function of the module that it comes from.

    It keeps that module's globals and file name, which the compile cache and
    tracebacks use.
    """
    original = inspect.unwrap(vars(owner)["forward"])
    names: dict[str, Any] = original.__globals__
    if names.setdefault("residual_tap", tap) is not tap:
        raise NotWoven("its module has a residual_tap of its own")
    # Inside a class of the same name private names are mangled as before.
    tree = ast.parse(f"class {owner.__name__}: pass")
    assert isinstance(tree.body[0], ast.ClassDef)
    tree.body[0].body = [forward]
    ast.increment_lineno(tree, original.__code__.co_firstlineno - forward.lineno)
    code = compile(
        tree,
        original.__code__.co_filename,
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made: dict[str, Any] = {}
    try:
        exec(code, names, made)
    except Exception as error:  # defaults and decorators are evaluated again
        raise NotWoven(f"its forward cannot be recompiled: {error!r}") from error
    function = vars(made[owner.__name__])["forward"]
    if inspect.unwrap(function).__code__.co_freevars:
        raise NotWoven("its forward is a closure")
    assert isinstance(function, FunctionType)
    return function
