// The page without a server: draws the results that are in the document itself.

import { html, render, useState } from "./vendor/preact-htm.js";
import { HeadText, SmallHeads } from "./draw/attention.js";
import { Heatmap } from "./draw/heatmap.js";
import { LensTable, PinnedLines } from "./draw/lens.js";
import { PatchMap } from "./draw/patch.js";
import { rangeOf } from "./draw/tint.js";
import { TokenText } from "./draw/tokens.js";

// Null is NaN in JSON.
const number = (value) => value ?? NaN;

function Tinted({ tokens, values, name, prompt }) {
  const [chosen, choose] = useState(-1);
  const used = values.map(number);
  return html`<section><h3>${name}</h3><${TokenText} tokens=${tokens} values=${used} range=${rangeOf(used)}
    name=${name} prompt=${prompt} chosen=${chosen} onPick=${choose} /></section>`;
}

function Lens({ tokens, lens, texts }) {
  const { positions } = lens;
  const [place, choose] = useState(positions.at(-1));
  const [pins, pin] = useState([]);
  const row = positions.indexOf(place);
  const textOf = (id) => texts[id] ?? "#" + id;
  const toggle = (id) => pin(pins.includes(id) ? pins.filter((one) => one !== id) : [...pins, id]);
  const one = row < 0 ? null : { taps: lens.taps, token_ids: lens.token_ids[row], logprobs: lens.logprobs[row].map((line) => line.map(number)) };
  // Only the listed tokens are known: where one is not listed its line has a gap.
  const pinned = pins.map((id) => ({ id, logprobs: one?.token_ids.map((ids, tap) => one.logprobs[tap][ids.indexOf(id)] ?? null)
    .map((found) => found ?? NaN) ?? [] }));
  return html`<section><h3>Lens</h3><${TokenText} tokens=${tokens} chosen=${place} onPick=${choose} name="token" />
    ${one ? html`${pins.length > 0 && html`<${PinnedLines} lens=${one} pinned=${pinned} textOf=${textOf} onPin=${toggle} />`}
      <${LensTable} lens=${one} textOf=${textOf} pinned=${pinned} onPin=${toggle} />` : html`<p>The lens was not read here.</p>`}</section>`;
}

function Attention({ tokens, weights, layer }) {
  const [head, choose] = useState(0);
  const [at, setAt] = useState();
  const [back, setBack] = useState(false);
  return html`<section><h3>Attention of layer ${layer}</h3><${SmallHeads} weights=${weights} head=${head} onPick=${choose} />
    <${HeadText} tokens=${tokens} weights=${weights} head=${head} at=${at} back=${back} onAt=${setAt} onBack=${setBack} /></section>`;
}

function Attribution({ tokens, positions, taps, logits }) {
  const [place, choose] = useState(positions.at(-1));
  const row = positions.indexOf(place);
  return html`<section><h3>What adds to the logits</h3><${TokenText} tokens=${tokens} chosen=${place} onPick=${choose} name="token" />
    ${row >= 0 ? html`<${Heatmap} rows=${taps.length} columns=${logits[row][0].length} cell=${26} zero=${0} version=${place}
      value=${(part, word) => number(logits[row][part][word])} rowName=${(part) => taps[part].join(" ")}
      rowLabel=${(part) => taps[part][0] + " " + taps[part][1].slice(0, 4)}
      columnName=${(word) => `token ${word} of those asked for`} label="Additions to logits by component" />`
      : html`<p>The components were not read here.</p>`}</section>`;
}

function Patch({ sweep }) {
  return html`<section>${Object.keys(sweep.grids).map((hook) => html`<${PatchMap} key=${hook} sweep=${sweep} hook=${hook} />`)}</section>`;
}

const KINDS = { tinted: Tinted, lens: Lens, attention: Attention, attribution: Attribution, patch: Patch };
const parts = JSON.parse(document.getElementById("results").textContent);
render(html`<main>${parts.map((part, key) => html`<${KINDS[part.kind]} key=${key} ...${part} />`)}</main>`, document.body);
