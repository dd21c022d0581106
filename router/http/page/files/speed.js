// How fast an answer came, and where its prompt came from. A speed is told only where it was measured: over enough tokens,
// pieces and time. Tokens that come all at once have none.

import { count, seconds } from "./dom.js";

const MIN_TOKENS = 16;
const MIN_PIECES = 4;
const MIN_S = 0.3;

export class AnswerFigures {
  constructor() {
    this.tokens = null; // as the router counts them, null before it has said so
    this.finish = "";
    this._prompt = "";
    this._begun = performance.now();
    this._first = this._last = 0;
    this._pieces = 0;
  }

  /** A piece of the answer is here. */
  note() {
    this._last = performance.now();
    this._first = this._first || this._last;
    this._pieces += 1;
  }

  /** The router has counted the tokens. */
  noteUsage({ completion_tokens: tokens, prompt_tokens: all, prompt_tokens_details: details }) {
    this.tokens = tokens;
    const places = Object.entries((details && details.cached_tokens_by_place) || {});
    const parts = places.map(([place, number]) => `${count(number)} from ${place}`);
    parts.push(`${count(places.reduce((left, [, number]) => left - number, all))} computed`);
    this._prompt = `prompt of ${count(all)}: ${parts.join(", ")}`;
  }

  get text() {
    if (!this._pieces) return "";
    const number = this.tokens ?? this._pieces, duration = (this._last - this._first) / 1000;
    const parts = [`${this.tokens === null ? "about " : ""}${count(number)} ${number === 1 ? "token" : "tokens"}`];
    if (number >= MIN_TOKENS && this._pieces >= MIN_PIECES && duration >= MIN_S) {
      parts.push(`${((number - 1) / duration).toFixed(1)} tokens/s`);
    }
    parts.push(`TTFT ${seconds((this._first - this._begun) / 1000)}`);
    if (this._prompt) parts.push(this._prompt);
    if (this.finish === "length") parts.push("cut off at the token limit");
    return parts.join(" · ");
  }
}
