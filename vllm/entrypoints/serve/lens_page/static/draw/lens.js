// What each layer predicts after a token: its likeliest tokens, and the course of pinned ones.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import { percent, tint, visible } from "./tint.js";

const COLOURS = ["#d9730d", "#2f7de1", "#2e9e5b", "#b04ad8", "#c93a4b", "#8a7b1f"];
const FULL = [0, 1];
// There is no layer 1.5, and no half request.
const WHOLE_STEPS = Array.from({ length: 21 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300];
const clock = (time) => (Number.isFinite(time) ? new Date(time * 1000).toLocaleTimeString([], { hour12: false }) : "–");

// `lens` has taps, token_ids and logprobs [taps, top_k]; pinned: [{id, logprobs [taps]}].
export function LensTable({ lens, textOf, pinned = [], onPin }) {
  const pins = new Map(pinned.map((pin, number) => [pin.id, COLOURS[number % COLOURS.length]]));
  const rows = lens.taps.map(([layer, hook], tap) => ({ layer, hook, tap })).reverse();
  return html`<div class="wide"><table class="lens">
    <caption>Likeliest next tokens by layer, with their probabilities</caption>
    <thead><tr><th scope="col">layer</th>${lens.token_ids[0].map((_, k) => html`<th scope="col">${k + 1}</th>`)}</tr></thead>
    <tbody>${rows.map(({ layer, hook, tap }) => html`<tr key=${tap}>
      <th scope="row" title=${hook}>${layer}</th>
      ${lens.token_ids[tap].map((id, k) => {
        const chance = lens.logprobs[tap][k];
        return html`<td style=${{ backgroundColor: tint(Math.exp(chance), FULL) }}>
          <button type="button" class="cell" onClick=${() => onPin?.(id)} aria-pressed=${pins.has(id)}
            style=${pins.has(id) ? { borderColor: pins.get(id) } : undefined}>
            <span class="word">${visible(textOf(id))}</span> <small>${percent(chance)}</small>
          </button></td>`;
      })}</tr>`)}</tbody></table></div>`;
}

export function PinnedLines({ lens, pinned, textOf, onPin }) {
  const layers = lens.taps.map(([layer]) => layer);
  const series = pinned.map((pin, number) => ({
    label: visible(textOf(pin.id)),
    values: pin.logprobs.map(Math.exp),
    colour: COLOURS[number % COLOURS.length],
  }));
  return html`<section><h3>Probability over layers</h3>
    <p class="pins">${pinned.map((pin, number) => html`<button type="button" key=${pin.id} class="pin"
      style=${{ borderColor: COLOURS[number % COLOURS.length] }} disabled=${!onPin} onClick=${() => onPin?.(pin.id)}
      aria-label=${`remove ${textOf(pin.id)}`}>${visible(textOf(pin.id))}${onPin ? " ×" : ""}</button>`)}</p>
    <${Lines} x=${layers} series=${series} label="Probability of pinned tokens by layer" />
  </section>`;
}

// A line chart of uPlot, drawn anew when its series change. No value is below 0; over
// `time` they are counts and rates.
export function Lines({ x, series, label, time = false, height = 200 }) {
  const place = useRef();
  const plot = useRef();
  const shape = JSON.stringify([series.map((one) => one.label), time]);
  const data = [x, ...series.map((one) => one.values)];
  useEffect(() => {
    const ink = getComputedStyle(place.current).color;
    const axis = { stroke: ink, grid: { stroke: "rgba(128,128,128,.25)" }, ticks: { show: false } };
    const width = Math.max(240, place.current.clientWidth);
    plot.current = new globalThis.uPlot(
      {
        width, height, cursor: { drag: { x: false } }, scales: { x: { time }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
        axes: [
          time ? { ...axis, incrs: SECONDS, space: 90, values: (_, times) => times.map(clock) } : { ...axis, incrs: WHOLE_STEPS },
          { ...axis, size: 56, ...(time ? { incrs: WHOLE_STEPS } : {}) },
        ],
        series: [time ? { label: "time", value: (_, at) => clock(at) } : { label: "layer" }, ...series.map((one) => ({
          label: one.label, stroke: one.colour, width: 2, points: { show: !time },
        }))],
      },
      data,
      place.current,
    );
    const fit = () => plot.current.setSize({ width: Math.max(240, place.current.clientWidth), height });
    addEventListener("resize", fit);
    return () => {
      removeEventListener("resize", fit);
      plot.current.destroy();
    };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data); }, [JSON.stringify(data)]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${label}></div>`;
}
