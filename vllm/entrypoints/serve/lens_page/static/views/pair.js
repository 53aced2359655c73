// Plain beside steered: two requests that the server computes in one batch.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Copy, Problem, complete, useWork } from "../parts.js";
import { TokenText } from "../draw/tokens.js";
import { percent, rangeOf, short, visible } from "../draw/tint.js";
import { tokenTexts } from "../api.js";
import { NEXT_TOKEN, idsOf, likeliest } from "../text.js";
import { generate, newRun, requestOf, stampOf } from "./run.js";

const REST_MS = 250;

// KL(steered ‖ plain) of two lists of the likeliest tokens: the whole divergence is at least
// this. Tokens of one list only are joined to one event; what the other list gives them is
// at most its smallest probability for each, and is chosen so that the divergence is least.
export function klAtLeast(steered, plain) {
  const [p, q] = [steered, plain].map((list) => new Map(list.map(([id, logprob]) => [id, Math.exp(logprob)])));
  const sum = (list) => list.reduce((total, one) => total + one, 0);
  const rest = (list) => Math.max(1e-9, 1 - sum([...list.values()]));
  const own = (list, other) => [...list].filter(([id]) => !other.has(id)).map(([, chance]) => chance);
  const most = (list, count) => Math.min(rest(list), count * Math.min(...list.values()));
  const [onlyP, onlyQ] = [own(p, q), own(q, p)];
  const [newP, newQ] = [sum(onlyP), sum(onlyQ)];
  const [mostP, mostQ] = [most(p, onlyQ.length), most(q, onlyP.length)];
  let [lostP, lostQ] = [mostP / 2, mostQ / 2]; // Of the tokens that only the other list has.
  for (let turn = 0; turn < 100; turn++) { // Convex: each step is the least in one of them.
    lostQ = Math.min(mostQ, (rest(q) * newP) / (newP + rest(p) - lostP));
    lostP = Math.min(mostP, (rest(p) * newQ) / (newQ + rest(q) - lostQ));
  }
  const term = (one, other) => (one > 1e-12 ? one * Math.log(one / Math.max(other, 1e-12)) : 0);
  const both = [...p].filter(([id]) => q.has(id)).map(([id, chance]) => term(chance, q.get(id)));
  return Math.max(0, sum(both) + term(newP, lostQ) + term(lostP, newQ) + term(rest(p) - lostP, rest(q) - lostQ));
}

// `fields` are those that steer; null if nothing does.
export function Pair({ model, state, text, fields }) {
  const { busy, error, run, stop } = useWork();
  const probing = useWork();
  const [next, setNext] = useState(null);
  const runs = useRef([newRun(), newRun()]);
  const [, draw] = useState(0);
  const prompt = text && idsOf({ tokens: text.tokens.slice(0, text.prompt) });
  const key = JSON.stringify([prompt, fields]);

  useEffect(() => { // The next token, plain and steered, as a slider moves.
    if (!prompt?.length || !fields) return setNext(null);
    const timer = setTimeout(() => probing.run(async (signal) => {
      const body = { model, prompt, ...NEXT_TOKEN };
      const [plain, steered] = await Promise.all([
        complete(body, signal), complete({ ...body, ...fields, steering_receipt: true }, signal),
      ]);
      const tops = [likeliest(plain), likeliest(steered)];
      const textOf = await tokenTexts(model, tops.flat().map(([id]) => id));
      if (!signal.aborted) setNext({ tops, textOf, kl: klAtLeast(tops[1], tops[0]), receipt: steered.steering });
    }), REST_MS);
    return () => clearTimeout(timer);
  }, [key]);

  const steered = requestOf(model, state, undefined, fields ? { ...fields, steering_receipt: true } : {});
  const start = () => run(async (signal) => {
    runs.current = [newRun(), newRun()];
    runs.key = key;
    const requests = [requestOf(model, state), steered];
    const onFrame = () => draw((n) => n + 1);
    await Promise.all(requests.map((request, side) =>
      generate(model, state, request, runs.current[side], { tint: "surprise", onFrame, signal })));
  });
  const old = runs.key !== key; // The texts are those of other settings.
  const receipt = (old ? null : runs.current[1].receipt) ?? next?.receipt;
  return html`<div>
    <div class="row"><button type="button" class="main" disabled=${!fields && !busy} onClick=${busy ? stop : start}>${
      busy ? "Stop" : "Generate both"}</button>
      ${next && html`<output aria-live="polite" class=${probing.busy ? "stale" : ""}>KL of the next token to plain: at least
        <b> ${short(next.kl)}</b> nats; dose <b>${doses(next.receipt)}</b></output>`}</div>
    <${Problem} error=${error ?? probing.error} />
    <div class="pair">${["plain", "steered"].map((name, side) => {
      const { tokens, values, prompt: given } = runs.current[side];
      return html`<section key=${name}><h3>${name}</h3>
        ${next && html`<ol class="alternatives">${next.tops[side].slice(0, 5).map(([id, logprob]) => html`<li key=${id}>
          <span class="word">${visible(next.textOf(id))}</span> ${percent(logprob)}</li>`)}</ol>`}
        <div class=${old ? "stale" : ""}><${TokenText} tokens=${tokens} values=${values} range=${rangeOf(values)} prompt=${given}
          name="surprise" stamp=${stampOf(runs.current[side])} label=${`Tokens, ${name}`} /></div></section>`;
    })}</div>
    <${Receipt} receipt=${receipt} />
    <${Copy} request=${steered} /></div>`;
}

function doses(receipt) {
  return (receipt?.applied ?? []).map((one) => short(one.dose?.mean ?? NaN)).join(", ") || "none";
}

function Receipt({ receipt }) {
  if (!receipt) return null;
  const fired = Object.entries(receipt.fired ?? {});
  return html`<section><h3>What was done</h3><div class="wide"><table>
    <thead><tr>${["place", "operation", "tokens", "mean dose", "largest dose"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${receipt.applied.map((one) => html`<tr><td>${one.hook} ${one.layer}</td><td>${one.op}</td><td>${one.tokens}</td>
      <td>${short(one.dose?.mean ?? NaN)}</td><td>${short(one.dose?.max ?? NaN)}</td></tr>`)}</tbody></table></div>
    ${fired.length > 0 && html`<h3>Where conditions fired</h3><ul>${fired.map(([name, one]) => html`<li key=${name}>
      ${name} (layer ${one.layer}, ${one.hook}): ${one.tokens} of ${one.decided} tokens${
        one.first === null ? "" : `, first at position ${one.first}`}</li>`)}</ul>`}</section>`;
}
