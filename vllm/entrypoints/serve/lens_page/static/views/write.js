// Write and watch: tokens stream in, tinted by what is read at each of them.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Problem, PromptBox, complete, hooksOf, modulesOf, useText, useWork } from "../parts.js";
import { TokenText } from "../draw/tokens.js";
import { percent, rangeOf, short, visible } from "../draw/tint.js";
import { idsOf, remember } from "../text.js";
import { generate, newRun, requestOf, setAll, stampOf, valuesOf } from "./run.js";

// The tints that the server has, as [name in the URL, label].
export function tintsOf(facts) {
  const found = [["surprise", "surprise (nats)"]];
  if (!facts.readouts?.enabled) return found;
  found.push(["norm", "norm of a layer"]);
  for (const { name } of modulesOf(facts, "probe")) found.push([`probe:${name}`, `probe ${name}`]);
  for (const { name } of modulesOf(facts, "sae")) found.push([`sae:${name}`, `feature of ${name}`]);
  return found;
}

export function readoutOf(state, layers) {
  const [kind, name] = (state.tint ?? "surprise").split(/:(.*)/);
  const positions = "all";
  if (kind === "norm") return { kind, hooks: { post_block: [state.layer ?? layers.at(-1)] }, positions };
  if (kind === "probe") return { kind, probe: name, positions };
  if (kind === "sae") return { kind, sae: name, features: [state.feature ?? 0], positions };
  return null;
}

export function Write({ model, facts, state, update }) {
  const { layers } = hooksOf(facts);
  const { busy, error, run, stop } = useWork();
  const shown = useRef(newRun());
  const [, draw] = useState(0);
  const range = useRef([0, 1]);
  const { text, error: unread } = useText(model, state);
  const tint = state.tint ?? "surprise";
  const readout = readoutOf(state, layers);
  const tinted = JSON.stringify(readout);
  const reading = useWork();
  const request = requestOf(model, state, readout ? { tint: readout } : undefined);

  useEffect(() => { // A text of the URL, or another tint of what was generated.
    if (busy || !text) return;
    if (shown.current.tokens !== text.tokens) shown.current = { ...newRun(), tokens: text.tokens, prompt: text.prompt };
    draw((n) => n + 1);
    if (!state.out?.length || shown.current.tinted === tinted) return;
    setAll(shown.current, []);
    reading.run((signal) => tintAll(model, shown.current, readout, signal, frame));
  }, [text, tinted]);

  const frame = () => {
    const next = rangeOf(shown.current.values);
    const [low, high] = range.current;
    // A range that grows by a little would draw every token again.
    if (next[1] > high || next[0] < low || next[1] < high / 2) range.current = [next[0] * 1.25, next[1] * 1.25];
    draw((n) => n + 1);
  };
  const start = () => run(async (signal) => {
    reading.stop();
    const mine = { ...newRun(), tinted };
    shown.current = mine;
    range.current = [0, 1];
    await generate(model, state, request, mine, { tint, onFrame: frame, signal });
    if (signal.aborted) return;
    if (tint === "surprise") await tintAll(model, mine, null, signal, frame, mine.prompt);
    frame();
    update(remember(state, mine.tokens, mine.prompt));
  });
  const { tokens, values, prompt, note, finish, first } = shown.current;
  const label = tintsOf(facts).find(([name]) => name === tint)?.[1] ?? tint;
  return html`<div>
    <${PromptBox} state=${state} update=${update} onRun=${start} />
    <div class="row">
      <${Choice} label="Tint by" value=${tint} options=${tintsOf(facts)} onChange=${(one) => update({ tint: one })} />
      ${tint === "norm" && html`<${Choice} label="Layer" value=${state.layer ?? layers.at(-1)} options=${layers}
        onChange=${(one) => update({ layer: Number(one) })} />`}
      ${tint.startsWith("sae:") && html`<label>Feature <input type="number" min="0" value=${state.feature ?? 0}
        onChange=${(e) => update({ feature: Number(e.target.value) })} /></label>`}
      <label>Tokens <input type="number" min="1" value=${state.max ?? 64} onChange=${(e) => update({ max: Number(e.target.value) })} /></label>
      <label>Temperature <input type="number" min="0" step="0.1" value=${state.temperature ?? 0}
        onChange=${(e) => update({ temperature: Number(e.target.value) })} /></label>
      <button type="button" class="main" onClick=${busy ? stop : start}>${busy ? "Stop" : "Generate"}</button>
    </div>
    ${!facts.readouts?.enabled && html`<p class="note">Tints by norms, probes and features need a server with
      <code> --enable-readouts</code>.</p>`}
    <${Problem} error=${error ?? reading.error ?? unread} /><${Problem} error=${note} />
    <${TokenText} tokens=${tokens} values=${values} range=${range.current} chosen=${state.token ?? -1} prompt=${prompt}
      name=${label} stamp=${stampOf(shown.current)} onPick=${(token) => update({ token })} />
    <p class="note" data-first=${first} hidden=${!tokens.length}>${tokens.length} tokens${finish ? `; ended by ${finish}` : ""}${
      Number.isFinite(first) ? `; first token after ${Math.round(first)} ms` : ""}</p>
    <${Details} any=${tokens.length > 0} token=${tokens[state.token]} place=${state.token} value=${values[state.token]} label=${label} update=${update} />
    <${Copy} request=${request} /></div>`;
}

// Tints the tokens before `end`, all by default. Streams do not carry log-probabilities of
// the prompt, and a text of the URL has none.
async function tintAll(model, mine, readout, signal, onFrame, end = mine.tokens.length) {
  const prompt = idsOf({ tokens: mine.tokens.slice(0, end) });
  const read = readout ? { readouts: { tint: readout } } : { prompt_logprobs: 3 };
  const answer = await complete({ model, prompt, max_tokens: 1, temperature: 0, ...read }, signal);
  if (signal.aborted) return;
  const values = end < mine.tokens.length ? [...mine.values] : [];
  mine.note = answer.readouts?.tint?.error;
  for (const [place, value] of valuesOf(answer.readouts?.tint)) values[place] = value;
  answer.choices[0].prompt_logprobs?.forEach((found, place) => {
    const own = found?.[prompt[place]];
    if (!own) return;
    values[place] = -own.logprob;
    const top = Object.values(found).map((one) => [one.decoded_token, one.logprob]);
    mine.tokens[place] = { ...mine.tokens[place], logprob: own.logprob, top };
  });
  mine.tinted = JSON.stringify(readout);
  setAll(mine, values);
  onFrame();
}

function Details({ any, token, place, value, label, update }) {
  if (!token) return any && html`<p class="note">Choose a token for its details.</p>`;
  const top = [...(token.top ?? [])].sort((a, b) => b[1] - a[1]);
  return html`<section class="details"><h3>Token ${place}: <span class="word">${visible(token.text)}</span></h3>
    <p>id ${token.id}${Number.isFinite(token.logprob) ? `, probability ${percent(token.logprob)}` : ""}${
      Number.isFinite(value) ? `, ${label} ${short(value)}` : ""}</p>
    ${top.length > 0 && html`<ol class="alternatives">${top.map(([text, logprob]) => html`<li key=${text}>
      <span class="word">${visible(text)}</span> ${percent(logprob)}</li>`)}</ol>`}
    <div class="row"><button type="button" onClick=${() => update({ view: "lens" })}>Lens of this token</button>
      <button type="button" onClick=${() => update({ view: "attention" })}>Attention</button>
      <button type="button" onClick=${() => update({ view: "features" })}>Features</button></div></section>`;
}
