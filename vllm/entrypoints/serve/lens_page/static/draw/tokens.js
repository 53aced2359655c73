// A text as tokens, each with a colour. Blocks that have not changed are not drawn again.

import { Component, html } from "../vendor/preact-htm.js";
import { short, tint, visible } from "./tint.js";

const BLOCK = 200; // Tokens of a block, which ends at the next line end.
const MOST = 300;

class Block extends Component {
  shouldComponentUpdate(next) {
    const old = this.props;
    return ["tokens", "last", "range", "stamp", "chosen", "name", "prompt"].some((n) => old[n] !== next[n]);
  }

  render({ tokens, values, first, last, chosen, range, prompt, name }) {
    const drawn = [];
    for (let place = first; place < last; place++) {
      drawn.push(one(tokens[place], values?.[place], place, place === chosen, range, prompt, name));
    }
    return html`<span class="block">${drawn}</span>`;
  }
}

function one(token, value, place, chosen, range, prompt, name) {
  const shown = Number.isFinite(value);
  const title = `${place}: ${visible(token.text)}${shown ? ` — ${name} ${short(value)}` : ""}`;
  const classes = "token" + (chosen ? " chosen" : "") + (place === prompt && prompt > 0 ? " begins" : "");
  return html`<span key=${place} class=${classes} data-place=${place} title=${title}
    style=${shown ? { backgroundColor: tint(value, range) } : undefined}>${token.text}</span>`;
}

export class TokenText extends Component {
  // The ends of blocks, which do not move while tokens are appended.
  ends = [];
  seen = null;

  blocks(tokens) {
    if (this.seen !== tokens) {
      this.ends = [];
      this.seen = tokens;
    }
    let first = this.ends.at(-1) ?? 0;
    for (let place = first; place < tokens.length; place++) {
      const size = place + 1 - first;
      if ((size >= BLOCK && tokens[place].text.includes("\n")) || size >= MOST) {
        this.ends.push(place + 1);
        first = place + 1;
      }
    }
    return [...this.ends, ...(first < tokens.length ? [tokens.length] : [])];
  }

  pick = (event) => {
    const place = event.target.dataset?.place;
    if (place !== undefined) this.props.onPick?.(Number(place));
  };

  move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.props.onPick) return;
    event.preventDefault();
    const next = (this.props.chosen ?? -step) + step;
    this.props.onPick(Math.max(0, Math.min(this.props.tokens.length - 1, next)));
  };

  render({ tokens, values, range, chosen, prompt = 0, name = "value", stamp, label }) {
    let first = 0;
    const blocks = this.blocks(tokens).map((last) => {
      const inside = chosen >= first && chosen < last ? chosen : -1;
      const block = html`<${Block} key=${first} tokens=${tokens} values=${values} name=${name}
        range=${range} first=${first} last=${last} chosen=${inside} prompt=${prompt}
        stamp=${stamp ? stamp(first, last) : values} />`;
      first = last;
      return block;
    });
    const told = chosen >= 0 && tokens[chosen]
      ? `token ${chosen}, ${visible(tokens[chosen].text)}, ${name} ${short(values?.[chosen])}` : "";
    return html`<div class="tokens" tabindex="0" role="group" onClick=${this.pick} onMouseOver=${this.props.onHover}
      onKeyDown=${this.move} aria-label=${label ?? "Tokens; move with the cursor keys"}>${blocks}</div>
      <span class="hidden" aria-live="polite">${told}</span>`;
  }
}
