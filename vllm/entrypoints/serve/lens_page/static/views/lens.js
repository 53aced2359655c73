// The lens of a token: what each layer predicts, and pinned tokens over the layers.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { Choice, Copy, Needs, Problem, PromptBox, complete, hooksOf, modulesOf, useText, useWork } from "../parts.js";
import { tokenTexts } from "../api.js";
import { LensTable, PinnedLines } from "../draw/lens.js";
import { visible } from "../draw/tint.js";
import { TokenText } from "../draw/tokens.js";
import { idsOf } from "../text.js";

const MOST_PINS = 6;

export function Lens({ model, facts, state, update }) {
  const { text, error: unread } = useText(model, state);
  const { busy, error, run } = useWork();
  const [found, setFound] = useState(null);
  const pins = state.pins ?? [];
  const place = Math.min(state.token ?? Infinity, (text?.tokens.length ?? 1) - 1);
  const translators = modulesOf(facts, "translator").map(({ name }) => name);
  const spec = {
    kind: "lens", layers: "all", hook: state.hook ?? "post_block", top_k: state.top ?? 5, positions: [place],
    ...(pins.length ? { tokens: pins } : {}), ...(state.translator ? { translator: state.translator } : {}),
  };
  const body = text && { model, prompt: idsOf(text), max_tokens: 1, temperature: 0, readouts: { lens: spec } };
  const asked = JSON.stringify(body);
  useEffect(() => {
    if (!text?.tokens.length || !facts.readouts?.enabled) return;
    run(async (signal) => {
      const { readouts } = await complete(body, signal);
      const lens = readouts.lens;
      if (lens.error) throw new Error(lens.error);
      const one = {
        taps: lens.taps, token_ids: lens.token_ids[0], logprobs: lens.logprobs[0],
        pinned: pins.map((id, k) => ({ id, logprobs: lens.token_logprobs[0].map((line) => line[k]) })),
      };
      const textOf = await tokenTexts(model, [...one.token_ids.flat(), ...pins]);
      if (!signal.aborted) setFound({ ...one, textOf });
    });
  }, [asked]);
  if (!facts.readouts?.enabled) return html`<${Needs} what="readouts" flags="--enable-readouts" reason=${facts.readouts?.error} />`;
  const pin = (id) => update({
    pins: pins.includes(id) ? pins.filter((one) => one !== id) : [...pins, id].slice(-MOST_PINS),
  });
  const next = text?.tokens[place + 1];
  return html`<div>
    <${PromptBox} state=${state} update=${update} rows="2" />
    <${Problem} error=${unread ?? error} />
    ${text && html`<${TokenText} tokens=${text.tokens} chosen=${place} prompt=${text.prompt} name="token"
      onPick=${(token) => update({ token })} />`}
    <div class="row">
      <${Choice} label="Point" value=${spec.hook} options=${["pre_attn", "post_attn", "post_block"]} onChange=${(hook) => update({ hook })} />
      <${Choice} label="Tokens" value=${spec.top_k} options=${[3, 5, 10, 20]} onChange=${(top) => update({ top: Number(top) })} />
      ${translators.length > 0 && html`<${Choice} label="Translator" value=${state.translator ?? ""}
        options=${[["", "none"], ...translators]} onChange=${(one) => update({ translator: one || null })} />`}
      ${next && !pins.includes(next.id) && html`<button type="button" onClick=${() => pin(next.id)}>Pin the actual next token
        <span class="word"> ${visible(next.text)}</span></button>`}
    </div>
    ${found && html`<div class=${busy ? "stale" : ""}>
      ${found.pinned.length > 0
        ? html`<${PinnedLines} lens=${found} pinned=${found.pinned} textOf=${found.textOf} onPin=${pin} />`
        : html`<p class="note">Click a word in the table to pin it: its probability over the layers is drawn.</p>`}
      <${LensTable} lens=${found} textOf=${found.textOf} pinned=${found.pinned} onPin=${pin} /></div>`}
    <${Copy} request=${body && { path: "/v1/completions", body }} /></div>`;
}
