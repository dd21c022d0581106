// The page of a Baton router: a chat over /v1/chat/completions, and a view of the relay over /page/events.
// Text of models and of the router is only ever put in as text, never as markup. Styles are set as properties, which the
// page's content policy allows, never as attributes.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const KEY = "baton-api-key";
  const SILENCE_MS = 8000; // the router sends something every two seconds
  const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];
  const LEGS = ["queued", "prefill", "transfer", "decode"];

  const make = (tag, className = "", text = "") => {
    const found = document.createElement(tag);
    if (className) found.className = className;
    if (text) found.textContent = text;
    return found;
  };
  const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const count = (number) => number.toLocaleString("en");
  const seconds = (value) => value === null || value === undefined ? "–"
    : value < 0.0995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms` : `${value.toFixed(value < 9.95 ? 2 : 1)} s`;

  // ---- the key and the two kinds of requests

  const key = { get: () => sessionStorage.getItem(KEY) || "" };
  const headers = (more = {}) => (key.get() ? { ...more, Authorization: `Bearer ${key.get()}` } : more);
  const showKey = () => { $("forget-key").hidden = !key.get(); };

  function askForKey() {
    const dialog = $("key-dialog");
    if (dialog.open) return;
    setText($("key-note"), key.get() ? "The key that this tab has is not valid here."
      : "It stays in this tab, and is gone when you close it.");
    $("key").value = "";
    dialog.showModal();
  }

  /** What went wrong, in one sentence, from an answer that is no success. */
  async function reasonOf(response) {
    try {
      const { error } = await response.json();
      return error.param && !error.message.includes(error.param) ? `${error.message} [${error.param}]` : error.message;
    } catch {
      return `the router answered with status ${response.status}`;
    }
  }

  /** The data of each server-sent event of a body. `onBytes` is told of every piece. */
  async function* eventsOf(body, onBytes = () => {}) {
    const reader = body.getReader(), decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        for (const line of part.split("\n")) if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  }

  // ---- the chat

  const messages = []; // {role, content}, what the model is told; the system prompt is added when a request leaves
  let running = null; // the AbortController of the answer that is being written

  function addMessage(role) {
    $("empty").hidden = true;
    const box = make("article", `message ${role}`);
    box.append(make("h3", "hidden", role === "user" ? "You" : "Answer"), make("div", "text"));
    $("log").append(box);
    return box;
  }

  function keepAtEnd(change) {
    const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  /** The text that grows, dimmed and foldable where it is reasoning. */
  function answerView(box) {
    const content = document.createTextNode("");
    box.querySelector(".text").append(content);
    let reasoning = null;
    return {
      content,
      addContent: (text) => keepAtEnd(() => content.appendData(text)),
      addReasoning: (text) => keepAtEnd(() => {
        if (!reasoning) {
          const fold = make("details", "reasoning"), inner = make("div");
          fold.open = true;
          fold.append(make("summary", "", "Reasoning"), inner);
          reasoning = document.createTextNode("");
          inner.append(reasoning);
          box.querySelector(".text").before(fold);
        }
        reasoning.appendData(text);
      }),
    };
  }

  function numberIn(id) {
    const value = $(id).value.trim();
    return value === "" ? undefined : Number(value);
  }

  function requestBody() {
    const system = $("system").value.trim();
    return {
      model: $("model").value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature: numberIn("temperature"),
      max_tokens: numberIn("max-tokens"),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** Read one streamed answer into `view`; the measurements of it. Throws what ended it. */
  async function readAnswer(view, figures, signal) {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(requestBody()), signal,
    });
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error(await reasonOf(response));
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) figures.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices && chunk.choices[0];
      if (!choice) continue;
      const delta = choice.delta || {}, thought = delta.reasoning_content || delta.reasoning;
      if (thought || delta.content) {
        figures.last = performance.now();
        figures.first = figures.first || figures.last;
        figures.pieces += 1;
      }
      if (thought) view.addReasoning(thought);
      if (delta.content) view.addContent(delta.content);
      if (choice.finish_reason) figures.finish = choice.finish_reason;
    }
    throw new Error("the stream ended before the answer was complete");
  }

  function figuresText(figures) {
    const number = figures.tokens === null ? figures.pieces : figures.tokens;
    const parts = [`${figures.tokens === null ? "about " : ""}${count(number)} ${number === 1 ? "token" : "tokens"}`];
    if (number > 1 && figures.last > figures.first) {
      parts.push(`${((number - 1) * 1000 / (figures.last - figures.first)).toFixed(1)} tokens/s`);
    }
    if (figures.first) parts.push(`TTFT ${seconds((figures.first - figures.begun) / 1000)}`);
    if (figures.finish === "length") parts.push("cut off at the token limit");
    return parts.join(" · ");
  }

  async function ask(text) {
    addMessage("user").querySelector(".text").textContent = text;
    messages.push({ role: "user", content: text });
    const box = addMessage("assistant"), view = answerView(box);
    const figures = { begun: performance.now(), first: 0, last: 0, pieces: 0, tokens: null, finish: "" };
    $("log").scrollTop = $("log").scrollHeight;
    running = new AbortController();
    showRunning(box, true);
    let problem = "";
    try {
      await readAnswer(view, figures, running.signal);
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.name === "TypeError" ? "the router cannot be reached" : error.message;
    }
    running = null;
    showRunning(box, false);
    // turns alternate: one without any answer is forgotten
    if (view.content.length) messages.push({ role: "assistant", content: view.content.data });
    else messages.pop();
    keepAtEnd(() => box.append(answerBar(view, figures, problem)));
    $("announce").textContent = problem ? `The answer ended: ${problem}` : `The answer is complete, ${figuresText(figures)}`;
  }

  function answerBar(view, figures, problem) {
    const bar = make("div", "bar");
    if (problem) bar.append(make("span", problem === "stopped" ? "faint" : "error", problem));
    if (figures.pieces) bar.append(make("span", "faint", figuresText(figures)));
    if (view.content.length) {
      const button = make("button", "quiet", "Copy");
      button.type = "button";
      button.setAttribute("aria-label", "Copy this answer");
      button.addEventListener("click", () => copy(view.content, button));
      bar.append(button);
    }
    return bar;
  }

  async function copy(node, button) {
    try {
      await navigator.clipboard.writeText(node.data);
    } catch { // no clipboard without HTTPS beyond this machine: select it, and let the browser copy what is selected
      const range = document.createRange();
      range.selectNode(node);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  function showRunning(box, isRunning) {
    box.classList.toggle("running", isRunning);
    $("stop").hidden = !isRunning;
    $("send").disabled = isRunning;
  }

  async function loadModels() {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const names = (await response.json()).data.map((model) => model.id), select = $("model");
    if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  function submit() {
    const text = $("prompt").value.trim();
    if (!text || running) return;
    $("prompt").value = "";
    ask(text);
  }

  // ---- the stream of the relay

  let watching = null; // the AbortController of the stream, while this tab is looked at
  let wake = () => {}; // ends a wait before the next attempt

  function showLink(state, text) {
    $("link").dataset.state = state;
    setText($("link"), text);
    const isOld = state !== "live" && lastDocument !== null;
    $("relay").classList.toggle("old", isOld);
    $("stale").hidden = !isOld;
  }

  /** Follow the stream until it ends; whether anything came. */
  async function follow(controller) {
    let timer = 0, hasBegun = false;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    heard();
    try {
      const response = await fetch("page/events", { headers: headers(), signal: controller.signal, cache: "no-store" });
      if (response.status === 401) {
        showLink("lost", "needs an API key");
        askForKey();
        return "key";
      }
      if (!response.ok) {
        showLink("lost", await reasonOf(response));
        return "refused";
      }
      loadModels().catch(() => {});
      for await (const data of eventsOf(response.body, heard)) {
        hasBegun = true;
        show(JSON.parse(data));
        showLink("live", lastDocument.router.is_draining ? "connected, shutting down" : "connected");
      }
    } catch { /* the router is gone, silent, or nobody looks: all of them end here */ } finally {
      clearTimeout(timer);
    }
    return hasBegun ? "ended" : "failed";
  }

  const pause = (ms) => new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => { clearTimeout(timer); resolve(); };
  });

  async function watch() {
    for (let failures = 0; ;) {
      if (document.hidden) {
        await pause(2 ** 30);
        continue;
      }
      watching = new AbortController();
      const end = await follow(watching);
      watching = null;
      if (document.hidden) continue;
      failures = end === "ended" ? 0 : failures + 1;
      if (end === "ended" || end === "failed") showLink("lost", "disconnected, trying again");
      const longest = BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)];
      await pause(end === "key" ? 2 ** 30 : longest * (0.75 + Math.random() / 2));
    }
  }

  // ---- the view of the relay

  let lastDocument = null;
  let speed = { tokens: 0, at: 0, value: 0 };

  function show(doc) {
    const isFirst = lastDocument === null;
    lastDocument = doc;
    showFigures(doc);
    notePulses(doc, isFirst);
    showDiagram(doc);
    const groups = groupsOf(doc.nodes);
    fill($("nodes"), doc.nodes, nodeRow, (row, node) => showNode(row, node, groups.get(node.group)));
    fill($("requests"), [...doc.requests, ...doc.ended], requestRow, showRequest);
    fill($("failures"), doc.failures, () => make("li"), showFailure);
    if (!doc.failures.length) fill($("failures"), [null], () => make("li"), (item) => setText(item, "none"));
  }

  /** Give `parent` one child per item, and show each item in its child. Children are used again. */
  function fill(parent, items, create, update) {
    while (parent.children.length > items.length) parent.lastElementChild.remove();
    items.forEach((item, index) => {
      if (!parent.children[index]) parent.append(create());
      update(parent.children[index], item);
    });
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
  }

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

  /** What is in a node's pool, by kind: of requests alone, held for handoffs by a lease, and found by its hash. */
  const poolOf = (node) => [
    ["held", node.num_held_blocks - node.num_leased_blocks], ["leased", node.num_leased_blocks], ["cached", node.num_cached_blocks],
  ];

  function nodeRow() {
    const row = cells(5);
    row.children[2].className = row.children[3].className = "n";
    meter(row.children[4], ["held", "leased", "cached"]);
    row.children[4].append(make("span", "note"));
    return row;
  }

  /** What the nodes of each group are together. */
  function groupsOf(nodes) {
    const groups = new Map();
    for (const { group, load } of nodes) {
      const before = groups.get(group) || { nodes: 0, load: 0 };
      if (group) groups.set(group, { nodes: before.nodes + 1, load: before.load + load });
    }
    return groups;
  }

  function showNode(row, node, group) {
    const [name, role, load, steps, pool] = row.children;
    setText(name, node.id);
    const of = group ? `, 1 of ${group.nodes} of ${node.group} with ${count(group.load)} in all` : "";
    setText(role, `${node.role}${of}${node.is_leaving ? ", leaving" : node.is_ejected ? ", ejected" : ""}`);
    setText(load, count(node.load));
    setText(steps, node.num_waiting ? `${node.num_running} + ${node.num_waiting} waiting` : count(node.num_running));
    const kinds = poolOf(node);
    const label = `${kinds.map(([kind, blocks]) => `${count(blocks)} ${kind}`).join(", ")}, ${count(node.num_free_blocks)} free`;
    showMeter(pool.firstElementChild, kinds.map(([, blocks]) => blocks), node.num_blocks, `${label} of ${node.num_blocks} blocks`);
    setText(pool.lastElementChild, `${label} of ${count(node.num_blocks)} blocks`);
  }

  function requestRow() {
    const row = cells(6);
    row.firstElementChild.append(make("span", "leg"));
    row.children[3].className = row.children[4].className = "n";
    meter(row.children[5], LEGS);
    return row;
  }

  const ENDS = { finished: "done", cancelled: "left" };

  function showRequest(row, request) {
    const [leg, tokens, nodes, ttft, tpot, legs] = row.children, hasEnded = request.end !== "";
    row.className = hasEnded ? "ended" : "";
    const isFailed = hasEnded && !ENDS[request.end];
    leg.firstElementChild.className = `leg ${isFailed ? "failed" : request.leg}`;
    setText(leg.firstElementChild, hasEnded ? ENDS[request.end] || "failed" : request.leg);
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

  function showFailure(item, failure) {
    const at = new Date(failure.at_s * 1000).toLocaleTimeString();
    const places = failure.attempts.map((each) => `${[each.prefill_node, each.decode_node].filter(Boolean).join(" → ")}${each.reason ? `: ${each.reason}` : ""}`);
    const status = failure.status === null ? "no answer" : `status ${failure.status}`;
    const text = [at, failure.reason, `${status} after ${seconds(failure.after_s)}`, ...places];
    if (item.dataset.text === text.join()) return;
    item.dataset.text = text.join();
    const what = make("span", failure.end === "finished" ? "what mended" : "what", text[1]);
    item.replaceChildren(`${text[0]} `, what, make("div", "note", text.slice(2).join(" · ")));
  }

  // ---- the diagram

  const MOST_BOXES = 4;
  const PULSE_MS = 900;
  const seenLegs = new Map(); // key of a request -> how many legs it has been seen on
  const pulses = new Map(); // edge -> until when it is shown, so that a transfer of 5 ms can be seen
  const shapes = new Map(); // edge -> its moving line
  let drawn = "";

  const edgeOf = (leg, row) => leg === "prefill" ? `prefill|${row.prefill_node || row.decode_node}`
    : leg === "transfer" ? `transfer|${row.prefill_node}|${row.decode_node}` : `decode|${row.decode_node}`;

  function notePulses(doc, isFirst) {
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

  function showDiagram(doc) {
    const of = (role) => doc.nodes.filter((node) => node.role === role).sort((a, b) => a.id < b.id ? -1 : 1).slice(0, MOST_BOXES);
    const prefill = of("prefill"), decode = of("decode"), hidden = doc.num_nodes - prefill.length - decode.length;
    const share = (blocks, node) => Math.round(92 * blocks / (node.num_blocks || 1));
    const state = [...prefill, ...decode].map((node) => [node.role, node.id, node.is_leaving || node.is_ejected, ...poolOf(node).map(([, blocks]) => share(blocks, node))]);
    const wanted = JSON.stringify([state, hidden]);
    if (wanted !== drawn) draw(prefill, decode, hidden);
    drawn = wanted;
    showEdges();
    const { legs } = doc, roles = (number, role) => `${number} ${role} ${number === 1 ? "node" : "nodes"}`;
    const label = `A router with ${roles(doc.nodes.filter((node) => node.role === "prefill").length, "prefill")} and `
      + `${roles(doc.nodes.filter((node) => node.role === "decode").length, "decode")}; requests by leg: ${LEGS.map((leg) => `${leg} ${legs[leg]}`).join(", ")}`;
    if ($("diagram").getAttribute("aria-label") !== label) $("diagram").setAttribute("aria-label", label);
  }

  function showEdges() {
    if (!lastDocument) return;
    const now = performance.now(), active = new Set();
    for (const [leg, prefillNode, decodeNode] of lastDocument.edges) {
      active.add(edgeOf(leg, { prefill_node: prefillNode, decode_node: decodeNode }));
    }
    for (const [name, until] of pulses) (until > now ? active.add(name) : pulses.delete(name));
    for (const [name, line] of shapes) line.classList.toggle("on", active.has(name));
  }

  // ---- what the visitor does

  $("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("key-dialog").open) running.abort();
  });
  $("stop").addEventListener("click", () => { if (running) running.abort(); $("prompt").focus(); });
  $("new-chat").addEventListener("click", () => {
    if (running) return;
    messages.length = 0;
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
    $("prompt").focus();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key-dialog").close();
    showKey();
    wake();
  });
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("forget-key").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && watching) watching.abort();
    if (!document.hidden) wake();
  });
  showKey();
  watch();
})();
