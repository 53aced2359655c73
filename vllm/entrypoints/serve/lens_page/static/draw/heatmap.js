// A heat map on a canvas, with a reading of the cell below the pointer or the cursor keys.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { rangeOf, short, tint } from "./tint.js";

const LABEL = 64; // Pixels for names of rows on the left, and of columns above.
const LETTERS = 9;
const LEGIBLE = 12; // The least pixels of a cell for a name of its own.

// `value(row, column)` is a number, or NaN where there is none yet. `rowLabel` and
// `columnLabel` give names that are drawn beside the map.
export function Heatmap(props) {
  const { rows, columns, value, rowName, columnName, label, onPick, picked, version } = props;
  const canvas = useRef();
  const [at, setAt] = useState(null);
  const cell = props.cell ?? Math.max(6, Math.min(26, Math.floor(760 / Math.max(1, columns))));
  const margin = props.plain ? 0 : LABEL;
  const above = props.columnLabel && cell >= LEGIBLE ? LABEL : 0;
  const width = margin + columns * cell;
  const height = above + rows * cell;
  useEffect(() => {
    draw(canvas.current, { ...props, cell, margin, above, width, height, at });
  }, [rows, columns, value, version, cell, at, picked?.[0], picked?.[1]]);

  const find = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - margin) / cell);
    const row = Math.floor((event.clientY - box.top - above) / cell);
    return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
  };
  const move = (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (event.key === "Enter" && at) onPick?.(...at);
    if (!step) return;
    event.preventDefault();
    const [row, column] = at ?? [0, -1];
    setAt([clip(row + step[0], rows), clip(column + step[1], columns)]);
  };
  if (props.plain) {
    return html`<canvas ref=${canvas} role="img" aria-label=${label}></canvas>`;
  }
  const reading = at
    ? `${rowName(at[0])}, ${columnName(at[1])}: ${short(value(...at))}`
    : "Point at a cell, or move with the cursor keys.";
  return html`<div class="heatmap">
    <div class="wide"><canvas ref=${canvas} tabindex="0" role="img"
      aria-label=${`${label}. ${reading}`} onMouseMove=${(e) => setAt(find(e))}
      onMouseLeave=${() => setAt(null)} onKeyDown=${move}
      onClick=${(e) => { const found = find(e); if (found) onPick?.(...found); }}></canvas></div>
    <p class="reading" aria-live="polite">${reading}</p>
  </div>`;
}

function clip(number, count) {
  return Math.max(0, Math.min(count - 1, number));
}

function draw(canvas, { rows, columns, value, cell, margin, above, width, height, at, picked, range, rowLabel, columnLabel, zero }) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.max(1, width * scale);
  canvas.height = Math.max(1, height * scale);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const gap = cell > 8 ? 1 : 0;
  const base = zero ?? 0;
  const used = range ?? rangeAround(all(rows, columns, value), zero);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const number = value(row, column);
      pen.fillStyle = Number.isFinite(number) ? tint(number - base, used) : "rgba(128,128,128,.12)";
      pen.fillRect(margin + column * cell, above + row * cell, cell - gap, cell - gap);
    }
  }
  pen.strokeStyle = style.color;
  for (const mark of [at, picked]) {
    if (mark) pen.strokeRect(margin + mark[1] * cell + 0.5, above + mark[0] * cell + 0.5, cell - 1, cell - 1);
  }
  if (!margin) return;
  pen.fillStyle = style.color;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const every = Math.ceil(LEGIBLE / cell);
  for (let row = 0; row < rows; row += every) {
    pen.fillText(cut(rowLabel?.(row) ?? row), margin - 6, above + row * cell + cell / 2, margin - 6);
  }
  if (!above) return;
  pen.textAlign = "left";
  pen.translate(margin, above - 6);
  pen.rotate(-Math.PI / 2);
  for (let column = 0; column < columns; column++) {
    pen.fillText(cut(columnLabel(column)), 0, column * cell + cell / 2, above - 6);
  }
}

function cut(name) {
  const letters = [...String(name)];
  return letters.length > LETTERS ? letters.slice(0, LETTERS - 1).join("") + "…" : letters.join("");
}

// Around `zero` both colours have one scale.
function rangeAround(values, zero) {
  if (zero === undefined) return rangeOf(values);
  const far = rangeOf(values.map((value) => Math.abs(value - zero)))[1];
  return [-far, far];
}

function all(rows, columns, value) {
  const found = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) found.push(value(row, column));
  }
  return found;
}
