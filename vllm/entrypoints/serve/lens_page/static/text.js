// The current text as tokens: that of the URL, or what was generated last.

import { ask, tokenTexts } from "./api.js";

const MOST_KEPT = 1000; // Longer texts would make an address that browsers cut.

// Byte-level vocabularies show each byte as a letter; this is that table, backwards.
const BYTES = (() => {
  const shown = [];
  for (let byte = 0; byte < 256; byte++) {
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174) shown.push(byte);
  }
  const table = new Map(shown.map((byte) => [String.fromCharCode(byte), byte]));
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    if (!shown.includes(byte)) table.set(String.fromCharCode(next++), byte);
  }
  return table;
})();
const UTF8 = new TextDecoder("utf-8", { fatal: true });

export function readable(piece) {
  if (piece.includes("\u2581")) return piece.replaceAll("\u2581", " ");
  const bytes = [...piece].map((letter) => BYTES.get(letter));
  if (bytes.includes(undefined)) return piece;
  try {
    return UTF8.decode(new Uint8Array(bytes));
  } catch {
    return piece;
  }
}

export function messagesOf(state) {
  const system = state.system ? [{ role: "system", content: state.system }] : [];
  return [...system, { role: "user", content: state.prompt ?? "" }];
}

export async function tokenised(model, state) {
  const body = { model, return_token_strs: true, ...(state.mode === "chat"
    ? { messages: messagesOf(state), add_generation_prompt: true }
    : { prompt: state.prompt ?? "" }) };
  const found = await ask("/tokenize", { body });
  return found.tokens.map((id, place) => ({ id, text: readable(found.token_strs[place]) }));
}

let known = { key: null, tokens: [], prompt: 0 };

function keyOf(state) {
  return JSON.stringify([state.mode, state.system, state.prompt, state.out]);
}

// Remembers a generated text; returns the field of the URL that names it.
export function remember(state, tokens, prompt) {
  const out = tokens.slice(prompt, prompt + MOST_KEPT).map((token) => token.id);
  const next = { ...state, out };
  known = { key: keyOf(next), tokens, prompt };
  return { out };
}

export async function currentText(model, state) {
  if (known.key === keyOf(state)) return known;
  const given = await tokenised(model, state);
  const out = Array.isArray(state.out) ? state.out : [];
  const textOf = await tokenTexts(model, out);
  const tokens = [...given, ...out.map((id) => ({ id, text: textOf(id) }))];
  known = { key: keyOf(state), tokens, prompt: given.length };
  return known;
}

export function idsOf(text) {
  return text.tokens.map((token) => token.id);
}

// The likeliest next tokens of a completion's answer: [[token id, log-probability]].
export function likeliest(answer) {
  const top = answer.choices[0].logprobs?.top_logprobs?.[0] ?? {};
  return Object.entries(top).map(([name, logprob]) => [Number(name.replace("token_id:", "")), logprob]);
}

export const NEXT_TOKEN = { max_tokens: 1, temperature: 0, logprobs: 20, return_tokens_as_token_ids: true };
