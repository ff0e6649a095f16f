"use strict";
// Takes the run's history from /data each second, or from #data of a saved page, and draws all but timeline and charts.

const ROWS_MAX = 4000; // held before everything is asked for anew, thinned
const EVENTS_MAX = 2000, EVENTS_SHOWN = 200;
const SIGNS = {
  joined: "+", back: "+", left: "−", failed: "✕", expired: "✕", stalled: "!", replica: "◇", owner: "◇", coordinator: "◇",
  configured: "⇄", warning: "!", checkpoint: "▾", standstill: "✕", finished: "✓", reset: "↺", score: "★", lost: "✕", found: "+",
};
function signOf(kind) { return Object.hasOwn(SIGNS, kind) ? SIGNS[kind] : "·"; }
function wordsOf([, , , kind, message, worker]) { return message || worker || kind; }
const GRAVE = new Set(["failed", "expired", "stalled", "standstill", "lost", "warning", "reset"]);
const MARKED = new Set([...GRAVE, "left", "back", "found", "configured", "finished", "replica"]);

const $ = (id) => document.getElementById(id);
// `reader` is the token that shows the run, `token` the one that changes it.
const held = { doc: null, rows: [], events: [], number: 0, id: "", chosen: "", token: "", reader: "", failing: 0, closed: false };
const view = { span: 0, from: null, to: null };

