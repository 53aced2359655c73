// Colours of values. They lie over the page's background, so they suit light and dark.

export const HUES = { warm: [230, 110, 20], cool: [40, 120, 230] };
const STRONGEST = 0.62; // Text keeps its contrast above this layer.

// The range of finite values; one far value does not flatten all others.
export function rangeOf(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [Math.min(at(0.02), 0), at(0.98)];
  return high > low ? [low, high] : [low, low + 1];
}

export function tint(value, [low, high]) {
  if (!Number.isFinite(value)) return "";
  const negative = value < 0 && low < 0;
  const share = negative ? value / low : value / Math.max(high, 1e-30);
  const alpha = Math.max(0, Math.min(1, share)) * STRONGEST;
  const [r, g, b] = negative ? HUES.cool : HUES.warm;
  return `rgba(${r},${g},${b},${alpha.toFixed(3)})`;
}

export function short(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

export function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return Number.isFinite(value) ? (value < 0.1 ? "<0.1" : value.toFixed(1)) + " %" : "–";
}

// A token's text where only the token is shown: spaces and line ends are visible.
export function visible(text) {
  return text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
