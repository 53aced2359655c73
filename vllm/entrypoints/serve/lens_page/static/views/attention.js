// Attention: a head over the text, the heads of a layer, all heads by a score.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Needs, Problem, PromptBox, complete, hooksOf, useText, useWork } from "../parts.js";
import { tokenTexts } from "../api.js";
import { HeadGrid, HeadText, SCORES, SmallHeads } from "../draw/attention.js";
import { percent, visible } from "../draw/tint.js";
import { NEXT_TOKEN, likeliest } from "../text.js";

const FLAGS = "--enable-readouts --enable-steering --hook-points q z";
const NUMBERS = 2 ** 22; // A request's results have at most so many.
const MOST = 512; // Tokens of a whole pattern.
const MOST_HEADS = 128; // Until an answer shows how many there are.

export function attentionBody(model, prompt, layers) {
  const spec = { kind: "attention", layers, heads: "all", positions: "all", full: true };
  return { model, prompt, max_tokens: 1, temperature: 0, readouts: { attention: spec } };
}

// The weights of an answer as [heads][queries][keys].
export function weightsOf({ readouts }) {
  const { error, weights } = readouts.attention;
  if (error) throw new Error(error);
  return weights;
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
  const can = facts.readouts?.enabled && has("q");
  const layer = state.layer ?? layers[0] ?? 0;
  const head = Math.min(state.head ?? 0, (weights?.length ?? 1) - 1);
  const context = facts.models.find(({ id }) => id === model)?.max_model_len ?? MOST + 1;
  const fit = Math.min(MOST, context - 1, Math.floor(Math.sqrt(NUMBERS / (weights?.length ?? MOST_HEADS))) - 1);
  const tokens = text?.tokens.slice(0, fit) ?? [];
  const ids = tokens.map((token) => token.id);
  const body = attentionBody(model, ids, [layer]);
  useEffect(() => {
    if (!ids.length || !can) return;
    run(async (signal) => {
      const found = weightsOf(await complete(body, signal));
      if (!signal.aborted) setWeights(found);
    });
  }, [JSON.stringify(body)]);
  const score = SCORES[state.score];
  const scored = score?.twice ? Math.floor(fit / 2) : fit;
  const ready = weights && weights[0]?.length === tokens.length;
  useEffect(() => { // Layer by layer: the first ones are shown while others are computed.
    setGrid({ scores: [], version: 0 });
    if (!score || !ready) return scoring.stop();
    scoring.run(async (signal) => {
      const scores = [];
      const once = ids.slice(0, scored);
      const prompt = score.twice ? [...once, ...once] : once;
      for (const [row, one] of layers.entries()) {
        scores[row] = weightsOf(await complete(attentionBody(model, prompt, [one]), signal)).map(score.of);
        if (signal.aborted) return;
        setGrid(({ version }) => ({ scores: [...scores], version: version + 1 }));
      }
    });
  }, [state.score, JSON.stringify(ids), ready]);
  const ablation = { z: { [layer]: [{ op: "replace", vector: 0, heads: [head] }] } };
  const ablated = { model, prompt: ids, ...NEXT_TOKEN, steering_vectors: ablation };
  useEffect(() => {
    setEffect(null);
    if (!state.ablate || !ready) return ablating.stop();
    ablating.run(async (signal) => {
      const plain = { model, prompt: ids, ...NEXT_TOKEN };
      const answers = await Promise.all([complete(plain, signal), complete(ablated, signal)]);
      const tops = answers.map((answer) => likeliest(answer).slice(0, 5));
      const textOf = await tokenTexts(model, tops.flat().map(([id]) => id));
      if (!signal.aborted) setEffect({ tops, textOf });
    });
  }, [state.ablate, ready, JSON.stringify(ablated)]);
  if (!can) {
    return html`<${Needs} what="attention patterns" flags=${FLAGS} reason=${facts.readouts?.error
      ?? "Models with latent keys, and servers of several tensor-parallel ranks, have none."} />`;
  }
  return html`<div>
    <${PromptBox} state=${state} update=${update} rows="2" />
    <${Problem} error=${unread ?? error} />
    ${text?.tokens.length > tokens.length && html`<p class="note">The first ${tokens.length} tokens are shown.</p>`}
    <div class="row"><${Choice} label="Layer" value=${layer} options=${layers} onChange=${(one) => update({ layer: Number(one) })} />
      ${has("z") ? html`<button type="button" disabled=${!ready} aria-pressed=${Boolean(state.ablate)}
          onClick=${() => update({ ablate: state.ablate ? null : true })}>Ablate head ${head}</button>`
        : html`<span class="note">Ablating a head needs <code>--hook-points z --enable-steering</code>.</span>`}</div>
    <${Problem} error=${ablating.error} />
    ${effect && html`<div class="pair">${["before", "after"].map((name, side) => html`<section key=${name}><h3>Next token ${name}</h3>
      <ol class="alternatives">${effect.tops[side].map(([id, logprob]) => html`<li key=${id}><span class="word">${
        visible(effect.textOf(id))}</span> ${percent(logprob)}</li>`)}</ol></section>`)}</div>`}
    ${ready && html`<div class=${busy ? "stale" : ""}>
      <${SmallHeads} weights=${weights} head=${head} onPick=${(one) => update({ head: one })} />
      <${HeadText} tokens=${tokens} weights=${weights} head=${head} at=${state.token} back=${state.back ?? false}
        onAt=${(token) => update({ token })} onBack=${(back) => update({ back: back || null })} /></div>`}
    <section><h3>All heads by a score</h3>
      <div class="row">${Object.entries(SCORES).map(([name, one]) => html`<button type="button" key=${name}
        aria-pressed=${state.score === name} onClick=${() => update({ score: name })}>${one.name}</button>`)}</div>
      ${score && scored < tokens.length && html`<p class="note">Of the first ${scored} tokens.</p>`}
      <${Problem} error=${scoring.error} />
      ${score && grid.scores.length > 0 && html`<${HeadGrid} scores=${grid.scores} name=${score.name} version=${grid.version}
        onPick=${(row, column) => update({ layer: layers[row], head: column })} />`}</section>
    <${Copy} request=${{ path: "/v1/completions", body: state.ablate ? ablated : body }} /></div>`;
}
