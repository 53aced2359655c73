# SPDX-License-Identifier: Apache-2.0
"""Options that give files a name: `--steering-modules NAME=PATH`, `--sae NAME=PATH`."""

import json
import os
from collections.abc import Mapping
from typing import Any

from vllm.v1.residual.numbers import Fail


def named_paths(given: Any, option: str, fail: Fail) -> dict[str, str]:
    """Paths by name.

    Args:
        given: a mapping, `NAME=PATH` once or in a list, or a JSON object, as which a
            configuration file gives a mapping; None for no files.
        option: the option, such as `--sae`.
        fail: creates the error.

    Raises:
        Exception: what `fail` creates, for another form or a repeated name.

    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(name): os.fspath(path) for name, path in given.items()}
    parameter = option.removeprefix("--").replace("-", "_")
    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) == 1 and str(texts[0]).startswith("{"):
        return _of_object(str(texts[0]), option, parameter, fail)
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = str(text).partition("=")
        if not name or not equals or not path:
            raise fail(f"{option} {text!r}: expected NAME=PATH", parameter, text)
        if name in found:
            raise fail(
                f"{option}: {name!r} is given twice; give one of them another name",
                parameter,
                text,
            )
        found[name] = path
    return found


def _of_object(text: str, option: str, parameter: str, fail: Fail) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(path, str) and name and path for name, path in found.items()
    ):
        raise fail(
            f"{option} {text!r}: expected NAME=PATH, or an object of names and paths",
            parameter,
            text,
        )
    return found
