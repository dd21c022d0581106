// The API key of this tab, for routers that want one. It is in the tab's own storage and goes with the tab.

import { $, setText } from "./dom.js";

const KEY = "baton-api-key";
const listeners = [];

export const apiKey = () => sessionStorage.getItem(KEY) || "";
export const whenKeyIsGiven = (listener) => listeners.push(listener);

export function askForKey() {
  const dialog = $("key-dialog");
  if (dialog.open) return;
  setText($("key-note"), apiKey() ? "The key that this tab has is not valid here."
    : "It stays in this tab, and is gone when you close it.");
  $("key").value = "";
  dialog.showModal();
}

const showKey = () => { $("forget-key").hidden = !apiKey(); };

export function prepareKey() {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key-dialog").close();
    showKey();
    for (const listener of listeners) listener();
  });
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("forget-key").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  showKey();
}
