// How a question and an answer look. A view knows its own elements only; what its buttons do is handed to it.

import { make, makeButton } from "./dom.js";
import { copyText } from "./clipboard.js";
import { GrowingText } from "./growing_text.js";

function turnElement(role, title) {
  const box = make("article", `message ${role}`), text = make("div", "text");
  box.append(make("h3", "hidden", title), text);
  return { box, text };
}

/** A question. `onEdit` is given the new text. */
export function questionView(content, onEdit) {
  const { box, text } = turnElement("user", "You"), bar = make("div", "bar turn-bar");
  text.textContent = content;
  bar.append(
    makeButton("Copy", (button) => copyText(content, button), "Copy this question"),
    makeButton("Edit", () => showEditor(box, content, onEdit), "Edit this question and ask it again"),
  );
  box.append(bar);
  return box;
}

function showEditor(box, content, onEdit) {
  const form = make("form", "editor"), field = make("textarea"), bar = make("div", "bar");
  const send = make("button", "main", "Ask again");
  const parts = [...box.children].slice(1);
  const close = () => {
    form.remove();
    box.classList.remove("edited");
    for (const part of parts) part.hidden = false;
    parts.at(-1).lastElementChild.focus();
  };
  field.value = content;
  field.rows = Math.min(12, content.split("\n").length + 1);
  field.setAttribute("aria-label", "Question");
  send.type = "submit";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) onEdit(field.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  bar.append(makeButton("Cancel", close), send);
  form.append(field, bar);
  for (const part of parts) part.hidden = true;
  box.classList.add("edited");
  box.append(form);
  field.focus();
}

/** An answer. `change` is given functions that change what is seen. */
export class AnswerView {
  constructor(change) {
    const { box, text } = turnElement("assistant", "Answer");
    this.box = box;
    this._change = change;
    this._text = text;
    this._content = new GrowingText(text, change);
    this._reasoning = null;
  }

  get content() { return this._content.text; }
  get reasoning() { return this._reasoning ? this._reasoning.data : ""; }

  addContent(text) {
    if (!this._content.text) this._endThinking();
    this._content.append(text);
  }

  addReasoning(text) {
    this._change(() => {
      if (!this._reasoning) this._beginThinking();
      this._reasoning.appendData(text);
    });
  }

  set isRunning(isRunning) { this.box.classList.toggle("running", isRunning); }

  /** The answer has ended. `notes`: {problem, figures}; `onRetry`: for its button. */
  finish({ problem, figures }, onRetry) {
    this._endThinking();
    this._content.finish();
    const bar = make("div", "bar turn-bar");
    if (problem) bar.append(make("span", problem === "stopped" ? "faint" : "error", problem));
    if (figures) bar.append(make("span", "faint", figures));
    if (this.content) bar.append(makeButton("Copy", (button) => copyText(this.content, button), "Copy this answer"));
    const again = this.content || !problem ? "Retry" : "Send again";
    bar.append(makeButton(again, onRetry, `${again}: ask for this answer anew`));
    this._change(() => this.box.append(bar));
  }

  _beginThinking() {
    const fold = make("details", "reasoning thinking"), inner = make("div");
    this._reasoning = document.createTextNode("");
    inner.append(this._reasoning);
    inner.tabIndex = 0;
    fold.append(make("summary", "", "Thinking"), inner);
    this._text.before(fold);
  }

  _endThinking() {
    const fold = this.box.querySelector(".thinking");
    if (!fold) return;
    fold.classList.remove("thinking");
    fold.firstElementChild.textContent = "Thoughts";
  }
}
