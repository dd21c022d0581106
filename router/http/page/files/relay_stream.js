// The stream of the relay: follows it while this tab is looked at, and finds the router again when it was gone.

import { $, setText } from "./dom.js";
import { eventsOf, headers, reasonOf } from "./api.js";
import { askForKey, whenKeyIsGiven } from "./key.js";

const SILENCE_MS = 8000; // the router sends something every two seconds
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];
let watching = null; // the AbortController of the stream, while this tab is looked at
let wake = () => {}; // ends a wait before the next attempt
let hasShown = false;

function showLink(state, text) {
  $("link").dataset.state = state;
  setText($("link"), text);
  const isOld = state !== "live" && hasShown;
  $("relay").classList.toggle("old", isOld);
  $("stale").hidden = !isOld;
}

/** Follow the stream until it ends; how it ended. */
async function follow(controller, onConnected, onDocument) {
  let timer = 0, hasBegun = false;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => controller.abort(), SILENCE_MS);
  };
  heard();
  try {
    const response = await fetch("page/events", { headers: headers(), signal: controller.signal, cache: "no-store" });
    if (response.status === 401) {
      showLink("lost", "needs an API key");
      askForKey();
      return "key";
    }
    if (!response.ok) {
      showLink("lost", await reasonOf(response));
      return "refused";
    }
    onConnected();
    for await (const data of eventsOf(response.body, heard)) {
      const doc = JSON.parse(data);
      hasBegun = hasShown = true;
      onDocument(doc);
      showLink("live", doc.router.is_draining ? "connected, shutting down" : "connected");
    }
  } catch { /* the router is gone, silent, or nobody looks: all of them end here */ } finally {
    clearTimeout(timer);
  }
  return hasBegun ? "ended" : "failed";
}

const pause = (ms) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  wake = () => { clearTimeout(timer); resolve(); };
});

/** For ever: tell `onDocument` of each document, and `onConnected` of each time that the router was found. */
export async function watchRelay(onConnected, onDocument) {
  whenKeyIsGiven(() => wake());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && watching) watching.abort();
    if (!document.hidden) wake();
  });
  for (let failures = 0; ;) {
    if (document.hidden) {
      await pause(2 ** 30);
      continue;
    }
    watching = new AbortController();
    const end = await follow(watching, onConnected, onDocument);
    watching = null;
    if (document.hidden) continue;
    failures = end === "ended" ? 0 : failures + 1;
    if (end === "ended" || end === "failed") showLink("lost", "disconnected, trying again");
    const longest = BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)];
    await pause(end === "key" ? 2 ** 30 : longest * (0.75 + Math.random() / 2));
  }
}