// --- words ---

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }), natural = new Intl.Collator("en", { numeric: true }).compare;
function number(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1e12) return value.toExponential(2);
  return Math.abs(value) >= 100 || Number.isInteger(value) ? whole.format(value) : String(+value.toPrecision(3));
}
function big(value) {
  const unit = [[1e9, "G"], [1e6, "M"]].find(([least]) => value >= least);
  return unit ? `${number(value / unit[0])} ${unit[1]}` : number(value);
}
function share(value) { return value == null ? "–" : `${(100 * value).toFixed((value > 0 && value < 0.0995) || (value > 0.9949 && value < 1) ? 1 : 0)} %`; }
function bytes(value) {
  if (value == null) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
function secondsText(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${number(seconds)} s`;
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}
function clockText(time, exact = false) {
  const date = new Date(1000 * time), two = (value) => String(Math.floor(value)).padStart(2, "0");
  const clock = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  return exact ? `${clock}.${two(date.getMilliseconds() / 10)}` : clock;
}
function nothing() {
  return held.doc.live ? "Nothing yet: this fills as soon as workers push gradients." : "Not in an update log.";
}
function slowerText(times) { return times < 1 ? "–" : number(times); }
function namesText(names) { return names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", "); }

// --- elements; whatever comes from the run is text, never markup ---

function make(tag, set = {}, ...inside) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(set)) {
    if (key === "onclick") node.addEventListener("click", value); else if (value !== false) node.setAttribute(key, value);
  }
  node.append(...inside);
  return node;
}
function fill(node, ...inside) { node.replaceChildren(...inside); }
// Fills the node unless it was filled for the same.
function once(node, was, inside) {
  if (node.dataset.was !== was) fill(node, ...inside());
  node.dataset.was = was;
}
function say(node, words) { if (node.textContent !== words) node.textContent = words; }
function nameNode(name) { return make("span", name === held.doc.slow ? { class: "slow" } : {}, name); }
// The words with the slow worker's name marked.
function marked(words) {
  const { slow } = held.doc;
  if (!slow) return [words];
  const found = new RegExp(`(?<![\\w-])(${slow.replace(/[^\w]/g, "\\$&")})(?![\\w-])`);
  return words.split(found).map((part) => part === slow ? nameNode(part) : part);
}
function swatch(colour, dash = [], width = 2) {
  const line = make("svg:line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: colour, "stroke-width": width, "stroke-dasharray": dash.join(" ") });
  return make("svg:svg", { width: 18, height: 10, "aria-hidden": "true" }, line);
}

// --- colours ---

let looked = null;
function look() {
  if (looked) return looked;
  const styles = getComputedStyle(document.documentElement), family = getComputedStyle(document.body).fontFamily;
  const of = (name) => styles.getPropertyValue(`--${name}`).trim(), numbered = (name, count) => Array.from({ length: count }, (_, at) => of(name + at));
  const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 }), ink = tile.getContext("2d");
  Object.assign(ink, { strokeStyle: of("hatch"), lineWidth: 1.3 });
  ink.stroke(new Path2D("M-1 1L1 -1M-1 9L9 -1M7 9L9 7"));
  const colours = ["card", "line", "grid", "text", "quiet", "hatch", "edge", "accent", "slow", "bad", "bar"].map((name) => [name, of(name)]);
  looked = {
    ...Object.fromEntries(colours), ages: numbered("age", AGES), lines: numbered("line", 6), hatched: ink.createPattern(tile, "repeat"),
    font: `13px ${family}`, bold: `700 13px ${family}`, small: `11px ${family}`, sized: `${11 * devicePixelRatio}px ${family}`,
  };
  return looked;
}
function recolour() {
  looked = null;
  for (const chart of Object.values(charts)) chart.forget();
  timeline.redraw();
  render();
}
function styleOf(at) { return { colour: look().lines[at % 6], dash: DASHES[at % DASHES.length], width: 1.8 }; }
function styleOfWorker(name) {
  const { slow, workers } = held.doc, width = name === held.chosen ? 3.2 : 1.6;
  if (name === slow) return { colour: look().slow, dash: [], width: Math.max(2.6, width) };
  return { ...styleOf(workers.filter((worker) => worker.name !== slow).findIndex((worker) => worker.name === name)), width };
}

// --- what is drawn once, for the keyboard, and then while it is in sight: a piece a frame, for the timeline's pace ---

const parts = [], waiting = [];
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) parts.find((part) => part.box === target).shown = isIntersecting;
  render();
}, { rootMargin: "150px" });
function addPart(box, draw) {
  parts.push({ box, draw, shown: false, drawn: false });
  sight.observe(box);
  return parts.at(-1);
}

function render() {
  if (!held.doc) return;
  const idle = !waiting.length;
  waiting.push(...parts.filter((part) => (part.shown || !part.drawn) && !waiting.includes(part)));
  if (idle && waiting.length) later(work);
}
function work() {
  const part = waiting.shift();
  if (waiting.length) later(work);
  part.drawn = true;
  part.draw(held.doc);
}
function later(act) { document.hidden ? setTimeout(act) : requestAnimationFrame(act); }

// --- what is known now ---

function renderHead(doc) {
  document.title = `${doc.run || "pyps"}: ${doc.sentence}`;
  say($("run"), doc.run || "no run yet");
  const lost = doc.servers.filter((server) => server.error).length;
  say($("state"), !doc.live ? `${doc.state}, as it was` : lost ? `${lost} of ${doc.servers.length} servers silent` : doc.state);
  say($("clock"), clockText(doc.now));
  once($("sentence"), doc.sentence + doc.slow, () => marked(doc.sentence));
  once($("warnings"), doc.warnings.join(), () => doc.warnings.map((words) => make("li", {}, words)));
  const facts = {
    protocol: doc.warmup ? `${doc.protocol}, warm-up ${doc.warmup}` : doc.protocol, staleness: doc.staleness_policy, "update rule": doc.rule,
    rate: doc.schedule ? `${number(doc.rate)}, ${doc.schedule}` : number(doc.rate), version: number(doc.version), examples: big(doc.examples),
    "workers alive": `${doc.alive} of ${doc.workers.length}`, "steps a second": number(held.rows.findLast((row) => row.steps != null)?.steps),
    running: doc.began ? secondsText(Math.max(0, doc.now - doc.began)) : "–",
  };
  Object.entries(facts).forEach(([name, value], at) => {
    const cell = $("facts").children[at] ?? $("facts").appendChild(make("div", {}, make("dt", {}, name), make("dd")));
    say(cell.lastChild, value || "–");
  });
}

function renderKey() {
  const { bounds } = timeline, colours = look();
  const item = (words, ...inside) => make("li", {}, make("svg:svg", { width: 14, height: 14, "aria-hidden": "true" }, ...inside), words);
  const square = (set) => make("svg:rect", { x: 0.5, y: 0.5, width: 13, height: 13, fill: "none", stroke: colours.quiet, ...set });
  const strokes = (d, colour) => make("svg:path", { d, stroke: colour, "stroke-width": 1.5 });
  const ages = [...bounds, Infinity].map((bound, at) => {
    const least = at ? bounds[at - 1] + 1 : 0;
    return item(bound === Infinity ? `${least}+` : least < bound ? `${least}–${bound}` : `${bound}`, square({ fill: colours.ages[at] }));
  });
  once($("tl-key"), `${bounds}${colours.text}`, () => [make("li", {}, "staleness"), ...ages,
    item("waits", square(), strokes("M1 13L13 1M1 7L7 1M7 13L13 7", colours.hatch)),
    item("rejected or dropped", strokes("M3 3L11 11M11 3L3 11", colours.bad)), item("not ended", square({ "stroke-dasharray": "2 2" }))]);
}

function renderHistogram({ staleness: { buckets, mean, max, law, law_words, since } }) {
  const of = since ? `of gradients since ${clockText(since)}, when protocol or policy changed` : "of all gradients";
  for (const node of document.querySelectorAll(".of")) say(node, of);
  const total = buckets.reduce((sum, [, count]) => sum + count, 0), box = $("histogram"), width = box.clientWidth, base = 186;
  const colours = look(), meanWords = number(+mean.toFixed(3));
  const lawWords = law == null ? "" : `; for equal workers the law ${law_words} says ${number(law)}`;
  say($("law"), total ? `Mean ${meanWords}, largest ${number(max)}${lawWords}.` : "");
  if (!total) return fill(box, make("p", { class: "empty" }, nothing()));
  // A few gradients of one that came back late would press all others into the first bar.
  let rest = total;
  const far = buckets.find(([, count]) => (rest -= count) <= 0.005 * total)[0], top = Math.max(4, far, Math.ceil(law ?? 0) + 1);
  const bin = Math.ceil((top + 1) / 36), bins = new Array(Math.ceil((top + 1) / bin)).fill(0), across = width / bins.length, beyond = max > top;
  for (const [staleness, count] of buckets) bins[Math.min(bins.length - 1, Math.floor(staleness / bin))] += count / total;
  const words = (text, x, y, anchor = "middle") => make("svg:text", { x, y, "text-anchor": anchor }, text);
  const most = Math.max(...bins), every = Math.ceil(34 / across);
  const drawn = bins.flatMap((part, at) => {
    const height = part / most * (base - 44), middle = (at + 0.5) * across, last = beyond && at === bins.length - 1;
    const fill = colours.ages[ageOf(at * bin, timeline.bounds)];
    return [
      make("svg:rect", { x: at * across + 1, y: base - height, width: Math.max(1, across - 2), height, fill, stroke: colours.quiet, "stroke-width": 0.5 }),
      across > 36 && part ? words(share(part), middle, base - height - 4) : "",
      last ? words(`${at * bin}+`, width, base + 15, "end") : "",
      !last && at % every === 0 && at + every <= bins.length - beyond ? words(at * bin, middle, base + 15) : "",
    ];
  });
  const line = (value, text, y, dash, stroke) => {
    const x = (value / bin + 0.5) * across, [anchor, beside] = x > 0.6 * width ? ["end", x - 5] : ["start", x + 5];
    const stem = make("svg:line", { x1: x, x2: x, y1: y + 2, y2: base, stroke, "stroke-width": 2, "stroke-dasharray": dash });
    return [stem, words(text, beside, y + 10, anchor)];
  };
  if (law != null) drawn.push(...line(law, `law: ${number(law)}`, 14, "5 3", colours.accent));
  drawn.push(...line(mean, `mean: ${meanWords}`, 0, "", colours.text));
  drawn.push(make("svg:line", { x1: 0, x2: width, y1: base, y2: base, stroke: colours.line }));
  // Words above lines.
  drawn.sort((a, b) => (a.tagName === "text") - (b.tagName === "text"));
  fill(box, make("svg:svg", { width, height: 206, role: "img", "aria-label": $("law").textContent }, ...drawn));
}

function bars(list, items, more = "") {
  const rest = items.length ? more : "nothing yet";
  fill(list, ...items.map(({ name, part, now }) => {
    const bar = make("b");
    bar.style.width = `${100 * Math.min(1, part ?? 0)}%`;
    const label = make("span", { title: name, class: name === held.doc.slow ? "slow" : "" }, now ? `${name} (now)` : name);
    return make("li", { class: now ? "now" : "" }, label, make("i", { "aria-hidden": "true" }, bar), make("span", {}, share(part)));
  }), ...(rest ? [make("li", {}, make("span", { class: "quiet" }, rest))] : []));
}
function renderCosts({ workers, staleness }) {
  const losers = workers.filter((worker) => worker.step_lost != null).sort((a, b) => b.step_lost - a.step_lost);
  bars($("policies"), staleness.policies.map(({ name, lost, in_force }) => ({ name, part: lost, now: in_force })));
  const more = losers.length > 8 ? `${losers.length - 8} more lose less` : "";
  bars($("losers"), losers.slice(0, 8).map(({ name, step_lost }) => ({ name, part: step_lost })), more);
}

function renderServers({ servers }) {
  once($("servers"), JSON.stringify([servers, look().text]), () => servers.map(serverCard));
}
// Whether the run's rows have it: an update log has neither bytes nor queues.
function isKnown(key) { return held.rows.some((row) => row[key] != null); }
function serverCard(server) {
  const kinds = Object.entries(server.memory), total = kinds.reduce((sum, [, size]) => sum + size, 0);
  let left = 0;
  const segments = total ? kinds.map(([, size], at) => {
    left += size;
    const x = `${100 * (left - size) / total}%`, width = `${100 * size / total}%`;
    return make("svg:rect", { x, width, height: 22, fill: look().lines[at % 6], stroke: look().card, "stroke-width": 2 });
  }) : [];
  const fact = (name, value, ...sign) => value && value !== "–" ? make("div", {}, make("dt", {}, ...sign, name), make("dd", {}, value)) : "";
  const words = server.error ? `✕ silent for ${secondsText(server.silent_seconds)}: ${server.error}` : held.doc.live ? server.state : held.doc.state;
  return make("div", { class: server.error ? "server lost" : "server" },
    make("h3", {}, `${server.address} `, make("span", { class: server.error ? "bad" : "quiet" }, words)),
    total ? make("svg:svg", { role: "img", "aria-label": `${bytes(total)} of memory` }, ...segments) : "",
    make("dl", {}, fact("memory", total ? bytes(total) : ""),
      ...kinds.map(([kind, size], at) => fact(kind, size ? bytes(size) : "", swatch(look().lines[at % 6], [], 8)))),
    make("dl", {}, fact("version", number(server.version)),
      fact("processor", server.cpu == null ? "" : `${number(server.cpu)} cores`),
      fact("waiting gradients", isKnown("queue") ? number(server.queue) : ""), fact("checkpoint", server.checkpoint), fact("standby", server.standby)));
}

function renderEvents() {
  const newest = held.events.at(-1)?.[0] ?? 0, grave = held.events.filter((event) => event[0] > held.listed && GRAVE.has(event[3]));
  if (held.listed === newest) return;
  held.listed = newest;
  if (grave.length) say($("grave"), grave.map(wordsOf).join(". "));
  fill($("events"), ...held.events.slice(-EVENTS_SHOWN).reverse().map((event) => {
    const [, time, server, kind] = event;
    const bad = { class: GRAVE.has(kind) ? "bad" : "" };
    const sign = make("span", { ...bad, "aria-hidden": "true" }, signOf(kind)), at = make("span", { class: "quiet" }, clockText(time));
    return make("li", { title: server }, at, sign, make("span", bad, kind), make("span", {}, ...marked(wordsOf(event))));
  }));
}

// --- the workers' table: cells stay and only change their text, so that focus does too ---

const COLUMNS = [
  ["worker", "name"], ["state", "state"], ["steps", "steps", number], ["steps/s", "pace", number],
  ["times slower", "slower", slowerText], ["loss", "loss", number], ["staleness", "staleness_mean", number],
  ["step lost", "step_lost", share], ["waited", "waited", share], ["waits for", "waits_for", namesText],
  ["transport", "transport"], ["host", "host"], ["device", "device"], ["says", "message"],
];
const TEXTS = new Set(["name", "state", "waits_for", "transport", "host", "device", "message"]);
const table = { rows: new Map(), by: "name", sign: 1, order: null, part: null };

function cellsOf(tag, inside) { return COLUMNS.map(([words, key]) => make(tag, { class: TEXTS.has(key) ? "text" : "" }, ...inside(words, key))); }
function renderWorkers({ workers, slow }) {
  const head = $("workers").tHead ?? $("workers").createTHead(), body = $("workers").tBodies[0] ?? $("workers").createTBody();
  if (!head.rows.length) head.append(make("tr", {}, ...cellsOf("th", (words, key) => [make("button", { type: "button", onclick: () => sortBy(key) }, words)])));
  COLUMNS.forEach(([, key], at) => head.rows[0].cells[at].setAttribute("aria-sort", key !== table.by ? "none" : table.sign > 0 ? "ascending" : "descending"));
  $("workers-empty").hidden = workers.length > 0;
  const value = (worker) => worker[table.by] ?? -Infinity;
  const compare = TEXTS.has(table.by) ? (a, b) => natural(value(a), value(b)) : (a, b) => value(a) - value(b);
  const sorted = [...workers].sort((a, b) => table.sign * compare(a, b) || natural(a.name, b.name)), order = sorted.map((worker) => worker.name).join("\n");
  for (const worker of sorted) {
    const { name, state } = worker, chosen = name === held.chosen;
    const chooser = () => make("button", { type: "button", onclick: () => choose(name) });
    if (!table.rows.has(name)) table.rows.set(name, make("tr", {}, ...cellsOf("td", (_, key) => key === "name" ? [chooser()] : [])));
    const row = table.rows.get(name), button = row.cells[0].firstChild;
    COLUMNS.forEach(([, key, format = String], at) => say(at ? row.cells[at] : button, worker[key] == null ? "–" : format(worker[key])));
    row.className = `${chosen ? "chosen" : ""} ${state === "alive" ? "" : "dead"}`;
    row.cells[1].className = ["alive", "finished"].includes(state) ? "text" : "text bad";
    button.className = name === slow ? "slow" : "";
    button.setAttribute("aria-pressed", chosen);
  }
  renderLinks(workers);
  if (order === table.order) return;
  table.order = order;
  for (const name of table.rows.keys()) if (!workers.some((worker) => worker.name === name)) table.rows.delete(name);
  fill(body, ...sorted.map((worker) => table.rows.get(worker.name)));
}
function renderLinks(workers) {
  const kinds = new Map(), size = isKnown("bytes_in") ? bytes : () => "–";
  for (const { transport, bytes_in, bytes_out } of workers.filter((worker) => worker.state === "alive")) {
    const sum = kinds.get(transport) ?? [0, 0, 0];
    kinds.set(transport, [sum[0] + 1, sum[1] + (bytes_in ?? 0), sum[2] + (bytes_out ?? 0)]);
  }
  const row = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, {}, text)));
  const rows = [...kinds].sort().map(([kind, [count, ...sizes]]) => row("td", [kind || "–", count, ...sizes.map(size)]));
  fill($("links"), make("thead", {}, row("th", ["transport", "workers", "in a second", "out a second"])), make("tbody", {}, ...rows));
}
function sortBy(key) {
  Object.assign(table, { sign: key === table.by ? -table.sign : TEXTS.has(key) ? 1 : -1, by: key });
  renderWorkers(held.doc);
}
function choose(name) {
  held.chosen = timeline.chosen = held.chosen === name ? "" : name;
  timeline.redraw();
  render();
}

// --- what if ---

function renderWhatIf(doc) {
  const closed = "Read-only: a change needs the token of the printed address, or the operator’s.";
  const reason = !doc.live ? "This run is looked at again: nothing can be changed." : held.token ? "" : closed;
  say($("reason").firstElementChild, reason || "This page holds a token; whether it may change a run, the try says.");
  say($("give-token"), held.token ? "Give another" : "Give a token");
  $("give-token").hidden = !doc.live;
  $("changes").disabled = !!reason;
  for (const form of document.querySelectorAll("form[data-field]")) {
    form.value.placeholder = form.dataset.field === "protocol" ? doc.protocol : number(doc.rate);
  }
}
async function configure(change) {
  try {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${held.token}` };
    const reply = await fetch("configure", { method: "POST", headers, body: JSON.stringify(change) });
    const answer = await reply.json();
    return reply.ok ? answer : { error: answer.error ?? `the dashboard answers ${reply.status}` };
  } catch { return { error: "the dashboard does not answer" }; }
}
function ask(title, lines, button, token = false) {
  say($("confirm-title"), title);
  fill($("confirm-lines"), ...lines.map((line) => make("li", {}, line)));
  $("token-label").hidden = !token;
  say($("confirm-yes"), button);
  $("confirm").returnValue = "";
  $("confirm").showModal();
  return new Promise((done) => $("confirm").addEventListener("close", () => done($("confirm").returnValue === "yes"), { once: true }));
}
async function giveToken() {
  const given = await ask(held.closed ? "A token, to see this run" : "A token, to change this run", ["It stays in this page until it is closed."], "Use it", true);
  if (given) held.token = $("token").value.trim();
  if (given && held.closed) held.reader = held.token;
  $("token").value = "";
  render();
}
async function tryChange(event) {
  event.preventDefault();
  const { field } = event.target.dataset, value = event.target.value.value.trim(), change = { [field]: field === "protocol" ? value : +value };
  const told = (words) => say($("said"), words);
  told("Asking the servers …");
  const before = await configure({ ...change, validate_only: true });
  if (before.error) return told(`Not possible: ${before.error}`);
  told("");
  const title = `Change the ${field === "protocol" ? "protocol" : "rate"} of all servers to ${value}?`;
  if (!await ask(title, before.lines, "Change it")) return told("Nothing was changed.");
  const made = await configure(change);
  told(made.error ? `Not changed: ${made.error}` : `Changed.\n${made.lines.join("\n")}`);
}

