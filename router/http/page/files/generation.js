// One answer of the model: asks /v1/chat/completions, and tells of each piece of the stream.

import { eventsOf, headers, reasonOf } from "./api.js";
import { askForKey } from "./key.js";

/** Read an answer to the end. `told` has `onReasoning`, `onContent` and `figures`. Throws what ended it. */
async function readAnswer(body, told, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal,
  });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Error(await reasonOf(response));
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) told.figures.noteUsage(chunk.usage);
    const choice = chunk.choices && chunk.choices[0];
    if (choice) tellPiece(choice, told);
  }
  throw new Error("the stream ended before the answer was complete");
}

function tellPiece(choice, told) {
  const delta = choice.delta || {}, thought = delta.reasoning_content || delta.reasoning;
  if (thought || delta.content) told.figures.note();
  if (thought) told.onReasoning(thought);
  if (delta.content) told.onContent(delta.content);
  if (choice.finish_reason) told.figures.finish = choice.finish_reason;
}

/** As `readAnswer`, but says in a few words what ended it, "" for an answer that is complete. */
export async function problemOf(body, told, signal) {
  try {
    await readAnswer(body, told, signal);
    return "";
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    return error.name === "TypeError" ? "the router cannot be reached" : error.message;
  }
}
