// Requests to the router: with the key of this tab, errors as one sentence, streams as events.

import { apiKey } from "./key.js";

export const headers = (more = {}) => (apiKey() ? { ...more, Authorization: `Bearer ${apiKey()}` } : more);

/** What went wrong, in one sentence, from an answer that is no success. */
export async function reasonOf(response) {
  try {
    const { error } = await response.json();
    return error.param && !error.message.includes(error.param) ? `${error.message} [${error.param}]` : error.message;
  } catch {
    return `the router answered with status ${response.status}`;
  }
}

/** The data of each server-sent event of a body. `onBytes` is told of every piece. */
export async function* eventsOf(body, onBytes = () => {}) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onBytes();
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
