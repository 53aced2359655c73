// Features of a sparse autoencoder: of a token, over the text, and clamped.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Needs, Problem, PromptBox, Slider, complete, modulesOf, useText, useWork } from "../parts.js";
import { rangeOf, short } from "../draw/tint.js";
import { TokenText } from "../draw/tokens.js";
import { idsOf } from "../text.js";
import { Pair } from "./pair.js";
import { valuesOf } from "./run.js";

export function Features({ model, facts, state, update }) {
  const saes = modulesOf(facts, "sae");
  const { text, error: unread } = useText(model, state);
  const { busy, error, run } = useWork();
  const [found, setFound] = useState(null);
  const sae = saes.find(({ name }) => name === state.sae) ?? saes[0];
  const place = Math.min(state.token ?? Infinity, (text?.tokens.length ?? 1) - 1);
  const feature = state.feature;
  const one = { kind: "sae", sae: sae?.name };
  const body = text && {
    model, prompt: idsOf(text), max_tokens: 1, temperature: 0,
    readouts: {
      top: { ...one, top_k: 10, positions: [place] },
      ...(Number.isInteger(feature) ? { over: { ...one, features: [feature], positions: "all" } } : {}),
    },
  };
  const asked = JSON.stringify(body);
  useEffect(() => {
    if (!sae || !text?.tokens.length) return;
    run(async (signal) => {
      const { readouts } = await complete(body, signal);
      const failed = Object.values(readouts).find((result) => result.error);
      if (failed) throw new Error(failed.error);
      const values = [];
      for (const [position, value] of valuesOf(readouts.over)) values[position] = value;
      const top = readouts.top.features[0].map((id, k) => [id, readouts.top.activations[0][k]]).filter(([id]) => id >= 0);
      if (!signal.aborted) setFound({ top, values });
    });
  }, [asked]);
  if (!sae) return html`<${Needs} what="sparse autoencoder" flags="--enable-readouts --sae NAME=PATH" />`;
  const steering = facts.steering && !facts.steering.error && facts.steering.enabled !== false;
  const clamp = state.clamp;
  const fields = Number.isInteger(feature) && Number.isFinite(clamp) ? {
    steering_vectors: { [sae.hook]: { [sae.layer]: [{ op: "feature", sae: sae.name, feature, value: clamp }] } },
  } : null;
  const most = Math.max(10, ...(found?.values ?? []).filter(Number.isFinite), ...(found?.top ?? []).map(([, value]) => value));
  return html`<div>
    <${PromptBox} state=${state} update=${update} rows="2" />
    <div class="row"><${Choice} label="Autoencoder" value=${sae.name} options=${saes.map(({ name }) => name)}
        onChange=${(name) => update({ sae: name, feature: null, clamp: null })} />
      <span class="note">${sae.features} features at ${sae.hook} of layer ${sae.layer}</span>
      <label>Feature <input type="number" min="0" max=${sae.features - 1} value=${feature ?? ""}
        onChange=${(e) => update({ feature: e.target.value === "" ? null : Number(e.target.value) })} /></label></div>
    <${Problem} error=${unread ?? error} />
    ${text && html`<${TokenText} tokens=${text.tokens} values=${found?.values} range=${rangeOf(found?.values ?? [])}
      chosen=${place} prompt=${text.prompt} name=${`feature ${feature}`} onPick=${(token) => update({ token })} />`}
    ${found && html`<section class=${busy ? "stale" : ""}><h3>Most active features of the token</h3>
      ${found.top.length === 0 && html`<p>None is active.</p>`}
      <ol class="bars">${found.top.map(([id, value]) => html`<li key=${id}>
        <button type="button" aria-pressed=${id === feature} onClick=${() => update({ feature: id })}>${id}</button>
        <meter min="0" max=${found.top[0][1] || 1} value=${value} aria-label=${`feature ${id}`}></meter> ${short(value)}</li>`)}</ol>
    </section>`}
    <${Copy} request=${body && { path: "/v1/completions", body }} />
    ${Number.isInteger(feature) && (steering ? html`<section><h3>Clamp feature ${feature}</h3>
      <${Slider} label="activation" min="0" max=${Math.ceil(most * 2)} step=${most > 20 ? 1 : 0.1} value=${clamp ?? 0}
        onChange=${(value) => update({ clamp: value })} />
      <${Pair} model=${model} state=${state} text=${text} fields=${fields} /></section>`
      : html`<${Needs} what="steering, which clamps features" flags="--enable-steering" />`)}</div>`;
}
