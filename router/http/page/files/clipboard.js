// Puts text on the clipboard, and says so on the button that was pressed.

import { make } from "./dom.js";

const SHOWN_MS = 1500;

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard without HTTPS beyond this machine
    copySelected(text);
  }
  const before = button.textContent;
  button.textContent = "Copied";
  button.disabled = true; // a second press would take "Copied" for its text
  setTimeout(() => { button.textContent = before; button.disabled = false; }, SHOWN_MS);
}

function copySelected(text) {
  const field = make("textarea", "hidden"), focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  if (focused) focused.focus();
}
