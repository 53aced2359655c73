# SPDX-License-Identifier: Apache-2.0
"""The fields of requests and responses, which several edit files share."""

import ast
from collections.abc import Iterator

FIELDS = '''
capture: dict[str, Any] | None = None
"""What to capture of the request: name of the consumer instance -> capture spec."""
capture_wait: bool = False
"""Whether the response waits for the results of the capture. Offline generation always
waits."""
capture_stream: bool = False
"""Whether outputs before the last carry captured rows of their tokens. Applies to
streamed outputs, and to consumers that return rows with them."""
capture_cache: bool = True
"""Whether the activation store may answer for rows of the prompt and keep them."""
readouts: dict[str, Any] | None = None
"""Readouts, computed from rows on the device: name -> readout."""
stop_when: list[dict[str, Any]] | None = None
"""Conditions on readouts that end the request at the token where they hold."""
steering_vectors: dict[str, Any] | None = None
"""Vectors that are added at every token: hook point -> layer -> vector."""
prefill_steering_vectors: dict[str, Any] | None = None
"""Further vectors that are added at prompt tokens."""
decode_steering_vectors: dict[str, Any] | None = None
"""Further vectors that are added at generated tokens."""
steering_name: Any = None
"""Registered sets of vectors that are added: a name, an object with name and scale, or
a list of these."""
steering_module_ref: Any = None
"""One more registered set, as [name, scale]."""
steering_clamps: dict[str, Any] | None = None
"""Clamps at every token: hook point -> layer -> list of clamps."""
prefill_steering_clamps: dict[str, Any] | None = None
"""Further clamps at prompt tokens."""
decode_steering_clamps: dict[str, Any] | None = None
"""Further clamps at generated tokens."""
steering: list[dict[str, Any]] | None = None
"""Gates at generated tokens: objects with when, scope and apply."""
patch: list[dict[str, Any]] | None = None
"""Rows that are replaced by those of a kept run, one for each object: layer, hook,
dest_position and a source."""
patch_vectors: dict[str, Any] | None = None
"""Packed rows that the objects of patch name by their index."""
conversation_id: str | None = None
"""Names the conversation that the request belongs to."""
steering_receipt: bool = False
"""Whether the response says what steering has done."""
'''
"""The fields of sampling parameters."""

_HTTP_TYPES = {
    "stop_when": "list[dict[str, Any]] | dict[str, Any] | None",
    "steering_name": "str | dict[str, Any] | list[str | dict[str, Any]] | None",
    "steering_module_ref": "list[Any] | None",
}
_HTTP_BOUNDS = {"conversation_id": "min_length=1, max_length=256, "}


def _declared() -> Iterator[tuple[str, str, str, str]]:
    """The name, type, default and description of each field."""
    nodes = iter(ast.parse(FIELDS).body)
    for node, text in zip(nodes, nodes, strict=True):
        assert isinstance(node, ast.AnnAssign) and node.value is not None
        assert isinstance(text, ast.Expr)
        said = " ".join(ast.literal_eval(text.value).split())
        parts = (node.target, node.annotation, node.value)
        name, kind, default = map(ast.unparse, parts)
        yield name, kind, default, said


def _http(name: str, kind: str, default: str, said: str) -> str:
    more = "strict=True, " if kind == "bool" else _HTTP_BOUNDS.get(name, "")
    kind = _HTTP_TYPES.get(name, kind)
    return f"{name}: {kind} = Field(default={default}, {more}description={said!r})"


NAMES = tuple(name for name, *_ in _declared())

PARAMETERS = tuple(f"{name}: {kind} = {value}" for name, kind, value, _ in _declared())
"""The fields as Python parameters."""

REQUEST = "\n".join(_http(*one) for one in _declared())
"""The fields of completion and chat requests."""

RESULTS = """
capture_results: dict[str, Any] | None = Field(
    default=None, description="Results of the capture, per capture consumer."
)
readouts: dict[str, Any] | None = Field(
    default=None, description="Results of the readouts, by name."
)
steering: dict[str, Any] | None = Field(
    default=None, description="What steering has done to the request's tokens."
)
"""
"""The fields of the last chunk of a stream, and of responses."""

RESPONSE = f"""
activations: dict[str, Any] | None = Field(
    default=None,
    exclude_if=lambda value: value is None,  # vllm-lens' client tests for the key.
    description="Rows in the format of vllm-lens, if requested.",
)
hook_results: dict[str, Any] | None = Field(
    default=None,
    exclude_if=lambda value: value is None,
    description="What the request's hook functions saved, by hook.",
)
{RESULTS.lstrip()}"""
"""The fields of whole responses, with results in the formats of other libraries."""
