// Requests to the server that serves the page. The key lives in this module only.

const BASE = new URL("..", document.baseURI);
let key = "";
const RETRY_MS = 2000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(given) {
  key = given;
}

export async function call(path, { body, method, signal } = {}) {
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), BASE), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(key ? { Authorization: "Bearer " + key } : {}),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

export async function ask(path, options) {
  return (await call(path, options)).json();
}

async function messageOf(response) {
  const text = await response.text();
  try {
    const found = JSON.parse(text);
    const detail = found.error?.message ?? found.detail ?? found.error ?? found.message;
    return typeof detail === "string" ? detail : JSON.stringify(detail ?? found);
  } catch {
    return text || "HTTP " + response.status;
  }
}

// The JSON events of a streamed answer, in arrays of those that arrived together.
export async function* events(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection was lost during the answer.");
    }
    rest += decoder.decode(part.value ?? new Uint8Array(), { stream: !part.done });
    const lines = rest.split(/\r?\n/);
    rest = part.done ? "" : lines.pop();
    const found = [];
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        if (found.length) yield found;
        return;
      }
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error && !event.type) {
        throw new ApiError(event.error.code ?? 500, event.error.message ?? String(event.error));
      }
      found.push(event);
    }
    if (found.length) yield found;
    if (part.done) throw new ApiError(0, "The connection was lost during the answer.");
  }
}

// Calls `work` again after a lost connection until it succeeds or `signal` is aborted.
// `onState` gets what to say about the connection, null once there is nothing to say.
export async function persistently(work, onState, signal) {
  for (;;) {
    try {
      const found = await work();
      onState(null);
      return found;
    } catch (error) {
      if (error.status !== 0 || signal?.aborted) throw error;
      onState(`${error.message} Trying again.`);
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      if (signal?.aborted) throw new DOMException("aborted", "AbortError");
    }
  }
}

// The texts of single tokens. They never change, so each is asked for once.
const texts = new Map();
const TOGETHER = 5; // A browser opens six connections to one host.

export async function tokenTexts(model, ids) {
  const wanted = [...new Set(ids)].filter((id) => id >= 0 && !texts.has(id));
  const work = async () => {
    for (let id; (id = wanted.pop()) !== undefined; ) {
      const found = await ask("/detokenize", { body: { model, tokens: [id] } });
      texts.set(id, found.prompt);
    }
  };
  await Promise.all(Array.from({ length: TOGETHER }, work));
  return (id) => texts.get(id) ?? "#" + id;
}

// The path of a model by its name on the server; `LLM` takes the path.
const paths = new Map();
export const pathOf = (model) => paths.get(model) ?? model;

export async function facts() {
  const models = await ask("/v1/models"); // First and alone: it may ask for the key.
  for (const { id, root } of models.data) paths.set(id, root);
  const [capture, readouts, steering, layers, modules] = await Promise.all([
    optional("/v1/capture"),
    optional("/v1/readouts"),
    optional("/v1/steering"),
    optional("/v1/steering/layers"),
    optional("/v1/steering/modules"),
  ]);
  return { models: models.data, capture, readouts, steering, layers, modules };
}

async function optional(path) {
  try {
    return await ask(path);
  } catch (error) {
    if (error.status === 0 || error.status === 401) throw error;
    return { error: error.message };
  }
}