// --- the course of things ---

function take(doc) {
  if (doc.whole) {
    Object.assign(held, { rows: [], events: [], listed: Infinity });
    timeline.clear();
  }
  for (const row of doc.rows) held.rows.push(row);
  held.events = [...held.events, ...doc.events].slice(-EVENTS_MAX);
  Object.assign(held, { doc, id: doc.id, number: held.rows.length > ROWS_MAX ? 0 : doc.number });
  timeline.add(doc.steps, doc.waits);
  timeline.set({ now: doc.now, live: doc.live, workers: doc.workers, slow: doc.slow, mean: doc.staleness.mean });
  $("tl-empty").hidden = timeline.lanes.size > 0;
  say($("tl-skipped"), !doc.skipped ? "" :
    `${number(doc.skipped)} steps are missing: servers did more than are listed between two looks at them.`);
  if (doc.workers.some((worker) => !table.rows.has(worker.name))) table.part.drawn = false;
  $("tl-live").hidden = $("tl-pause").hidden = !doc.live;
  render();
}

async function poll() {
  let doc = null, refused = "";
  try {
    const headers = held.reader ? { Authorization: `Bearer ${held.reader}` } : {};
    const reply = await fetch(`data?after=${held.number}&id=${held.id}`, { cache: "no-store", headers, signal: AbortSignal.timeout(10000) });
    const answer = await reply.json();
    held.closed = reply.status === 401;
    if (reply.ok) doc = answer; else refused = answer.error;
  } catch { /* said below */ }
  held.failing = doc ? 0 : held.failing || Date.now() / 1000;
  $("broken").hidden = !held.failing;
  const ended = held.events.some((event) => event[3] === "finished");
  const silence = `${ended ? "The run has finished, and " : ""}the dashboard has not answered since ${clockText(held.failing)}. `
    + `Below is what was known then.${ended ? " To look at a run later, give it --update-log and see pyps report." : ""}`;
  if (held.failing) say($("broken"), refused ? `The dashboard says: ${refused}` : silence[0].toUpperCase() + silence.slice(1));
  if (doc) take(doc);
  if (held.closed) await giveToken();
  setTimeout(poll, 1000);
}

