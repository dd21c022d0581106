// How fast an answer came. A speed is told only where it was measured: over enough tokens, pieces and time. Tokens that
// come all at once have none.

import { count, seconds } from "./dom.js";

const MIN_TOKENS = 16;
const MIN_PIECES = 4;
const MIN_S = 0.3;

export class AnswerFigures {
  constructor() {
    this.tokens = null; // as the router counts them, null before it has said so
    this.finish = "";
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

  get text() {
    if (!this._pieces) return "";
    const number = this.tokens ?? this._pieces, duration = (this._last - this._first) / 1000;
    const parts = [`${this.tokens === null ? "about " : ""}${count(number)} ${number === 1 ? "token" : "tokens"}`];
    if (number >= MIN_TOKENS && this._pieces >= MIN_PIECES && duration >= MIN_S) {
      parts.push(`${((number - 1) / duration).toFixed(1)} tokens/s`);
    }
    parts.push(`TTFT ${seconds((this._first - this._begun) / 1000)}`);
    if (this.finish === "length") parts.push("cut off at the token limit");
    return parts.join(" · ");
  }
}
