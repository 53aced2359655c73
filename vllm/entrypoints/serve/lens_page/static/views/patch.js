// Patching: the map of layers, or heads, and positions fills in as cells arrive.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Needs, Problem, complete, hooksOf, useWork } from "../parts.js";
import { events } from "../api.js";
import { PatchMap } from "../draw/patch.js";

const METRICS = ["logprob", "logit_diff", "recovered", "kl"];
const HEADS = new Set(["q", "k", "v", "z"]);
const SOURCES = new Set(["patch_source", "memory"]); // Consumers that keep runs.

export function sweepOf(model, state) {
  const hook = state.point ?? "post_block";
  return {
    path: "/v1/patch_sweep",
    body: {
      model, prompt: state.corrupt ?? "", clean_prompt: state.clean ?? "",
      answer_token: state.answer ?? "", ...(state.foil ? { foil_token: state.foil } : {}),
      hooks: [hook], metric: state.metric ?? (state.foil ? "logit_diff" : "logprob"), layers: "all",
      positions: "all_prompt", ...(HEADS.has(hook) ? { heads: "all" } : {}), stream: true, keep_source: true,
    },
  };
}

// Takes an event of the stream into `sweep`.
export function take(sweep, event) {
  if (event.type === "start" || event.type === "summary") {
    const { type, hook_grids: grids, ...found } = event;
    Object.assign(sweep, found);
    sweep.source = event.captured_source_run ?? sweep.source;
    sweep.ended = type === "summary"; // Positions without a counterpart have no cells.
    for (const one of grids ?? []) sweep.grids[one.hook] = one.grid;
    for (const hook of event.hooks ?? [event.hook]) {
      sweep.grids[hook] ??= event.layers.map(() => event.heads ? event.heads.map(() => []) : []);
    }
  } else if (event.type === "cell") {
    const same = (one) => JSON.stringify(one) === JSON.stringify(event.position);
    const line = sweep.grids[event.hook][sweep.layers.indexOf(event.layer)];
    const cells = event.head === undefined ? line : line[sweep.heads.indexOf(event.head)];
    cells[sweep.positions.findIndex(same)] = event.value ?? NaN;
    sweep.done++;
    if (event.error) sweep.errors.push(`${event.hook}, layer ${event.layer}, position ${event.position}: ${event.error}`);
  }
}

export function Patch({ model, facts, state, update }) {
  const { busy, error, run, stop } = useWork();
  const looking = useWork();
  const shown = useRef(null);
  const [version, draw] = useState(0);
  const [cell, setCell] = useState(null);
  const { layers, points } = hooksOf(facts);
  const request = sweepOf(model, state);
  const start = () => run(async (signal) => {
    const sweep = { ended: false, layers: [], positions: [], tokens: [], grids: {}, done: 0, errors: [] };
    let frame = 0;
    for await (const batch of events(request.path, request.body, signal)) {
      for (const event of batch) take(sweep, event);
      if (shown.current !== sweep && sweep.layers.length) { shown.current = sweep; setCell(null); }
      frame ||= requestAnimationFrame(() => { frame = 0; draw((n) => n + 1); });
    }
    draw((n) => n + 1);
  });
  const sweep = shown.current;
  const total = sweep && sweep.layers.length * sweep.positions.length * (sweep.heads?.length ?? 1);
  const hook = request.body.hooks[0];
  const pick = (row, column) => looking.run(async (signal) => {
    const each = sweep.heads?.length ?? 1;
    const layer = sweep.layers[Math.floor(row / each)];
    const entry = {
      op: "replace", from: { run: sweep.source }, positions: [sweep.positions[column]].flat(),
      ...(sweep.heads ? { heads: [sweep.heads[row % each]] } : {}),
    };
    const body = {
      model, prompt: request.body.prompt, max_tokens: 12, temperature: 0,
      steering_vectors: { [hook]: { [layer]: [entry] } },
    };
    const found = {
      at: [row, column], path: "/v1/completions", body,
      sweep: { ...request.body, layers: [layer], positions: [sweep.positions[column]], run: sweep.source },
    };
    setCell(found);
    update({ cell: [row, column] });
    const answer = await complete(body, signal);
    if (!signal.aborted) setCell({ ...found, text: answer.choices[0].text });
  });
  useEffect(() => { // The cell of the URL, once its run is there.
    if (sweep?.ended && state.cell && !cell) pick(...state.cell);
  }, [sweep?.ended, sweep]);
  if (!facts.capture?.consumers?.some(({ name }) => SOURCES.has(name)) || facts.steering?.error) {
    return html`<${Needs} what="patching" flags="--enable-patching" />`;
  }
  const field = (name, label) => html`<label class="block">${label}
    <input type="text" value=${state[name] ?? ""} onInput=${(e) => update({ [name]: e.target.value || null })} /></label>`;
  const names = [...new Set(layers.flatMap((layer) => points[layer]))];
  return html`<div>
    ${field("clean", "Clean prompt")}${field("corrupt", "Corrupt prompt")}
    <div class="row">
      ${field("answer", "Answer token")}${field("foil", "Foil token")}
      <${Choice} label="Point" value=${hook} options=${names} onChange=${(point) => update({ point })} />
      <${Choice} label="Metric" value=${request.body.metric} options=${METRICS} onChange=${(metric) => update({ metric })} />
      <button type="button" class="main" disabled=${!busy && !(state.clean && state.corrupt)}
        onClick=${busy ? stop : start}>${busy ? "Stop" : "Sweep"}</button></div>
    <p class="note">Tokens usually begin with a space: “ Paris”.</p>
    <${Problem} error=${error} />
    ${sweep && html`<progress max=${total} value=${sweep.ended ? total : sweep.done}
        aria-label="Cells that have arrived"></progress>
      ${Object.keys(sweep.grids).map((name) => html`<${PatchMap} key=${name} sweep=${sweep} hook=${name} version=${version}
        picked=${cell?.at} onPick=${pick} />`)}
      ${sweep.errors.length > 0 && html`<details><summary>${sweep.errors.length} cells failed</summary>
        <ul>${sweep.errors.slice(0, 50).map((one) => html`<li key=${one}>${one}</li>`)}</ul></details>`}`}
    <${Problem} error=${looking.error} />
    ${cell?.text !== undefined && html`<section aria-live="polite"><h3>Completion with this cell patched</h3>
      <p class="text">${cell.text}</p></section>`}
    <${Copy} request=${cell ?? request} /></div>`;
}