const timeline = new Timeline($("tl"), {
  look, choose,
  changed() {
    $("tl-live").setAttribute("aria-pressed", timeline.following);
    $("tl-pause").setAttribute("aria-pressed", !timeline.following && timeline.live);
  },
  tell(words, x, y) {
    const tip = $("tip");
    tip.hidden = !words;
    say(tip, words ?? "");
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
  },
});

function start() {
  const on = (id, kind, act) => $(id).addEventListener(kind, act);
  for (const draw of [renderHead, renderWhatIf]) parts.push({ draw, shown: true });
  makeCharts();
  const draws = { events: renderEvents, histogram: renderHistogram, costs: renderCosts, servers: renderServers };
  for (const [id, draw] of Object.entries({ "tl-key": renderKey, ...draws })) addPart($(id), draw);
  table.part = addPart($("workers"), renderWorkers);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  on("tl-live", "click", () => timeline.follow());
  on("tl-pause", "click", () => timeline.pause());
  on("tl-out", "click", () => timeline.zoom(1.5));
  on("tl-in", "click", () => timeline.zoom(1 / 1.5));
  for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => show(+button.dataset.span));
  for (const form of document.querySelectorAll("form[data-field]")) form.addEventListener("submit", tryChange);
  for (const id of ["smooth", "over"]) on(id, "input", render);
  on("as-timeline", "click", () => show(0, timeline.viewEnd - timeline.span, timeline.viewEnd));
  on("give-token", "click", giveToken);
  on("confirm-no", "click", () => $("confirm").close());
  addEventListener("resize", render);
  held.token = held.reader = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  if (held.token) history.replaceState(null, "", location.pathname + location.search);
  show(0);
  // What is held and what each chart draws, for those who ask.
  window.pyps = { held, charts, timeline, view };
  if ($("data")) take(JSON.parse($("data").textContent)); else poll();
}
start();
