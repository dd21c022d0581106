// Asks before something is gone for good.

import { $, setText } from "./dom.js";

/** Whether the visitor says yes to `question`. */
export function confirmed(question) {
  const dialog = $("confirm-dialog");
  setText($("confirm-title"), question);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export function prepareConfirm() {
  $("confirm-yes").addEventListener("click", () => $("confirm-dialog").close("yes"));
  $("confirm-no").addEventListener("click", () => $("confirm-dialog").close(""));
}
