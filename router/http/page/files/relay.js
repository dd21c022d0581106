// The view of the relay: shows one document of the router after the other.

import { $, count, fill, make, seconds, setText } from "./dom.js";
import { notePulses, showDiagram } from "./diagram.js";
import { groupsOf, nodeRow, requestRow, showFailure, showNode, showRequest } from "./relay_rows.js";

let isFirst = true;
let speed = { tokens: 0, at: 0, value: 0 };

export function showRelay(doc) {
  showFigures(doc);
  notePulses(doc, isFirst);
  isFirst = false;
  showDiagram(doc);
  const groups = groupsOf(doc.nodes);
  fill($("nodes"), doc.nodes, nodeRow, (row, node) => showNode(row, node, groups.get(node.group)));
  fill($("requests"), [...doc.requests, ...doc.ended], requestRow, showRequest);
  fill($("failures"), doc.failures, () => make("li"), showFailure);
  if (!doc.failures.length) fill($("failures"), [null], () => make("li"), (item) => setText(item, "none"));
}

const median = (values) => values.length ? values.sort((a, b) => a - b)[Math.floor(values.length / 2)] : null;

function showFigures(doc) {
  const now = performance.now(), { router } = doc;
  if (router.num_tokens < speed.tokens || !speed.at) speed = { tokens: router.num_tokens, at: now, value: 0 };
  if (now - speed.at >= 900) {
    speed = { tokens: router.num_tokens, at: now, value: (router.num_tokens - speed.tokens) * 1000 / (now - speed.at) };
  }
  const known = [...doc.requests, ...doc.ended];
  const of = (name) => median(known.map((row) => row[name]).filter((value) => value !== null));
  setText($("in-flight"), count(router.num_in_flight));
  setText($("waiting"), count(router.num_waiting));
  setText($("speed"), speed.value < 10 ? speed.value.toFixed(1) : count(Math.round(speed.value)));
  setText($("ttft"), seconds(of("ttft_s")));
  setText($("tpot"), seconds(of("tpot_s")));
  setText($("failed"), count(router.num_failed));
  setText($("refused"), count(router.num_refused));
}
