// Parts that several views have.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { asClient, asCurl, asLLM } from "./copy.js";
import { ask, persistently } from "./api.js";
import { currentText } from "./text.js";

const FORMS = { curl: asCurl, client: asClient, LLM: asLLM };

// `request` is { path, body } of what the view has sent, or would send; without a body a GET.
export function Copy({ request }) {
  const [shown, show] = useState(null);
  if (!request) return null;
  const copy = async (name) => {
    const text = FORMS[name](request);
    show({ name, text });
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Not on a secure origin: the text is below, to be selected.
    }
  };
  return html`<div class="copy" role="group" aria-label="Copy the request">
    <span>Copy as</span>${Object.keys(FORMS).map((name) => html`<button type="button" key=${name}
      onClick=${() => copy(name)}>${name}</button>`)}
    ${shown && html`<button type="button" onClick=${() => show(null)} aria-label="Hide the copied text">×</button>
      <pre tabindex="0">${shown.text}</pre>`}</div>`;
}

export function Problem({ error }) {
  if (!error) return null;
  return html`<p class="problem" role="alert">${error.message ?? String(error)}</p>`;
}

export function Needs({ what, flags, reason }) {
  const options = `--enable-lens-page ${flags}`.split(/ (?=--)/);
  return html`<div class="needs" role="note"><p>This server has no ${what}. Start it with:</p>
    <pre>vllm serve …${options.map((one) => html` <span class="whole">${one}</span>`)}</pre>${reason && html`<p>${reason}</p>`}</div>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<label>${label} <select value=${value} onChange=${(e) => onChange(e.target.value)}>
    ${options.map((one) => {
      const [name, text] = Array.isArray(one) ? one : [one, one];
      return html`<option key=${name} value=${name} selected=${String(name) === String(value)}>${text}</option>`;
    })}</select></label>`;
}

export function Slider({ label, value, min, max, step, onChange }) {
  const change = (event) => {
    const number = Number(event.target.value);
    if (Number.isFinite(number)) onChange(number);
  };
  return html`<label class="slider"><span>${label}</span>
    <input type="range" min=${min} max=${max} step=${step} value=${value} onInput=${change} />
    <input type="number" step=${step} value=${value} onChange=${change} aria-label=${`${label}, exact`} /></label>`;
}

export function PromptBox({ state, update, onRun, rows = 3 }) {
  const chat = state.mode === "chat";
  const change = (name) => (event) => update({ [name]: event.target.value || null, out: null, token: null });
  const key = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onRun?.();
  };
  return html`<div class="prompt">
    <div class="row" role="radiogroup" aria-label="Kind of prompt">
      ${["text", "chat"].map((mode) => html`<label key=${mode}><input type="radio" name="mode"
        checked=${(state.mode ?? "text") === mode}
        onChange=${() => update({ mode: mode === "text" ? null : mode, out: null, token: null })} /> ${mode}</label>`)}
    </div>
    ${chat && html`<label>System <input type="text" value=${state.system ?? ""} onInput=${change("system")} /></label>`}
    <label class="block">${chat ? "Message" : "Prompt"}
      <textarea rows=${rows} value=${state.prompt ?? ""}
        placeholder=${onRun ? "Type a text; Ctrl+Enter generates." : "Type a text."} onInput=${change("prompt")} onKeyDown=${key}></textarea></label>
  </div>`;
}

// Runs one piece of work at a time: a new one ends the one before. What a lost connection
// has ended is begun again.
export function useWork() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const running = useRef(null);
  const stop = useCallback(() => running.current?.abort(), []);
  const run = useCallback(async (work) => {
    running.current?.abort();
    const mine = new AbortController();
    running.current = mine;
    setBusy(true);
    setError(null);
    try {
      return await persistently(() => work(mine.signal),
        (told) => { if (running.current === mine) setError(told); }, mine.signal);
    } catch (failure) {
      if (failure.name !== "AbortError" && running.current === mine) setError(failure);
    } finally {
      if (running.current === mine) setBusy(false);
    }
  }, []);
  useEffect(() => stop, []);
  return { busy, error, run, stop, setError };
}

// The text of the URL as tokens, asked for once the prompt has been at rest.
export function useText(model, state) {
  const [text, setText] = useState(null);
  const [error, setError] = useState(null);
  const key = JSON.stringify([state.mode, state.system, state.prompt, state.out]);
  useEffect(() => {
    const ending = new AbortController();
    const when = (act) => (value) => { if (!ending.signal.aborted) act(value); };
    const timer = setTimeout(() => {
      persistently(() => currentText(model, state), when(setError), ending.signal).then(when(setText), when(setError));
    }, 200);
    return () => { ending.abort(); clearTimeout(timer); };
  }, [model, key]);
  return { text, error };
}

export async function complete(body, signal) {
  return ask("/v1/completions", { body, signal });
}

export function hooksOf(facts) {
  const points = facts.capture?.hook_points ?? facts.layers?.layers ?? {};
  const layers = Object.keys(points).map(Number).sort((a, b) => a - b);
  return { layers, points, has: (name) => layers.some((layer) => points[layer].includes(name)) };
}

export function modulesOf(facts, kind) {
  const modules = Object.entries(facts.readouts?.modules ?? {});
  return modules.filter(([, one]) => one.kind === kind).map(([name, one]) => ({ name, ...one }));
}
