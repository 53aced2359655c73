// Attention patterns: one head over its text, and all heads of a layer as small maps.

import { html, useState } from "../vendor/preact-htm.js";
import { Heatmap } from "./heatmap.js";
import { rangeOf, short, visible } from "./tint.js";
import { TokenText } from "./tokens.js";

const WHOLE = [0, 1];

// `weights` [heads, queries, keys].
export function HeadText({ tokens, weights, head }) {
  const [at, setAt] = useState(tokens.length - 1);
  const [back, setBack] = useState(false);
  const pattern = weights[head];
  const place = Math.min(at, tokens.length - 1);
  const values = tokens.map((_, other) => (back ? pattern[other]?.[place] : pattern[place]?.[other]) ?? NaN);
  const hover = (event) => {
    const found = event.target.dataset?.place;
    if (found !== undefined) setAt(Number(found));
  };
  return html`<section><h3>Head ${head}</h3>
    <label><input type="checkbox" checked=${back} onChange=${(e) => setBack(e.target.checked)} /> who looks at the token</label>
    <${TokenText} tokens=${tokens} values=${values} range=${rangeOf(values)} chosen=${place} onPick=${setAt}
      onHover=${hover} name="attention" label="Text; point at a token to see where it looks" />
    <${Heatmap} rows=${pattern.length} columns=${tokens.length} value=${(q, k) => pattern[q][k] ?? NaN}
      version=${head} range=${WHOLE} rowName=${(q) => `from ${q} ${visible(tokens[q].text)}`}
      columnName=${(k) => `to ${k} ${visible(tokens[k].text)}`} label=${`Attention of head ${head}`} /></section>`;
}

export function SmallHeads({ weights, head, onPick }) {
  return html`<div class="heads">${weights.map((pattern, number) => html`<button type="button" key=${number}
    class=${"head" + (number === head ? " chosen" : "")} onClick=${() => onPick(number)} aria-pressed=${number === head}>
    <${Heatmap} plain rows=${pattern.length} columns=${pattern.length} version=${pattern} range=${WHOLE}
      cell=${Math.max(1, Math.floor(84 / pattern.length))} value=${(q, k) => pattern[q][k] ?? NaN}
      label=${`head ${number}`} /><span>${number}</span></button>`)}</div>`;
}

export const SCORES = {
  previous: { name: "to the previous token", of: (p) => mean(p, (row, q) => row[q - 1], 1) },
  first: { name: "to the first token", of: (p) => mean(p, (row) => row[0], 1) },
  induction: {
    name: "induction (on the text twice)", twice: true,
    of: (p) => mean(p, (row, q) => row[q - p.length / 2 + 1], p.length / 2),
  },
  entropy: { name: "entropy in nats", of: (p) => mean(p, entropy, 0) },
};

function mean(pattern, score, first) {
  let sum = 0;
  for (let query = first; query < pattern.length; query++) sum += score(pattern[query], query) ?? 0;
  return sum / Math.max(1, pattern.length - first);
}

function entropy(row) {
  return row.reduce((sum, weight) => sum - (weight > 0 ? weight * Math.log(weight) : 0), 0);
}

export function HeadGrid({ scores, name, version, onPick }) {
  const columns = Math.max(0, ...scores.map((line) => line?.length ?? 0));
  return html`<${Heatmap} rows=${scores.length} columns=${columns} cell=${24} version=${version}
    value=${(layer, head) => scores[layer]?.[head] ?? NaN} rowName=${(layer) => `layer ${layer}`}
    columnName=${(head) => `head ${head}`} onPick=${onPick} label=${`Heads by their score ${name}`} />`;
}
