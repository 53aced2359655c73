// A request as text to paste: curl, the Python client, or `LLM`.

const SERVER = location.origin;

export function asCurl(path, body) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return (
    `curl -sN ${SERVER}${path} -H 'Content-Type: application/json' \\\n` +
    `  -H "Authorization: Bearer $API_KEY" -d '${data}'`
  );
}

export function asClient(path, body) {
  const head =
    "import os\n\nfrom clearbox_client import Client\n\n" +
    `client = Client(${python(SERVER)}, api_key=os.environ.get("API_KEY"))\n`;
  if (path === "/v1/patch_sweep") {
    const { clean_prompt: clean, prompt, stream, model, ...fields } = body;
    return (
      head +
      "from vllm.patching import patch_sweep\n\n" +
      `result = patch_sweep(client, ${python(clean)}, ${python(prompt)}, ` +
      `${sweepArguments(fields)})\nprint(result.top(10))`
    );
  }
  const { model, prompt, messages, stream, ...fields } = body;
  const first = python(messages ?? prompt);
  const named = Object.entries(fields).map(([name, value]) => `${name}=${python(value)}`);
  const call = messages ? "chat" : "complete";
  return `${head}reply = client.${call}(${[first, ...named].join(", ")})\nprint(reply.text, reply.readouts)`;
}

const NOT_SAMPLING = ["model", "prompt", "messages", "stream", "echo", "return_token_ids"];

export function asLLM(path, body) {
  const flags = ["readouts", "steering"].filter((name) =>
    Object.keys(body).some((field) => field.startsWith(name)),
  );
  const options = flags.map((name) => `, enable_${name}=True`).join("");
  if (path === "/v1/patch_sweep") {
    const { clean_prompt: clean, prompt, stream, model, ...fields } = body;
    return (
      "from vllm import LLM\nfrom vllm.patching import patch_sweep\n\n" +
      `llm = LLM(${python(model)}, enable_patching=True)\n` +
      `result = patch_sweep(llm, ${python(clean)}, ${python(prompt)}, ` +
      `${sweepArguments(fields)})\nprint(result.top(10))`
    );
  }
  const sampling = Object.entries(body)
    .filter(([name]) => !NOT_SAMPLING.includes(name) && name !== "top_logprobs")
    .map(([name, value]) => {
      const given = name === "logprobs" && value === true ? body.top_logprobs : value;
      return `${name}=${python(given)}`;
    });
  const ids = Array.isArray(body.prompt);
  const first = body.messages ?? (ids ? { prompt_token_ids: body.prompt } : body.prompt);
  return (
    "from vllm import LLM, SamplingParams\n\n" +
    `llm = LLM(${python(body.model)}${options})\n` +
    `params = SamplingParams(${sampling.join(", ")})\n` +
    `(output,) = llm.${body.messages ? "chat" : "generate"}(${python(first)}, params)\n` +
    "print(output.outputs[0].text)"
  );
}

function sweepArguments(fields) {
  const names = { answer_token: "answer", foil_token: "foil" };
  return Object.entries(fields)
    .map(([name, value]) => `${names[name] ?? name}=${python(value)}`)
    .join(", ");
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
