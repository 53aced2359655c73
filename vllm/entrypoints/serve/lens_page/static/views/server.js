// The server: consumers, queues, modules and counters, read again every two seconds.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Copy, Problem } from "../parts.js";
import { ask, call, persistently } from "../api.js";
import { Lines } from "../draw/lens.js";
import { short } from "../draw/tint.js";

const EVERY_MS = 2000;
const KEPT = 150;
const RATES = { "vllm:prompt_tokens_total": "prompt tokens/s", "vllm:generation_tokens_total": "generated tokens/s" };
const LEVELS = { "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting" };
const OURS = /^vllm:(capture|readout|steering|patch)/;

// Sums of Prometheus' samples by name.
export function totals(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([^#\s{]+)(?:\{.*\})? (\S+)/.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
  }
  return found;
}

export function Server({ model, facts }) {
  const [shown, setShown] = useState(null);
  const [error, setError] = useState(null);
  const history = useRef([]);
  useEffect(() => {
    const ending = new AbortController();
    const read = async () => {
      const [metrics, capture, readouts, steering, modules] = await Promise.all([
        call("/metrics", { signal: ending.signal }).then((answer) => answer.text()),
        ...["/v1/capture", "/v1/readouts", "/v1/steering", "/v1/steering/modules"].map((path) =>
          ask(path, { signal: ending.signal }).catch((failure) => {
            if (!failure.status) throw failure;
            return { error: failure.message };
          })),
      ]);
      return { found: totals(metrics), capture, readouts, steering, modules };
    };
    const loop = async () => {
      while (!ending.signal.aborted) {
        const next = await persistently(read, setError, ending.signal);
        const time = Date.now() / 1000;
        history.current = [...history.current, { time, found: next.found }].slice(-KEPT);
        setShown(next);
        await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
      }
    };
    loop().catch((failure) => { if (!ending.signal.aborted) setError(failure); });
    return () => ending.abort();
  }, []);
  const points = history.current;
  const times = points.map((one) => one.time);
  const rate = (name) => points.map((one, k) => k === 0 ? 0
    : Math.max(0, ((one.found.get(name) ?? 0) - (points[k - 1].found.get(name) ?? 0)) / (one.time - points[k - 1].time)));
  const colours = ["#d9730d", "#2f7de1"];
  const series = (names, valuesOf) => Object.entries(names).map(([name, label], k) =>
    ({ label, values: valuesOf(name), colour: colours[k] }));
  return html`<div>
    <${Problem} error=${error} />
    <dl class="facts"><div><dt>model</dt><dd>${model}</dd></div>
      <div><dt>context</dt><dd>${facts.models[0]?.max_model_len ?? "–"} tokens</dd></div>
      <div><dt>width</dt><dd>${facts.layers?.hidden_size ?? "–"}</dd></div>
      <div><dt>layers</dt><dd>${Object.keys(facts.capture?.hook_points ?? facts.layers?.layers ?? {}).length || "–"}</dd></div>
      <div><dt>KV cache in use</dt><dd>${short((shown?.found.get("vllm:kv_cache_usage_perc") ?? NaN) * 100)} %</dd></div></dl>
    <div class="pair"><section><h3>Requests</h3><${Lines} time x=${times} label="Requests running and waiting"
      series=${series(LEVELS, (name) => points.map((one) => one.found.get(name) ?? 0))} /></section>
      <section><h3>Tokens</h3><${Lines} time x=${times} label="Tokens per second" series=${series(RATES, rate)} /></section></div>
    ${shown && html`<${Consumers} capture=${shown.capture} />
      <${Tree} name="Readouts and modules" value=${shown.readouts} />
      <${Tree} name="Steering" value=${shown.steering} />
      <${Tree} name="Named vectors" value=${shown.modules.modules ?? shown.modules} />
      <section><h3>Counters</h3><div class="wide"><table class="counters"><tbody>${[...shown.found].filter(([name]) => OURS.test(name)
        && !/_(bucket|created)$/.test(name)).map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th>
        <td>${Number.isInteger(value) ? value.toLocaleString() : short(value)}</td></tr>`)}</tbody></table></div></section>`}
    <${Copy} request=${{ path: "/v1/capture", model }} /></div>`;
}

function Consumers({ capture }) {
  if (!capture.consumers?.length) {
    return html`<section><h3>Capture</h3><p>${capture.error ?? html`No consumers: name one with
      <code> --capture-consumers NAME</code>.`}</p></section>`;
  }
  const counters = capture.counters?.consumers ?? {};
  return html`<section><h3>Consumers</h3><div class="wide"><table>
    <thead><tr><th scope="col">name</th><th scope="col">runs in</th><th scope="col">counters</th></tr></thead>
    <tbody>${capture.consumers.map((one) => html`<tr key=${one.name}><th scope="row">${one.instance_name ?? one.name}</th>
      <td>${one.location}</td><td>${entries(counters[one.instance_name ?? one.name])}</td></tr>`)}</tbody></table></div>
    <${Tree} name="Queues and limits" value=${{ ...capture.limits, requests_in_flight: capture.counters?.requests_in_flight,
      host_memory: capture.host_memory }} /></section>`;
}

function entries(found) {
  return Object.entries(found ?? {}).filter(([, value]) => value !== 0).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ") || "none yet";
}

function Tree({ name, value }) {
  return html`<details><summary>${name}</summary><pre tabindex="0">${JSON.stringify(value, null, 2)}</pre></details>`;
}
