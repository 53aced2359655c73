// What the page shows is in the URL's fragment, which is never sent to a server.

const listeners = new Set();
const WAIT_MS = 150; // Browsers limit how often the address may change.
let timer = 0;

// Fields that are text as it is; all others are JSON, or text that is no JSON.
const TEXTS = new Set(["prompt", "system", "vector", "clean", "corrupt", "answer", "foil", "view", "model"]);

function parse() {
  const found = {};
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    try {
      found[name] = TEXTS.has(name) ? text : JSON.parse(text);
    } catch {
      found[name] = text;
    }
  }
  return found;
}

let current = parse();

export function state() {
  return current;
}

export function update(change) {
  current = { ...current, ...change };
  for (const name of Object.keys(current)) {
    if (current[name] === null || current[name] === undefined) delete current[name];
  }
  clearTimeout(timer);
  timer = setTimeout(write, WAIT_MS);
  listeners.forEach((listener) => listener(current));
}

function write() {
  const fields = Object.entries(current).map(([name, value]) => [
    name,
    typeof value === "string" ? value : JSON.stringify(value),
  ]);
  history.replaceState(null, "", "#" + new URLSearchParams(fields));
}

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

addEventListener("hashchange", () => {
  current = parse();
  listeners.forEach((listener) => listener(current));
});
