# SPDX-License-Identifier: Apache-2.0
"""Results as one HTML file, drawn by the code of the page `/lens`."""

import base64
import json
import posixpath
import re
from collections.abc import Callable, Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from clearbox_client.readouts import Readout
    from numpy.typing import NDArray

STATIC = Path(__file__).parent / "page"
START = "standalone.js"
IMPORT = re.compile(r'(\bfrom\s+|\bimport\s+)"(\.[^"]+)"')
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; "
    "style-src 'unsafe-inline'; img-src data:"
)


def document(parts: list[dict[str, Any]]) -> str:
    """An HTML document without references to other files.

    Args:
        parts: what is shown: objects with `kind`, one of `tinted` (`tokens`, `values`,
            `name`), `lens` (`tokens`, `lens`, `texts`), `attention` (`tokens`, `layer`,
            `weights` [heads, queries, keys]), `attribution` (`tokens`, `positions`,
            `taps`, `logits` [positions, taps, tokens]) or `patch` (`sweep`). Values
            that are no JSON numbers are None.

    """
    imports = {name: _data_url(text) for name, text in _modules().items()}
    style = _read("vendor/uplot.css") + _read("style.css")
    charts = _read("vendor/uplot.js")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Clearbox results</title><style>{style}</style></head><body>"
        f'<script type="application/json" id="results">{_json(parts)}</script>'
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
        f"<script>{charts}</script>"
        f'<script type="module">import "{START}";</script></body></html>'
    )


def save(
    path: str | PathLike[str],
    tokens: list[str],
    readouts: "Mapping[str, Readout]",
    token_texts: Callable[[list[int]], list[str]] | None = None,
) -> None:
    """Write one HTML file of a text and its readouts, which loads nothing.

    Args:
        path: the file.
        tokens: the texts of prompt and generated tokens.
        readouts: by name.
        token_texts: gives the texts of token ids; without it a lens shows ids.

    """
    listed = [one["token_ids"] for one in readouts.values() if one.kind == "lens"]
    ids = sorted({int(i) for table in listed for i in table.ravel()})
    texts = dict(zip(ids, token_texts(ids))) if token_texts else {}
    shown = document(readout_parts(tokens, readouts, texts))
    Path(path).write_text(shown, encoding="utf-8")


def frame(parts: list[dict[str, Any]]) -> str:
    """The document as an element of a notebook, apart from its other scripts."""
    return (
        '<iframe sandbox="allow-scripts" style="width:100%;height:480px;border:0"'
        f' title="Clearbox results" srcdoc="{escape(document(parts))}"></iframe>'
    )


def _modules() -> dict[str, str]:
    """The sources of the start module and of all that it imports, by name.

    Modules from `data:` have no folder: names relative to it become plain ones, which
    the import map resolves.
    """
    found: dict[str, str] = {}
    waiting = [START]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        folder = posixpath.dirname(name)

        def plain(match: re.Match[str], folder: str = folder) -> str:
            target = posixpath.normpath(posixpath.join(folder, match[2]))
            waiting.append(target)
            return f'{match[1]}"{target}"'

        found[name] = IMPORT.sub(plain, _read(name))
    return found


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _data_url(text: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()


def _json(value: Any) -> str:
    """JSON that no parser of HTML takes for markup."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def readout_parts(
    tokens: list[str], readouts: "Mapping[str, Readout]", texts: Mapping[int, str]
) -> list[dict[str, Any]]:
    """What `document` shows of a text and its readouts.

    Tinted text for `norm` (its last tap), `probe`, and `sae` with `features`; a table
    for `lens`; the patterns of `attention` with `full`, and what components add to
    logits for `attribution`, as heat maps.
    """
    shown = [{"text": text} for text in tokens]
    parts: list[dict[str, Any]] = []
    for name, one in readouts.items():
        if one.kind == "lens" and len(one):
            lens = {
                "positions": one.positions,
                "taps": one.taps,
                "token_ids": one["token_ids"].tolist(),
                "logprobs": _numbers(one["logprobs"]),
            }
            known = {
                int(i): texts[i] for i in np.unique(one["token_ids"]) if i in texts
            }
            parts.append(
                {"kind": "lens", "tokens": shown, "lens": lens, "texts": known}
            )
        elif one.is_full:
            parts.append(_attention(one, shown))
        elif one.kind == "attribution" and len(one):
            parts.append(
                {
                    "kind": "attribution",
                    "tokens": shown,
                    "positions": one.positions,
                    "taps": one.taps,
                    "logits": _numbers(one["logits"]),
                }
            )
        else:
            parts += _tinted(name, one, shown)
    return parts or [{"kind": "tinted", "tokens": shown, "values": [], "name": "text"}]


def _attention(one: "Readout", tokens: list[dict[str, str]]) -> dict[str, Any]:
    """A full pattern `[heads, tokens, tokens]`, without values where none were read."""
    count = max(len(tokens), one["weights"].shape[-1])
    whole = np.full((len(one["weights"]), count, count), np.nan)
    whole[:, one.positions, : one["weights"].shape[-1]] = one["weights"]
    ((layer, _),) = one.taps
    weights = _numbers(whole[:, : len(tokens), : len(tokens)])
    return {"kind": "attention", "tokens": tokens, "layer": layer, "weights": weights}


def _tinted(
    name: str, one: "Readout", tokens: list[dict[str, str]]
) -> list[dict[str, Any]]:
    """The text in the colours of each value per token."""
    table = {
        "norm": lambda: one["norm"][:, -1:],
        "probe": lambda: one["values"],
        "sae": lambda: one["activations"],
    }
    if one.kind not in table or not len(one) or "features" in one.arrays:
        return []
    values = np.asarray(table[one.kind](), np.float64)
    parts = []
    for column in range(values.shape[1]):
        line: list[float | None] = [None] * len(tokens)
        for position, value in zip(one.positions, values[:, column]):
            line[position] = float(value) if np.isfinite(value) else None
        label = name if values.shape[1] == 1 else f"{name}[{column}]"
        parts.append(
            {"kind": "tinted", "tokens": tokens, "values": line, "name": label}
        )
    return parts


def _numbers(values: "NDArray[Any]") -> Any:
    """Nested lists in which None stands for what is not finite."""
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()
