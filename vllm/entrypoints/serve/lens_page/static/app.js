// The page: asks for the key if there is one, then shows the view that the URL names.

import { html, render, useEffect, useState, useErrorBoundary } from "./vendor/preact-htm.js";
import { facts, persistently, setKey } from "./api.js";
import { Choice, Problem } from "./parts.js";
import { state, subscribe, update } from "./state.js";
import { Attention } from "./views/attention.js";
import { Features } from "./views/features.js";
import { Lens } from "./views/lens.js";
import { Patch } from "./views/patch.js";
import { Server } from "./views/server.js";
import { Steer } from "./views/steer.js";
import { Write } from "./views/write.js";

const VIEWS = { write: Write, lens: Lens, attention: Attention, steer: Steer, patch: Patch, features: Features, server: Server };

function KeyForm({ onKey, wrong }) {
  const send = (event) => {
    event.preventDefault();
    const field = event.target.elements.key;
    setKey(field.value);
    field.value = "";
    onKey();
  };
  return html`<form class="key" onSubmit=${send}><h2>This server asks for its key</h2>
    ${wrong && html`<${Problem} error="The server does not accept this key." />`}
    <label class="block">Key <input type="password" name="key" autocomplete="off" required autofocus /></label>
    <button class="main">Go on</button>
    <p class="note">It is kept in this tab's memory until the page is closed or loaded again.</p></form>`;
}

function View({ name, ...rest }) {
  const [error, reset] = useErrorBoundary();
  if (error) return html`<div><${Problem} error=${error} /><button type="button" onClick=${reset}>Show the view again</button></div>`;
  return html`<${VIEWS[name]} ...${rest} />`;
}

function App() {
  const [now, setNow] = useState(state());
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState(0); // How often a key was given.
  const name = now.view in VIEWS ? now.view : "write";
  useEffect(() => subscribe(setNow), []);
  useEffect(() => { // Modules may have been registered since the last view was shown.
    persistently(facts, setError).then(setFound, setError);
  }, [asked, name]);
  const names = found?.models.map((model) => model.id) ?? [];
  const model = names.includes(now.model) ? now.model : names[0];
  return html`<header><h1>Clearbox lens</h1>
      <nav aria-label="Views">${Object.keys(VIEWS).map((one) => html`<a key=${one} href=${"#view=" + one}
        aria-current=${one === name ? "page" : undefined}
        onClick=${(e) => { e.preventDefault(); update({ view: one }); }}>${one}</a>`)}</nav>
      ${names.length > 1 ? html`<${Choice} label="Model" value=${model} options=${names} onChange=${(one) => update({ model: one })} />`
        : html`<span class="note">${model}</span>`}</header>
    <main>${error?.status === 401 ? html`<${KeyForm} wrong=${asked > 0} onKey=${() => setAsked(asked + 1)} />`
      : html`<${Problem} error=${error} />
        ${found ? html`<h2 class="hidden">${name}</h2><${View} key=${name} name=${name} model=${model} facts=${found} state=${now} update=${update} />`
          : !error && html`<p class="note">Asking the server …</p>`}`}</main>`;
}

render(html`<${App} />`, document.body);
