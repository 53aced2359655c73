// Steering: named modules and a pasted vector, each with a slider.

import { html } from "../vendor/preact-htm.js";
import { Needs, Problem, PromptBox, Slider, useText } from "../parts.js";
import { Pair } from "./pair.js";

// A spec `{hook: {layer: entry}}` with all scales multiplied.
export function scaled(spec, factor) {
  const entry = (one) => {
    if (Array.isArray(one) && typeof one[0] === "number") return { vector: one, scale: factor };
    if (Array.isArray(one)) return one.map(entry);
    return { ...one, scale: (one.scale ?? 1) * factor };
  };
  const layers = (one) => {
    if (one.layer_indices) {
      return { ...one, scales: one.layer_indices.map((_, k) => (one.scales?.[k] ?? 1) * factor) };
    }
    return Object.fromEntries(Object.entries(one).map(([layer, value]) => [layer, entry(value)]));
  };
  return Object.fromEntries(Object.entries(spec).map(([hook, one]) => [hook, layers(one)]));
}

export function pasted(text) {
  if (!text?.trim()) return { spec: null };
  try {
    const spec = JSON.parse(text);
    const whole = spec && typeof spec === "object" && !Array.isArray(spec) &&
      Object.values(spec).every((one) => one && typeof one === "object");
    return whole ? { spec: spec.vectors ?? spec } : { error: new Error('Give {"hook point": {"layer": [numbers]}}.') };
  } catch (error) {
    return { error: new Error(`This is not JSON: ${error.message}`) };
  }
}

export function Steer({ model, facts, state, update }) {
  const { text, error } = useText(model, { ...state, out: undefined });
  if (!facts.steering || facts.steering.error || facts.steering.enabled === false) {
    return html`<${Needs} what="steering" flags="--enable-steering --steering-modules NAME=PATH" reason=${facts.steering?.error} />`;
  }
  const names = Object.keys(facts.modules?.modules ?? {});
  const scales = state.scales ?? {};
  const { spec, error: malformed } = pasted(state.vector);
  const used = names.filter((name) => scales[name]).map((name) => ({ name, scale: scales[name] }));
  const factor = state.factor ?? 1;
  const fields = used.length || (spec && factor) ? {
    ...(used.length ? { steering_name: used } : {}),
    ...(spec && factor ? { steering_vectors: scaled(spec, factor) } : {}),
  } : null;
  return html`<div>
    <${PromptBox} state=${state} update=${update} />
    <fieldset><legend>Named modules</legend>
      ${names.length === 0 && html`<p class="note">None: name one with <code>--steering-modules NAME=PATH</code>,
        or paste a vector.</p>`}
      ${names.map((name) => html`<${Slider} key=${name} label=${name} min="-4" max="4" step="0.1" value=${scales[name] ?? 0}
        onChange=${(value) => update({ scales: { ...scales, [name]: value } })} />`)}</fieldset>
    <fieldset><legend>Pasted vector</legend>
      <label class="block">JSON of hook points, layers and vectors
        <textarea rows="2" value=${state.vector ?? ""} placeholder='{"post_block": {"12": [0.1, -0.3, …]}}'
          onInput=${(e) => update({ vector: e.target.value || null })}></textarea></label>
      ${spec && html`<${Slider} label="scale" min="-8" max="8" step="0.1" value=${factor} onChange=${(value) => update({ factor: value })} />`}
      <${Problem} error=${malformed} /></fieldset>
    <${Problem} error=${error} />
    <${Pair} model=${model} state=${state} text=${text} fields=${malformed ? null : fields} /></div>`;
}
