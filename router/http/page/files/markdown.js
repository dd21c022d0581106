// Markdown as elements. marked finds out what is what; the elements are made here, one kind after the other, so nothing
// else can come of a text whatever it says. Markup in a text is shown as the text it is, images are named and not loaded,
// and links lead to web and mail addresses only.

import { Lexer } from "./marked-18.2.1.js";
import { make, makeButton } from "./dom.js";
import { copyText } from "./clipboard.js";

const OPTIONS = { gfm: true, breaks: true };
const LINKED = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—" };
const NUM_HEADINGS_AROUND = 3; // the page, the chat and the answer
const MAX_DEPTH = 60; // of tokens in tokens; a browser lays out what is deeper slowly, or not at all
const LINE_BREAK = /^<br\s*\/?>$/i;

/** The blocks of a text: `raw`, its part of the text, and what `blockElement` makes an element of. */
export function blocksOf(text) {
  try {
    return new Lexer(OPTIONS).lex(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [{ type: "html", raw: text, text }]; // nested too deep for the stack
  }
}

/** The element of a block, null where there is nothing to see. One that is nested too deep is shown as it was written. */
export function blockElement(token) {
  return isTooDeep(token) ? BLOCKS.html({ text: token.raw }) : nestedElement(token);
}

function nestedElement(token) {
  const maker = BLOCKS[token.type];
  return maker ? maker(token) : filled("p", token);
}

function isTooDeep(token, room = MAX_DEPTH) {
  const parts = [token.tokens, token.items, token.header, token.rows && token.rows.flat()].filter(Array.isArray).flat();
  return room === 0 || parts.some((part) => isTooDeep(part, room - 1));
}

const filled = (tag, token, className = "") => {
  const found = make(tag, className);
  found.append(...inlineNodes(token));
  return found;
};

const BLOCKS = {
  space: () => null,
  def: () => null,
  hr: () => make("hr"),
  html: (token) => make("p", "verbatim", token.text.trimEnd()),
  heading: (token) => filled(`h${Math.min(6, token.depth + NUM_HEADINGS_AROUND)}`, token, `depth-${token.depth}`),
  code: (token) => codeElement(token.text, token.lang),
  blockquote: (token) => {
    const found = make("blockquote");
    found.append(...blockElements(token.tokens));
    return found;
  },
  list: listElement,
  table: tableElement,
};

const blockElements = (tokens) => tokens.map(nestedElement).filter(Boolean);

function listElement(token) {
  const found = make(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) found.start = token.start;
  for (const item of token.items) {
    const child = make("li", item.task ? "task" : "");
    child.append(...item.tokens.flatMap((part) => (part.type in INLINE ? inlineNode(part) : blockElements([part]))));
    found.append(child);
  }
  return found;
}

function tableElement(token) {
  const row = (cells, tag) => {
    const found = make("tr");
    found.append(...cells.map((cell) => filled(tag, cell, cell.align ? `to-${cell.align}` : "")));
    return found;
  };
  const table = make("table"), head = make("thead"), body = make("tbody"), around = make("div", "scroll");
  head.append(row(token.header, "th"));
  body.append(...token.rows.map((cells) => row(cells, "td")));
  table.append(head, body);
  around.append(table);
  around.tabIndex = 0;
  around.setAttribute("role", "region");
  around.setAttribute("aria-label", "Table");
  return around;
}

const languageOf = (lang) => (lang || "").split(/\s/, 1)[0];

function codeElement(text, lang) {
  const around = make("div", "code"), bar = make("div", "code-bar"), pre = make("pre"), code = make("code", "", text);
  const copy = makeButton("Copy", (button) => copyText(code.textContent, button), "Copy this code");
  pre.append(code);
  pre.tabIndex = 0;
  bar.append(make("span", "", languageOf(lang)), copy);
  around.append(bar, pre);
  return around;
}

/** Show the text of a block of code in the element that was made for a shorter one; whether it could be done. */
export function growCode(element, token) {
  if (token.type !== "code" || !element || !element.classList.contains("code")) return false;
  element.querySelector("code").textContent = token.text;
  element.querySelector("span").textContent = languageOf(token.lang);
  return true;
}

// ---- inside of a block

const INLINE = {
  text: (token) => (token.tokens ? inlineNodes(token) : [token.escaped ? token.text : decoded(token.text)]),
  escape: (token) => [token.text],
  html: (token) => [LINE_BREAK.test(token.text) ? make("br") : token.text],
  br: () => [make("br")],
  checkbox: (token) => [make("span", "box", token.checked ? "☑ " : "☐ ")],
  codespan: (token) => [make("code", "", token.text)],
  strong: (token) => [filled("strong", token)],
  em: (token) => [filled("em", token)],
  del: (token) => [filled("del", token)],
  link: (token) => linkNodes(token.href, inlineNodes(token), token.raw),
  image: (token) => linkNodes(token.href, [`image: ${token.text || token.href}`], token.raw),
};

const inlineNode = (token) => (INLINE[token.type] ? INLINE[token.type](token) : [token.raw]);
const inlineNodes = (token) => (token.tokens ? token.tokens.flatMap(inlineNode) : [token.text]);

/** A link to another site, in a tab of its own; an address of another kind is shown as it was written. */
function linkNodes(href, content, raw) {
  if (!URL.canParse(href) || !LINKED.has(new URL(href).protocol)) return [raw];
  const link = make("a");
  link.href = href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.append(...content);
  return [link];
}

const decoded = (text) => text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (all, decimal, hex, name) => {
  const point = decimal ? Number(decimal) : hex ? parseInt(hex, 16) : 0;
  return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : ENTITIES[name] ?? all;
});
