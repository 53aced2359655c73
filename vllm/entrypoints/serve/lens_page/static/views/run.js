// One streamed generation: tokens and their values, handed on once per frame.

import { events } from "../api.js";
import { messagesOf, tokenised } from "../text.js";

export function requestOf(model, state, readouts, more = {}) {
  const chat = state.mode === "chat";
  const path = chat ? "/v1/chat/completions" : "/v1/completions";
  const body = {
    model,
    ...(chat ? { messages: messagesOf(state) } : { prompt: state.prompt ?? "" }),
    max_tokens: state.max ?? 64,
    temperature: state.temperature ?? 0,
    ...(chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 }),
    return_token_ids: true,
    stream: true,
    ...(readouts ? { readouts } : {}),
    ...more,
  };
  return { path, body };
}

// The value of a tint at each token that a result brings: [[position, value]].
export function valuesOf(result, feature) {
  if (!result) return [];
  const table = result.norm ?? result.values ?? result.activations;
  if (!table) return [];
  return result.positions.map((position, row) => [position, [table[row]].flat()[feature ?? 0] ?? NaN]);
}

export function newRun() {
  return { tokens: [], prompt: 0, values: [], changed: [], version: 0, receipt: null, first: NaN };
}

const PART = 50; // Tokens whose changes are counted together.

function touch(run, place) {
  run.version++;
  run.changed[Math.floor(place / PART)] = run.version;
}

// The last change among tokens first … last - 1.
export function stampOf(run) {
  return (first, last) => {
    let found = 0;
    for (let part = Math.floor(first / PART); part <= Math.floor((last - 1) / PART); part++) {
      found = Math.max(found, run.changed[part] ?? 0);
    }
    return found;
  };
}

function set(run, place, value) {
  if (run.values[place] === value) return;
  run.values[place] = value;
  touch(run, place);
}

export function setAll(run, values) {
  run.values = values;
  run.tokens.forEach((_, place) => touch(run, place));
}

// Streams into `run` and calls `onFrame` at most once per animation frame.
export async function generate(model, state, request, run, { tint, onFrame, signal }) {
  const asked = performance.now();
  let frame = 0;
  const show = () => {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; onFrame(); });
  };
  const stream = events(request.path, request.body, signal);
  const given = tokenised(model, state).then((tokens) => {
    run.tokens.unshift(...tokens);
    run.prompt = tokens.length;
    setAll(run, tint === "surprise" ? tokens.map(() => NaN) : run.values);
    show();
  });
  given.catch(() => {});
  for await (const batch of stream) {
    await given;
    for (const chunk of batch) take(run, chunk, tint, asked);
    show();
  }
  await given;
  cancelAnimationFrame(frame);
  onFrame();
}

function take(run, chunk, tint, asked) {
  const choice = chunk.choices?.[0];
  const found = choice && logprobsOf(choice);
  (found ?? []).forEach((one, number) => {
    if (!Number.isFinite(run.first)) run.first = performance.now() - asked;
    const place = run.tokens.length;
    run.tokens.push({ ...one, id: choice.token_ids?.[number] ?? -1 });
    touch(run, place);
    if (tint === "surprise") set(run, place, -one.logprob);
  });
  for (const [position, value] of valuesOf(chunk.readouts?.tint)) set(run, position, value ?? NaN);
  if (chunk.readouts?.tint?.error) run.note = chunk.readouts.tint.error;
  if (chunk.steering) run.receipt = chunk.steering;
  if (choice?.finish_reason) run.finish = choice.stop_reason ?? choice.finish_reason;
}

function logprobsOf({ logprobs }) {
  if (!logprobs) return null;
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      text: one.token, logprob: one.logprob,
      top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((text, number) => ({
    text, logprob: logprobs.token_logprobs[number],
    top: Object.entries(logprobs.top_logprobs?.[number] ?? {}),
  }));
}
