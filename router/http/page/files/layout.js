// Which of the three parts of the page are seen: the list of chats, the chat, the relay. A wide window shows the first and
// the last beside the chat, and keeps what was chosen; a narrow one shows them in its place, and begins with the chat.

import { $ } from "./dom.js";
import { readKept, writeKept } from "./kept.js";

const KEPT = "baton.layout";
const narrow = matchMedia("(max-width: 56rem)"), roomy = matchMedia("(min-width: 90rem)");
const PARTS = ["chats", "relay"];
let shown = {};

function start() {
  const usual = narrow.matches ? { chats: false, relay: false } : { chats: roomy.matches, relay: true };
  shown = narrow.matches ? usual : { ...usual, ...readKept(KEPT) };
  show();
}

function show() {
  for (const part of PARTS) {
    $(part).hidden = !shown[part];
    $(`show-${part}`).setAttribute("aria-expanded", String(Boolean(shown[part])));
  }
  $("chat").hidden = narrow.matches && (shown.chats || shown.relay);
}

function toggle(part) {
  const isShown = !shown[part];
  if (narrow.matches) shown = {};
  shown[part] = isShown;
  if (!narrow.matches) writeKept(KEPT, shown);
  show();
}

/** In a narrow window: show the chat again. */
export function closeOverChat() {
  if (!narrow.matches) return;
  shown = {};
  show();
}

export function prepareLayout() {
  for (const part of PARTS) $(`show-${part}`).addEventListener("click", () => toggle(part));
  narrow.addEventListener("change", start);
  start();
}
