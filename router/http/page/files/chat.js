// The conversation of this tab: its turns, and what can be done with them. What is seen is made of the turns and never read
// back. At most one answer is being written; whatever changes earlier turns waits for its end or ends it.

import { $ } from "./dom.js";
import { keepChat, loadChat, noteOpenChat } from "./chat_store.js";
import { problemOf } from "./generation.js";
import { requestBody } from "./options.js";
import { AnswerFigures } from "./speed.js";
import { AnswerView, questionView } from "./turn_views.js";

const KEEP_EVERY_MS = 1000;
const UNFINISHED = "the page was left before this answer was complete";
const TITLE_CHARS = 60;

export class Chat {
  /** `onKept` is called with whether the chat could be kept, whenever that was tried. */
  constructor(onKept) {
    this.id = "";
    this._onKept = onKept;
    this._turns = []; // {role, content}; of answers also {reasoning, figures, problem}
    this._running = null; // {controller, ended}: the answer that is being written
    this._keptAt = 0;
    this._isLeft = false;
    this.begin();
  }

  get isRunning() { return this._running !== null; }

  /** A new chat. It is kept from its first question on. */
  begin() {
    this._open(crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random()}`, []);
  }

  /** A chat that was kept; whether it is still there. */
  open(id) {
    const turns = loadChat(id);
    if (turns) this._open(id, turns);
    return turns !== null;
  }

  async ask(text) {
    this._push({ role: "user", content: text });
    await this._answer();
  }

  async stop() {
    if (!this._running) return;
    const { controller, ended } = this._running;
    controller.abort();
    await ended;
  }

  /** The page is left: what is kept now is the last of it, because the end of the stream is no answer's end then. */
  leave() {
    if (this.isRunning) this.keep();
    this._isLeft = true;
  }

  /** The page is shown again after all. */
  comeBack() { this._isLeft = false; }

  keep() {
    if (!this._turns.length || this._isLeft) return;
    this._keptAt = performance.now();
    const title = this._turns[0].content.replace(/\s+/g, " ").slice(0, TITLE_CHARS);
    this._onKept(keepChat(this.id, title, this._turns));
  }

  _open(id, turns) {
    this.id = id;
    this._turns = [];
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
    for (const turn of turns) this._push(turn);
    noteOpenChat(id);
    $("log").scrollTop = $("log").scrollHeight;
  }

  /** Add a turn and what is seen of it; the view of an answer. */
  _push(turn, isRunning = false) {
    const index = this._turns.push(turn) - 1;
    $("empty").hidden = true;
    if (turn.role === "user") {
      $("log").append(questionView(turn.content, (text) => this._again(index, () => this.ask(text))));
      return null;
    }
    const view = new AnswerView(keepAtEnd);
    $("log").append(view.box);
    if (turn.reasoning) view.addReasoning(turn.reasoning);
    if (turn.content) view.addContent(turn.content);
    if (!isRunning) this._finish(view, index);
    return view;
  }

  _finish(view, index) {
    view.finish(this._turns[index], () => this._again(index, () => this._answer()));
  }

  /** Forget the turns from `index` on, and go on from there. */
  async _again(index, goOn) {
    if (this.isRunning) return;
    this._turns.length = index;
    const views = $("log").querySelectorAll(".message");
    for (const view of [...views].slice(index)) view.remove();
    $("log").focus({ preventScroll: true });
    await goOn();
  }

  async _answer() {
    const messages = messagesOf(this._turns), figures = new AnswerFigures();
    const turn = { role: "assistant", content: "", reasoning: "", figures: "", problem: UNFINISHED };
    const index = this._turns.length, view = this._push(turn, true);
    const follow = () => {
      Object.assign(turn, { content: view.content, reasoning: view.reasoning, figures: figures.text });
      if (performance.now() - this._keptAt > KEEP_EVERY_MS) this.keep();
    };
    $("log").scrollTop = $("log").scrollHeight;
    const end = this._begin(view);
    this.keep();
    const told = {
      figures,
      onReasoning: (text) => { view.addReasoning(text); follow(); },
      onContent: (text) => { view.addContent(text); follow(); },
    };
    const problem = await problemOf(requestBody(messages), told, this._running.controller.signal);
    follow();
    turn.problem = problem;
    this.keep();
    try {
      this._finish(view, index);
    } finally {
      end();
    }
    $("announce").textContent = problem ? `The answer ended: ${problem}` : `The answer is complete, ${turn.figures}`;
  }

  /** An answer is being written from now on, until what is returned is called. */
  _begin(view) {
    let resolve;
    this._running = { controller: new AbortController(), ended: new Promise((done) => { resolve = done; }) };
    const show = (isRunning) => {
      view.isRunning = isRunning;
      $("stop").hidden = !isRunning;
      $("send").disabled = isRunning;
      $("log").classList.toggle("busy", isRunning);
    };
    show(true);
    return () => {
      this._running = null;
      show(false);
      resolve();
    };
  }
}

/** What the model is told. Turns alternate: a question that got no answer is left out, unless it is the last one. */
function messagesOf(turns) {
  const found = [];
  for (const { role, content } of turns) {
    if (role === "assistant" && !content) found.pop();
    else found.push({ role, content });
  }
  return found;
}

function keepAtEnd(change) {
  const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
