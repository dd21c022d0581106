// The tables of the relay: a row for each node, request and failure. Rows are used again.

import { count, make, seconds, setText } from "./dom.js";
import { LEGS, poolOf } from "./relay_words.js";

function cells(number) {
  const row = make("tr");
  row.append(make("th"), ...Array.from({ length: number - 1 }, () => make("td")));
  row.firstElementChild.scope = "row";
  return row;
}

function meter(cell, kinds) {
  const bar = make("div", "meter");
  bar.setAttribute("role", "img");
  bar.append(...kinds.map((kind) => make("i", kind)));
  cell.append(bar);
}

function showMeter(bar, values, total, label) {
  values.forEach((value, index) => { bar.children[index].style.width = `${total ? 100 * value / total : 0}%`; });
  if (bar.getAttribute("aria-label") !== label) bar.setAttribute("aria-label", label);
}

export function nodeRow() {
  const row = cells(5);
  row.children[2].className = row.children[3].className = "n";
  row.children[3].append(make("span"), make("div", "note"));
  row.children[3].title = "With drafts: tokens of a step, and how many of the drafts are right";
  meter(row.children[4], ["held", "leased", "cached"]);
  row.children[4].append(make("span", "note"));
  return row;
}

/** What the nodes of each group are together. */
export function groupsOf(nodes) {
  const groups = new Map();
  for (const { group, load } of nodes) {
    const before = groups.get(group) || { nodes: 0, load: 0 };
    if (group) groups.set(group, { nodes: before.nodes + 1, load: before.load + load });
  }
  return groups;
}

/** Tokens of a step that has drafts of a request, and how many of theirs are right. */
function draftsOf({ num_drafts: drafts, num_draft_tokens: tokens, num_accepted_draft_tokens: accepted }) {
  return drafts ? `drafts: ${(1 + accepted / drafts).toFixed(1)} a step, ${Math.round(100 * accepted / tokens)} %` : "";
}

export function showNode(row, node, group) {
  const [name, role, load, steps, pool] = row.children;
  setText(name, node.id);
  const of = group ? `, 1 of ${group.nodes} of ${node.group} with ${count(group.load)} in all` : "";
  setText(role, `${node.role}${of}${node.is_leaving ? ", leaving" : node.is_ejected ? ", ejected" : ""}`);
  setText(load, count(node.load));
  setText(steps.firstElementChild, node.num_waiting ? `${node.num_running} + ${node.num_waiting} waiting` : count(node.num_running));
  setText(steps.lastElementChild, draftsOf(node));
  const kinds = poolOf(node);
  const label = `${kinds.map(([kind, blocks]) => `${count(blocks)} ${kind}`).join(", ")}, ${count(node.num_free_blocks)} free`;
  showMeter(pool.firstElementChild, kinds.map(([, blocks]) => blocks), node.num_blocks, `${label} of ${node.num_blocks} blocks`);
  const tiers = Object.entries(node.kv_tiers).map(([tier, usage]) => ` · ${tier} ${Math.round(100 * usage)} %`);
  setText(pool.lastElementChild, `${label} of ${count(node.num_blocks)} blocks${tiers.join("")}`);
}

export function requestRow() {
  const row = cells(6);
  row.firstElementChild.append(make("span", "leg"));
  row.children[3].className = row.children[4].className = "n";
  meter(row.children[5], LEGS);
  return row;
}

const ENDS = { finished: "done", cancelled: "left" };
const endOf = (request) => (request.is_refused ? "refused" : ENDS[request.end] || "failed");

export function showRequest(row, request) {
  const [leg, tokens, nodes, ttft, tpot, legs] = row.children, hasEnded = request.end !== "";
  row.className = hasEnded ? "ended" : "";
  const shown = hasEnded ? endOf(request) : request.leg;
  leg.firstElementChild.className = `leg ${shown}`;
  setText(leg.firstElementChild, shown);
  const choices = request.num_choices > 1 ? ` ×${request.num_choices}` : "";
  setText(tokens, `${count(request.num_prompt_tokens)} → ${count(request.num_output_tokens)}${choices}`);
  const again = request.num_attempts > 1 ? `, attempt ${request.num_attempts}` : "";
  setText(nodes, request.decode_node ? [request.prefill_node, request.decode_node].filter(Boolean).join(" → ") + again : "–");
  setText(ttft, seconds(request.ttft_s));
  setText(tpot, seconds(request.tpot_s));
  const spans = request.spans_s, label = LEGS.map((name, index) => `${name} ${seconds(spans[index])}`).join(", ");
  showMeter(legs.firstElementChild, spans, spans.reduce((sum, span) => sum + span, 0), label);
  legs.title = label;
}

export function showFailure(item, failure) {
  const at = new Date(failure.at_s * 1000).toLocaleTimeString();
  const places = failure.attempts.map((each) => `${[each.prefill_node, each.decode_node].filter(Boolean).join(" → ")}${each.reason ? `: ${each.reason}` : ""}`);
  const status = failure.status === null ? "no answer" : `status ${failure.status}`;
  const text = [at, failure.reason, `${status} after ${seconds(failure.after_s)}`, ...places];
  if (item.dataset.text === text.join()) return;
  item.dataset.text = text.join();
  const what = make("span", failure.end === "finished" ? "what mended" : "what", text[1]);
  item.replaceChildren(`${text[0]} `, what, make("div", "note", text.slice(2).join(" · ")));
}
