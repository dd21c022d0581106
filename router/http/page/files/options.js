// What a visitor chooses for the next answers: the model, whether it thinks, temperature, most tokens, a system prompt. It
// is kept in this browser. The choice about thinking is there where the model's chat template listens to one.

import { $ } from "./dom.js";
import { headers } from "./api.js";
import { readKept, writeKept } from "./kept.js";

const KEPT = "baton.options";
const KEPT_FIELDS = ["thinking", "temperature", "max-tokens", "system"];
const SWITCHES = ["enable_thinking", "thinking"];
const kept = readKept(KEPT) || {};
const switchesOf = new Map(); // name of a model -> the variables of its template that change its thinking

function numberIn(id) {
  const value = $(id).value.trim();
  return value === "" ? undefined : Number(value);
}

/** The members of a request that say what was chosen about thinking. */
function thinkingMembers() {
  const wanted = $("thinking").value, known = switchesOf.get($("model").value) || [];
  if (!wanted || $("thinking-choice").hidden) return {};
  if (wanted !== "on" && wanted !== "off") return { reasoning_effort: wanted };
  return { chat_template_kwargs: { [SWITCHES.find((name) => known.includes(name))]: wanted === "on" } };
}

/** The body of a request for the answer to `messages`. */
export function requestBody(messages) {
  const system = $("system").value.trim();
  return {
    model: $("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: numberIn("temperature"),
    max_tokens: numberIn("max-tokens"),
    ...thinkingMembers(),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function showThinking() {
  const known = switchesOf.get($("model").value) || [], select = $("thinking");
  const values = ["", ...(known.some((name) => SWITCHES.includes(name)) ? ["on", "off"] : []),
    ...(known.includes("reasoning_effort") ? ["low", "medium", "high"] : [])];
  select.replaceChildren(...values.map((value) => new Option(value || "as usual", value)));
  if (values.includes(kept.thinking)) select.value = kept.thinking;
  $("thinking-choice").hidden = values.length === 1;
}

/** Ask which models there are. */
export async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  const models = (await response.json()).data, select = $("model"), chosen = select.value;
  switchesOf.clear();
  for (const model of models) switchesOf.set(model.id, model.thinking_switches || []);
  const names = models.map((model) => model.id);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  showThinking();
}

export function prepareOptions() {
  for (const id of KEPT_FIELDS) if (kept[id]) $(id).value = kept[id];
  for (const id of KEPT_FIELDS) {
    $(id).addEventListener("change", () => {
      kept[id] = $(id).value;
      writeKept(KEPT, kept);
    });
  }
  $("model").addEventListener("change", showThinking);
}
