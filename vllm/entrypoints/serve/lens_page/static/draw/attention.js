// Attention patterns: one head over its text, and all heads of a layer as small maps.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Heatmap } from "./heatmap.js";
import { rangeOf, short, visible } from "./tint.js";
import { TokenText } from "./tokens.js";

const WHOLE = [0, 1];

const SMALL = 84; // Pixels of a small map; of longer texts each shows the largest weights.

// `weights` [heads, queries, keys]; `at` is the chosen token, and `back` whether the text
// shows who looks at it.
export function HeadText({ tokens, weights, head, at, back, onAt, onBack }) {
  const [below, setBelow] = useState(null); // The token below the pointer.
  useEffect(() => setBelow(null), [at]);
  const pattern = weights[head];
  const place = Math.min(below ?? at ?? Infinity, tokens.length - 1);
  const values = tokens.map((_, other) => (back ? pattern[other]?.[place] : pattern[place]?.[other]) ?? NaN);
  const hover = (event) => {
    const found = event.target.dataset?.place;
    if (found !== undefined) setBelow(Number(found));
  };
  return html`<section><h3>Head ${head}</h3>
    <label><input type="checkbox" checked=${back} onChange=${(e) => onBack(e.target.checked)} /> who looks at the token, instead of where it looks</label>
    <${TokenText} tokens=${tokens} values=${values} range=${rangeOf(values)} chosen=${place} onPick=${onAt}
      onHover=${hover} name="attention" label="Text; point at a token to see where it looks" />
    <${Heatmap} rows=${pattern.length} columns=${tokens.length} value=${(q, k) => pattern[q][k] ?? NaN}
      version=${head} range=${WHOLE} cell=${Math.max(2, Math.min(26, Math.floor(760 / tokens.length)))} rowName=${(q) => `from ${q} ${visible(tokens[q].text)}`}
      columnName=${(k) => `to ${k} ${visible(tokens[k].text)}`} rowLabel=${(q) => visible(tokens[q].text)}
      columnLabel=${(k) => visible(tokens[k].text)} label=${`Attention of head ${head}`} /></section>`;
}

function pooled(pattern, each) {
  return (row, column) => {
    let most = NaN;
    for (let q = row * each; q < Math.min((row + 1) * each, pattern.length); q++) {
      for (let k = column * each; k < (column + 1) * each; k++) {
        const weight = pattern[q][k] ?? NaN;
        if (!(most >= weight) && Number.isFinite(weight)) most = weight;
      }
    }
    return most;
  };
}

export function SmallHeads({ weights, head, onPick }) {
  const each = Math.ceil(weights[0].length / SMALL);
  const count = Math.ceil(weights[0].length / each);
  return html`<div class="heads">${weights.map((pattern, number) => html`<button type="button" key=${number}
    class=${"head" + (number === head ? " chosen" : "")} onClick=${() => onPick(number)} aria-pressed=${number === head}>
    <${Heatmap} plain rows=${count} columns=${count} version=${pattern} range=${WHOLE}
      cell=${Math.max(1, Math.floor(SMALL / count))} value=${pooled(pattern, each)}
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
    columnName=${(head) => `head ${head}`} rowLabel=${(layer) => `L${layer}`} columnLabel=${(head) => `head ${head}`} onPick=${onPick} label=${`Heads by their score ${name}`} />`;
}
