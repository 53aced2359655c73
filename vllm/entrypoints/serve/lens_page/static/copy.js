// A request as text to paste: curl, the Python client, or `LLM`.

import { pathOf } from "./api.js";

const SERVER = location.origin;

export function asCurl({ path, body }) {
  const key = '-H "Authorization: Bearer $API_KEY"';
  if (!body) return `curl -s ${SERVER}${path} ${key}`;
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -sN ${SERVER}${path} -H 'Content-Type: application/json' \\\n  ${key} -d '${data}'`;
}

const named = (fields) => Object.entries(fields).map(([name, value]) => `${name}=${python(value)}`);

export function asClient({ path, body }) {
  const head =
    "import os\n\nfrom clearbox_client import Client\n\n" +
    `client = Client(${python(SERVER)}, api_key=os.environ.get("API_KEY"))\n`;
  if (!body) {
    const parts = ["capture_status", "readouts", "steering", "modules"].map((name) => `client.${name}()`);
    return `${head}print(${parts.join(", ")})`;
  }
  const { model, prompt, messages, stream, ...fields } = body;
  const given = [python(messages ?? prompt), ...named(fields)].join(", ");
  if (path === "/v1/patch_sweep") return `${head}result = client.patch_sweep(${given})\nprint(result["values"])`;
  return `${head}reply = client.${messages ? "chat" : "complete"}(${given})\nprint(reply.text, reply.readouts)`;
}

const NOT_SAMPLING = [
  "model", "prompt", "messages", "stream", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids",
];
const STREAM = new Set(["pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out"]);

// The arguments of `LLM` that a request needs; files are those that the server was given.
function engineOf({ path, body, sweep, model }) {
  const options = {};
  if (!body) return `${python(pathOf(model))}, disable_log_stats=False`;
  const file = (option, name) => { options[option] = { ...options[option], [name]: `FILE OF ${name}` }; };
  const points = new Set(body.hooks);
  for (const one of Object.values(body.readouts ?? {})) {
    options.enable_readouts = true;
    if (one.kind === "attention") points.add("q");
    if (one.sae) file("sae", one.sae);
    for (const name of [one.probe, one.translator]) if (name) file("readout_modules", name);
  }
  for (const { name } of body.steering_name ?? []) file("steering_modules", name);
  for (const [point, layers] of Object.entries(body.steering_vectors ?? {})) {
    points.add(point);
    for (const one of Object.values(layers).flat()) if (one.sae) file("sae", one.sae);
  }
  if (options.sae) options.enable_readouts = true;
  if (body.steering_name || body.steering_vectors) options.enable_steering = true;
  if (sweep || path === "/v1/patch_sweep") options.enable_patching = true;
  const more = [...points].filter((point) => !STREAM.has(point));
  if (more.length) options.hook_points = more;
  return [python(pathOf(body.model)), ...named(options)].join(", ");
}

export function asLLM(request) {
  const { path, body, sweep } = request;
  const head = `llm = LLM(${engineOf(request)})\n`;
  if (!body) return `from vllm import LLM\n\n${head}print(llm.get_metrics())`;
  if (path === "/v1/patch_sweep") return `${SWEEP}${head}result = ${sweepOf(body)}\nprint(result.top(10))`;
  const fields = Object.entries(body).filter(([name]) => !NOT_SAMPLING.includes(name))
    .map(([name, value]) => [name, name === "logprobs" && value === true ? body.top_logprobs : value]);
  const first = body.messages ?? (Array.isArray(body.prompt) ? { prompt_token_ids: body.prompt } : body.prompt);
  const before = sweep ? `${sweepOf(sweep, `, run=${python(sweep.run)}`)}\n` : "";
  return (
    `${sweep ? SWEEP.replace("LLM", "LLM, SamplingParams") : "from vllm import LLM, SamplingParams\n\n"}${head}${before}` +
    `params = SamplingParams(${named(Object.fromEntries(fields)).join(", ")})\n` +
    `(output,) = llm.${body.messages ? "chat" : "generate"}(${python(first)}, params)\n` +
    `print(output.outputs[0].text${body.readouts ? ", output.outputs[0].readouts" : ""})`
  );
}

const SWEEP = "from vllm import LLM\nfrom vllm.patching import patch_sweep\n\n";

function sweepOf(body, more = "") {
  const { clean_prompt: clean, prompt, answer_token: answer, foil_token: foil, stream, model, keep_source, run, ...fields } = body;
  const texts = [python(clean), python(prompt), ...named({ answer, ...(foil ? { foil } : {}), ...fields })];
  return `patch_sweep(llm, ${texts.join(", ")}${more})`;
}

export function python(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    const items = Object.entries(value).map(([k, v]) => `${python(k)}: ${python(v)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value); // Escapes of JSON mean the same in Python.
}
