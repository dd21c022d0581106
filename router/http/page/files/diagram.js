// The diagram of the relay: router, prefill nodes and decode nodes as boxes, and a line that moves for each leg on which a
// request is. Drawn anew when nodes or their pools change; the lines are switched on their own.

import { $ } from "./dom.js";
import { LEGS, poolOf } from "./relay_words.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_BOXES = 4;
const PULSE_MS = 900;
const seenLegs = new Map(); // key of a request -> how many legs it has been seen on
const pulses = new Map(); // edge -> until when it is shown, so that a transfer of 5 ms can be seen
const shapes = new Map(); // edge -> its moving line
let drawn = "";
let edges = []; // of the last document

const edgeOf = (leg, row) => leg === "prefill" ? `prefill|${row.prefill_node || row.decode_node}`
  : leg === "transfer" ? `transfer|${row.prefill_node}|${row.decode_node}` : `decode|${row.decode_node}`;

/** A leg that began since the last document is shown for a moment, also one that has ended by now. */
export function notePulses(doc, isFirst) {
  const until = performance.now() + PULSE_MS, rows = [...doc.requests, ...doc.ended];
  for (const row of rows) {
    const from = seenLegs.get(row.key) || 0, to = row.end ? (row.ttft_s === null ? 0 : 4) : LEGS.indexOf(row.leg);
    for (const leg of isFirst ? [] : LEGS.slice(Math.max(1, from), to)) {
      if (leg !== "transfer" || row.prefill_node) pulses.set(edgeOf(leg, row), until);
    }
    seenLegs.set(row.key, Math.max(from, to));
  }
  const keys = new Set(rows.map((row) => row.key));
  for (const known of seenLegs.keys()) if (!keys.has(known)) seenLegs.delete(known);
  if (pulses.size) setTimeout(showEdges, PULSE_MS + 20);
}

function shape(tag, attributes, parent = $("diagram")) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  parent.append(found);
  return found;
}

function text(x, y, content, className = "") {
  shape("text", { x, y, class: className, "text-anchor": "middle" }).textContent = content;
}

const shortened = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);

function box(node, x, y) {
  shape("rect", { x, y, width: 116, height: 40, rx: 7, class: node.is_leaving || node.is_ejected ? "box leaving" : "box" });
  text(x + 58, y + 18, shortened(node.id));
  shape("rect", { x: x + 12, y: y + 26, width: 92, height: 6, class: "pool" });
  let from = x + 12;
  for (const [kind, blocks] of poolOf(node)) {
    const width = 92 * blocks / (node.num_blocks || 1);
    shape("rect", { x: from, y: y + 26, width, height: 6, class: `pool ${kind}` });
    from += width;
  }
}

function edge(name, kind, d, hasRail = true) {
  if (hasRail) shape("path", { d, class: "rail" });
  shapes.set(name, shape("path", { d, class: `run ${kind}` }));
}

/** Boxes and lines. Router on the left; prompts go to P, KV from P to D, tokens from D around the bottom back. */
function draw(prefill, decode, hidden) {
  const rows = Math.max(prefill.length, decode.length, 1), height = 64 + rows * 52, middle = 24 + rows * 26;
  const tops = (nodes) => nodes.map((_, index) => middle - nodes.length * 26 + index * 52 + 6);
  const tall = tops(prefill), dTops = tops(decode), bottom = height - 14;
  $("diagram").setAttribute("viewBox", `0 0 640 ${height}`);
  $("diagram").replaceChildren();
  shapes.clear();
  prefill.forEach((node, index) => {
    const y = tall[index] + 20;
    edge(`prefill|${node.id}`, "prefill", `M112 ${middle} C 170 ${middle} 180 ${y} 240 ${y}`);
  });
  decode.forEach((node, index) => {
    const y = dTops[index] + 20;
    prefill.forEach((from, number) => {
      const start = tall[number] + 20;
      edge(`transfer|${from.id}|${node.id}`, "transfer", `M356 ${start} C 420 ${start} 430 ${y} 490 ${y}`);
    });
    edge(`decode|${node.id}`, "decode",
      `M606 ${y} H616 Q624 ${y} 624 ${y + 8} V${bottom - 8} Q624 ${bottom} 616 ${bottom} H72 Q64 ${bottom} 64 ${bottom - 8} V${middle + 20}`);
    edge(`prefill|${node.id}`, "prefill", `M64 ${middle - 20} V18 Q64 10 72 10 H456 Q464 10 464 18 V${y - 8} Q464 ${y} 472 ${y} H490`, false);
  });
  shape("rect", { x: 16, y: middle - 20, width: 96, height: 40, rx: 7, class: "box" });
  text(64, middle + 4, "router");
  prefill.forEach((node, index) => box(node, 240, tall[index]));
  decode.forEach((node, index) => box(node, 490, dTops[index]));
  text(176, middle - 14, "prompts", "label");
  text(423, middle - 14, "KV", "label");
  text(344, bottom - 5, hidden ? `tokens · ${hidden} more nodes are in the table` : "tokens", "label");
}

export function showDiagram(doc) {
  const of = (role) => doc.nodes.filter((node) => node.role === role).sort((a, b) => a.id < b.id ? -1 : 1).slice(0, MOST_BOXES);
  const prefill = of("prefill"), decode = of("decode"), hidden = doc.num_nodes - prefill.length - decode.length;
  const share = (blocks, node) => Math.round(92 * blocks / (node.num_blocks || 1));
  const state = [...prefill, ...decode].map((node) => [node.role, node.id, node.is_leaving || node.is_ejected, ...poolOf(node).map(([, blocks]) => share(blocks, node))]);
  const wanted = JSON.stringify([state, hidden]);
  if (wanted !== drawn) draw(prefill, decode, hidden);
  drawn = wanted;
  edges = doc.edges;
  showEdges();
  const { legs } = doc, roles = (number, role) => `${number} ${role} ${number === 1 ? "node" : "nodes"}`;
  const label = `A router with ${roles(doc.nodes.filter((node) => node.role === "prefill").length, "prefill")} and `
    + `${roles(doc.nodes.filter((node) => node.role === "decode").length, "decode")}; requests by leg: ${LEGS.map((leg) => `${leg} ${legs[leg]}`).join(", ")}`;
  if ($("diagram").getAttribute("aria-label") !== label) $("diagram").setAttribute("aria-label", label);
}

function showEdges() {
  const now = performance.now(), active = new Set();
  for (const [leg, prefillNode, decodeNode] of edges) {
    active.add(edgeOf(leg, { prefill_node: prefillNode, decode_node: decodeNode }));
  }
  for (const [name, until] of pulses) (until > now ? active.add(name) : pulses.delete(name));
  for (const [name, line] of shapes) line.classList.toggle("on", active.has(name));
}
