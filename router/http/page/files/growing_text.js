// A text in Markdown that grows. Only its last block can still change, so only that one is read and made again, at most once
// a frame and for a fifth of the time: a piece of a long answer costs as little as one of a short answer.

import { blockElement, blocksOf, growCode } from "./markdown.js";

const FRAME_MS = 16;
const REST = 4; // times as long as the last rendering took
const DEFINES_LINK = /^ {0,3}\[[^\]\n]+\]:/m;

/** Renders into `parent`, which is its own. `change` is given a function that changes what is seen. */
export class GrowingText {
  constructor(parent, change = (render) => render()) {
    this.text = "";
    this._parent = parent;
    this._change = change;
    this._settled = 0; // characters whose elements stay
    this._last = null; // the element that may change; those before it stay
    this._timer = 0;
    this._pause_ms = FRAME_MS;
  }

  append(text) {
    this.text += text.replaceAll("\r", "");
    if (!this._timer) this._timer = setTimeout(() => this._render(), this._pause_ms);
  }

  /** There is no more to come. A link that is defined late may be one of an earlier block: then all are made again. */
  finish() {
    clearTimeout(this._timer);
    if (DEFINES_LINK.test(this.text)) {
      this._settled = 0;
      this._last = null;
      this._parent.replaceChildren();
    }
    this._render();
  }

  _render() {
    const begun = performance.now();
    this._timer = 0;
    this._change(() => {
      const blocks = blocksOf(this.text.slice(this._settled));
      while (blocks.length && blocks.at(-1).type === "space") blocks.pop();
      blocks.forEach((block, index) => this._show(block, index === blocks.length - 1));
    });
    this._pause_ms = Math.max(FRAME_MS, REST * (performance.now() - begun));
  }

  _show(block, isLast) {
    if (!growCode(this._last, block)) {
      const element = blockElement(block);
      if (this._last) this._last.remove();
      if (element) this._parent.append(element);
      this._last = element;
    }
    if (isLast) return;
    this._settled += block.raw.length;
    this._last = null;
  }
}
