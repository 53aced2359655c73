// The map of a patching sweep: layers (or heads of a layer) by positions.

import { html } from "../vendor/preact-htm.js";
import { Heatmap } from "./heatmap.js";
import { short, visible } from "./tint.js";

// `sweep` has layers, positions, tokens, heads?, metric, clean, corrupt and `grids` by hook.
export function PatchMap({ sweep, hook, picked, onPick, version }) {
  const { layers, positions, tokens, heads } = sweep;
  const grid = sweep.grids[hook] ?? [];
  const each = heads?.length ?? 1;
  const value = (row, column) => {
    const line = grid[Math.floor(row / each)];
    const found = heads ? line?.[row % each]?.[column] : line?.[column];
    return found ?? NaN;
  };
  const rowName = (row) => `layer ${layers[Math.floor(row / each)]}` + (heads ? ` head ${heads[row % each]}` : "");
  const groupOf = (column) => [positions[column]].flat();
  const textOf = (column) => groupOf(column).map((p) => visible(tokens?.[p] ?? "")).join(" ");
  const columnName = (column) => `position ${groupOf(column).join(" ")} ${textOf(column)}`;
  const zero = sweep.metric === "recovered" ? 0 : sweep.corrupt ?? sweep.clean ?? 0;
  return html`<section><h3>${hook}: ${sweep.metric}</h3>
    <p>clean ${short(sweep.clean ?? NaN)}, corrupt ${short(sweep.corrupt ?? NaN)}${
      sweep.noise_floor === undefined ? "" : `, noise floor ${short(sweep.noise_floor ?? NaN)}`}</p>
    <p class="note">Orange is above ${short(zero)}, blue below; a grey cell has no value.</p>
    <${Heatmap} rows=${layers.length * each} columns=${positions.length} value=${value} version=${version}
      zero=${zero} rowName=${rowName} columnName=${columnName} columnLabel=${textOf} onPick=${onPick} picked=${picked}
      rowLabel=${(row) => heads ? `${layers[Math.floor(row / each)]}.${heads[row % each]}` : `L${layers[row]}`}
      label=${`Patching map at ${hook}`} /></section>`;
}
