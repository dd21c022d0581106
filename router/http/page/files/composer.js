// Where a message is written. What is typed stays until it is sent.

import { $ } from "./dom.js";

export function prepareComposer(chat) {
  const send = () => {
    const text = $("prompt").value.trim();
    if (!text || chat.isRunning) return;
    $("prompt").value = "";
    chat.ask(text);
  };
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  });
  $("stop").addEventListener("click", () => { chat.stop(); $("prompt").focus(); });
}
