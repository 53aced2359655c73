// Attention: a head over the text, the heads of a layer, all heads by a score.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Needs, Problem, PromptBox, complete, hooksOf, useText, useWork } from "../parts.js";
import { tokenTexts } from "../api.js";
import { HeadGrid, HeadText, SCORES, SmallHeads } from "../draw/attention.js";
import { percent, visible } from "../draw/tint.js";
import { NEXT_TOKEN, likeliest } from "../text.js";

const FLAGS = "--enable-readouts --enable-steering --hook-points q z";
const MOST = 512; // Tokens of a whole pattern: 1 MiB of float32 per head.

export function attentionBody(model, prompt, layers) {
  const spec = { kind: "attention", layers, heads: "all", positions: "all", full: true };
  return { model, prompt, max_tokens: 1, temperature: 0, readouts: { attention: spec } };
}

// The weights of an answer as [heads][queries][keys]; a layer axis of one is left out.
export function weightsOf(result) {
  if (result.error) throw new Error(result.error);
  const found = result.weights;
  return Array.isArray(found[0]?.[0]?.[0]) && found[0][0][0].length !== undefined ? found[0] : found;
}

export function Attention({ model, facts, state, update }) {
  const { text, error: unread } = useText(model, state);
  const { busy, error, run } = useWork();
  const scoring = useWork();
  const ablating = useWork();
  const [weights, setWeights] = useState(null);
  const [grid, setGrid] = useState({ scores: [], version: 0 });
  const [effect, setEffect] = useState(null);
  const { layers, has } = hooksOf(facts);
  const layer = state.layer ?? layers[0] ?? 0;
  const head = Math.min(state.head ?? 0, (weights?.length ?? 1) - 1);
  const tokens = text?.tokens.slice(0, MOST) ?? [];
  const ids = tokens.map((token) => token.id);
  const body = attentionBody(model, ids, [layer]);
  useEffect(() => {
    setEffect(null);
    if (!ids.length || !facts.readouts?.enabled) return;
    run(async (signal) => {
      const answer = await complete(body, signal);
      if (!signal.aborted) setWeights(weightsOf(answer.readouts.attention));
    });
  }, [JSON.stringify(body)]);
  const score = (name) => scoring.run(async (signal) => {
    const scores = [];
    const prompt = SCORES[name].twice ? [...ids, ...ids] : ids;
    for (const [row, one] of layers.entries()) {
      const answer = await complete(attentionBody(model, prompt, [one]), signal);
      scores[row] = weightsOf(answer.readouts.attention).map(SCORES[name].of);
      setGrid(({ version }) => ({ name, scores: [...scores], version: version + 1 }));
    }
  });
  const ablation = { z: { [layer]: [{ op: "replace", vector: 0, heads: [head] }] } };
  const ablated = { model, prompt: ids, ...NEXT_TOKEN, steering_vectors: ablation };
  const ablate = () => ablating.run(async (signal) => {
    const plain = { model, prompt: ids, ...NEXT_TOKEN };
    const answers = await Promise.all([complete(plain, signal), complete(ablated, signal)]);
    const tops = answers.map((answer) => likeliest(answer).slice(0, 5));
    const textOf = await tokenTexts(model, tops.flat().map(([id]) => id));
    if (!signal.aborted) setEffect({ tops, textOf });
  });
  if (!facts.readouts?.enabled) return html`<${Needs} what="readouts" flags=${FLAGS} reason=${facts.readouts?.error} />`;
  if (error?.status === 400) return html`<div><${Needs} what="attention readout" flags=${FLAGS} reason=${error.message} /></div>`;
  const ready = weights && weights[0]?.length === tokens.length;
  return html`<div>
    ${!text?.tokens.length && html`<${PromptBox} state=${state} update=${update} />`}
    <${Problem} error=${unread ?? error} />
    ${text?.tokens.length > MOST && html`<p class="note">The first ${MOST} tokens are shown.</p>`}
    <div class="row"><${Choice} label="Layer" value=${layer} options=${layers} onChange=${(one) => update({ layer: Number(one) })} />
      ${has("z") ? html`<button type="button" disabled=${!ready} onClick=${ablate}>Ablate head ${head}</button>`
        : html`<span class="note">Ablating a head needs <code>--hook-points z --enable-steering</code>.</span>`}</div>
    <${Problem} error=${ablating.error} />
    ${effect && html`<div class="pair">${["before", "after"].map((name, side) => html`<section key=${name}><h3>Next token ${name}</h3>
      <ol class="alternatives">${effect.tops[side].map(([id, logprob]) => html`<li key=${id}><span class="word">${
        visible(effect.textOf(id))}</span> ${percent(logprob)}</li>`)}</ol></section>`)}</div>`}
    ${ready && html`<div class=${busy ? "stale" : ""}>
      <${SmallHeads} weights=${weights} head=${head} onPick=${(one) => update({ head: one })} />
      <${HeadText} tokens=${tokens} weights=${weights} head=${head} /></div>`}
    <section><h3>All heads by a score</h3>
      <div class="row">${Object.entries(SCORES).map(([name, one]) => html`<button type="button" key=${name}
        aria-pressed=${grid.name === name} onClick=${() => score(name)}>${one.name}</button>`)}</div>
      <${Problem} error=${scoring.error} />
      ${grid.scores.length > 0 && html`<${HeadGrid} scores=${grid.scores} name=${SCORES[grid.name].name} version=${grid.version}
        onPick=${(row, column) => update({ layer: layers[row], head: column })} />`}</section>
    <${Copy} request=${{ path: "/v1/completions", body: effect ? ablated : body }} /></div>`;
}
