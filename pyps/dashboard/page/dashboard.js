"use strict";
// Takes the run's history from /data each second, or from #data of a saved page; draws all but timeline and charts.

const ROWS_MAX = 4000, STEPS_MAX = 150000; // held before all that the dashboard keeps is asked for anew
const EVENTS_MAX = 2000, EVENTS_SHOWN = 200, FAULTS_FIRST = 4;
const SIGNS = {
  joined: "+", back: "+", found: "+", left: "−", checkpoint: "▾", configured: "⇄", replica: "◇", finished: "✓",
  failed: "✕", expired: "✕", lost: "✕", standstill: "✕", score: "✕", refused: "✕", standby: "✕",
  stalled: "!", warning: "!", reset: "!",
};
const SMALL = "·+▾"; // of what changes nothing for the others
function signOf(kind, message) {
  if (kind === "standby" && message.includes("a standby follows")) return SIGNS.replica;
  return Object.hasOwn(SIGNS, kind) ? SIGNS[kind] : "·";
}
function isGrave(sign) { return "✕!".includes(sign); }

const $ = (id) => document.getElementById(id);
// `reader` is the token that shows the run, `token` the one that changes it.
const held = { doc: null, rows: [], events: [], number: 0, id: "", view: null };
Object.assign(held, { token: "", reader: "", closed: false, heard: Date.now() });

// --- words ---

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
function number(value) {
  if (value == null || Math.abs(value) >= 1e12) return value?.toExponential(2) ?? "–";
  return Math.abs(value) >= 100 ? whole.format(value) : String(+value.toPrecision(3));
}
function share(value) { return value == null ? "–" : `${+(100 * value).toPrecision(value < 0.1 ? 2 : 3)} %`; }
function bytes(value) {
  if (value == null) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
function secondsText(seconds) {
  if (seconds < 60) return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${number(seconds)} s`;
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}
function clockText(time, exact = false) {
  const date = new Date(Math.round(100 * time) * 10);
  return date.toLocaleTimeString("en-GB") + (exact ? (date % 1000 / 1000).toFixed(2).slice(1) : "");
}
function namesText(names) {
  return names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
}

// --- elements; whatever comes from the run is text, never markup ---

function make(tag, set = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(set)) if (value !== false) node.setAttribute(key, value);
  node.append(...inside);
  return node;
}
// Fills the node unless it was filled for the same.
function once(node, was, inside) {
  if (node.was !== was) node.replaceChildren(...inside());
  node.was = was;
}
function say(node, words) { if (node.textContent !== `${words}`) node.textContent = words; }
function nameNode(name) { return make("span", { class: name === held.doc.slow && "slow" }, name); }
// A state of a worker, or of a server.
function stateNode(state) {
  const isBad = /^(failed|expired|silent)/.test(state);
  return make("span", { class: isBad && "bad" }, isBad ? `✕ ${state}` : state);
}
// The words with the slow worker's name marked.
function marked(words) {
  const { slow } = held.doc;
  if (!slow) return [words];
  const found = new RegExp(`(?<![\\w-])(${slow.replace(/[^\w]/g, "\\$&")})(?![\\w-])`);
  return words.split(found).map((part) => part === slow ? nameNode(part) : part);
}
function swatch({ colour, dash, width }) {
  const node = make("i", { class: "line" });
  let at = 0;
  const stops = dash.map((length, index) => `${index % 2 ? "#0000" : colour} ${at}px ${at += length}px`);
  node.style.height = `${width}px`;
  node.style.background = stops.length ? `repeating-linear-gradient(90deg, ${stops})` : colour;
  return node;
}

// --- colours ---

let looked = null;
function look() {
  if (looked) return looked;
  const styles = getComputedStyle(document.documentElement), family = getComputedStyle(document.body).fontFamily;
  const of = (name) => styles.getPropertyValue(`--${name}`).trim();
  const numbered = (name, count) => Array.from({ length: count }, (_, at) => of(name + at));
  const tile = make("canvas", { width: 8, height: 8 }), ink = tile.getContext("2d");
  Object.assign(ink, { strokeStyle: of("hatch"), lineWidth: 1.3 });
  ink.stroke(new Path2D("M-1 1L1 -1M-1 9L9 -1M7 9L9 7"));
  const names = ["card", "grid", "text", "quiet", "hatch", "edge", "accent", "slow", "bad"];
  return looked = {
    ...Object.fromEntries(names.map((name) => [name, of(name)])), ages: numbered("age", 7), lines: numbered("line", 6),
    hatched: ink.createPattern(tile, "repeat"), sized: `${11 * devicePixelRatio}px ${family}`,
    small: `11px ${family}`, tiny: `10px ${family}`,
  };
}
function styleOf(at) { return { colour: look().lines[at % 6], dash: DASHES[at % DASHES.length], width: 1.8 }; }

// --- what is known now ---

const parts = [];
function render() { for (const part of held.doc ? parts : []) part(held.doc); }

function renderHead(doc) {
  say($("run"), doc.run || "no run yet");
  const lost = doc.servers.filter((server) => server.error).length;
  const silent = lost ? `${lost} of ${doc.servers.length} servers silent` : doc.state;
  say($("state"), doc.live ? silent : `${doc.state}, as it was`);
  say($("clock"), clockText(doc.now));
  once($("sentence"), doc.sentence + doc.slow, () => marked(doc.sentence));
  once($("warnings"), doc.warnings.join(), () => doc.warnings.map((words) => make("li", {}, words)));
  const facts = {
    protocol: doc.warmup ? `${doc.protocol}, warm-up ${doc.warmup}` : doc.protocol, staleness: doc.staleness_policy,
    "update rule": doc.rule, rate: doc.schedule ? `${number(doc.rate)}, ${doc.schedule}` : number(doc.rate),
    version: number(doc.version), examples: number(doc.examples),
    "workers alive": `${doc.alive} of ${doc.workers.length}`,
    "steps a second": number(held.rows.findLast((row) => row.steps != null)?.steps),
    running: doc.began ? secondsText(Math.max(0, doc.now - doc.began)) : "–",
  };
  once($("facts"), JSON.stringify(facts), () => Object.entries(facts).map(([name, value]) => (
    make("div", {}, make("dt", {}, name), make("dd", {}, value || "–")))));
}

function renderKey() {
  const { bounds } = timeline, item = (words, kind) => make("li", {}, make("i", { class: kind }), words);
  once($("tl-key"), `${bounds}`, () => [make("li", {}, "staleness"), ...[...bounds, ""].map((bound, at) => {
    const least = at ? bounds[at - 1] + 1 : 0, most = bound === "" ? "+" : bound > least ? `–${bound}` : "";
    const key = item(`${least}${most}`, "age");
    key.firstChild.style.background = `var(--age${at})`;
    return key;
  }), item("waits", "waits"), item("rejected or dropped", "cross"), item("not ended", "open")]);
}

function bars(list, items) {
  once(list, JSON.stringify([items, held.doc.slow]), () => items.map(({ name, part, now }) => make("li", {},
    nameNode(now ? `${name} (now)` : name),
    make("progress", { value: part, "aria-hidden": true }), make("span", {}, share(part)))));
}
function renderCosts({ workers, staleness: { policies, since } }) {
  say($("of"), since ? `of gradients since ${clockText(since)}` : "of all gradients");
  const losers = workers.filter((worker) => worker.step_lost != null).sort((a, b) => b.step_lost - a.step_lost);
  bars($("policies"), policies.map(({ name, lost, in_force }) => ({ name, part: lost, now: in_force })));
  bars($("losers"), losers.slice(0, 8).map(({ name, step_lost }) => ({ name, part: step_lost })));
}

// The newest faults stand first, where many workers that come and go do not hide them.
function renderEvents() {
  const events = held.events.filter(([, , , kind]) => kind !== "counts").slice(-EVENTS_SHOWN).reverse();
  const faults = events.filter(([, , , kind, message]) => isGrave(signOf(kind, message))).slice(0, FAULTS_FIRST);
  const shown = [...faults, ...events.filter((event) => !faults.includes(event))];
  once($("events"), held.id + events[0]?.[0], () => shown.map(([, time, , kind, message, worker]) => {
    const sign = signOf(kind, message), words = make("span", {}, ...marked(message || worker || kind));
    return make("li", {}, clockText(time), make("span", { class: isGrave(sign) && "bad" }, `${sign} ${kind}`), words);
  }));
}

const MEMORY = ["parameters", "slots", "shared", "waiting", "in flight", "other"];
const COLUMNS = {
  servers: [
    ["server", "address"], ["state", "words", stateNode], ["version", "version", number], ["cores busy", "cpu", number],
    ["gradients waiting", "queue", number], ...MEMORY.map((kind) => [kind, kind, bytes]),
    ["checkpoint", "checkpoint"], ["standby", "standby"],
  ],
  tables: [
    ["table", "name"], ["rows", "rows", number], ["memory", "bytes", bytes], ["hits", "hit_rate", share],
    ["candidates", "candidates", number], ["admitted", "admitted", number], ["evicted", "evicted", number],
    ["expired", "expired", number],
  ],
  workers: [
    ["worker", "name", nameNode], ["state", "state", stateNode], ["steps", "steps", number],
    ["steps/s", "pace", number], ["times slower", "slower", number], ["loss", "loss", number],
    ["staleness", "staleness_mean", number],
    ["step lost", "step_lost", share], ["waited", "waited", share], ["waits for", "waits_for", namesText],
    ["in a second", "bytes_in", bytes], ["out a second", "bytes_out", bytes],
    ["transport", "transport"], ["host", "host"], ["device", "device"], ["says", "message"],
  ],
};
// Only what is in sight, and of that what has changed: a table of 256 workers has 4,096 cells.
function renderTable(id, items) {
  const table = $(id), { top, bottom } = table.parentNode.getBoundingClientRect();
  if (table.was === items.length && (top > innerHeight || bottom < 0)) return;
  const row = (tag) => make("tr", {}, ...COLUMNS[id].map(([title, , format]) => (
    make(tag, { class: ![number, share, bytes].includes(format) && "text" }, tag === "th" ? title : ""))));
  once(table, items.length, () => [make("thead", {}, row("th")), make("tbody", {}, ...items.map(() => row("td")))]);
  items.forEach((item, at) => [...table.tBodies[0].rows[at].cells].forEach((cell, column) => {
    const [, key, format = String] = COLUMNS[id][column], words = item[key] == null ? "–" : format(item[key]);
    once(cell, words.outerHTML ?? words, () => [words]);
  }));
}
function renderServers({ servers, live, state }) {
  renderTable("servers", servers.map(({ error, silent_seconds, memory, ...server }) => ({
    ...server, ...memory,
    words: error ? `silent for ${secondsText(silent_seconds)}: ${error}` : live ? server.state : state,
  })));
}

function renderTables({ tables }) {
  $("of-tables").hidden = !tables.length;
  renderTable("tables", tables);
}

// --- what if ---

function renderWhatIf({ live, protocol, rate }) {
  say($("reason"), live ? "" : "This run is looked at again: nothing can be changed.");
  $("give").hidden = !live || !!held.token;
  $("changes").hidden = !live;
  $("protocol").value.placeholder = protocol;
  $("learning_rate").value.placeholder = number(rate);
}
async function giveToken(event) {
  event.preventDefault();
  held.token = $("token").value.trim();
  if (held.closed) held.reader = held.token;
  event.target.reset();
  say($("said"), "");
  if (held.closed) await poll(); else render();
  $("protocol").value.focus({ preventScroll: true });
}
function ask(path, token, options) {
  const headers = { "Content-Type": "application/json" }, signal = AbortSignal.timeout(20000);
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = fetch(path, { ...options, cache: "no-store", headers, signal });
  const read = answer.then(async (reply) => ({ status: reply.status, ...await reply.json() }));
  return read.catch(() => ({ error: "the dashboard does not answer" }));
}
async function configure(change) {
  const made = await ask("configure", held.token, { method: "POST", body: JSON.stringify(change) });
  if (made.status === 401) held.token = ""; // so that another is asked for
  render();
  return made;
}
async function tryChange(event) {
  event.preventDefault();
  const { id, value: { value } } = event.target, confirm = $("confirm");
  const change = id === "protocol" ? { protocol: value.trim() } : { learning_rate: +value };
  confirm.hidden = true;
  say($("said"), "Asking the servers …");
  const { error, lines } = await configure({ ...change, validate_only: true });
  say($("said"), error ? `Not possible: ${error}` : lines.join("\n"));
  say(confirm, `Change the ${id === "protocol" ? id : "rate"} of all servers to ${value}`);
  confirm.hidden = !!error;
  confirm.onclick = async () => {
    confirm.hidden = true;
    $("said").focus();
    const made = await configure(change);
    say($("said"), made.error ? `Not changed: ${made.error}` : `Changed.\n${made.lines.join("\n")}`);
  };
}

// --- the course of things ---

function take(doc) {
  const before = doc.whole ? { rows: [], events: [] } : held, rows = [...before.rows, ...doc.rows];
  timeline.add(doc);
  const after = rows.length > ROWS_MAX || timeline.held > STEPS_MAX ? 0 : doc.number;
  const events = [...before.events, ...doc.events].slice(-EVENTS_MAX);
  Object.assign(held, { doc, id: doc.id, number: after, rows, events });
  timeline.set(doc);
  $("tl-pause").hidden = !doc.live;
  say($("tl-skipped"), !doc.skipped ? "" :
    `${number(doc.skipped)} steps are missing: servers did more than are listed between two looks at them.`);
  document.title = `${doc.run || "pyps"}: ${doc.sentence}`;
  render();
}

async function poll() {
  const doc = await ask(`data?after=${held.number}&id=${held.id}`, held.reader);
  if (doc.status) Object.assign(held, { closed: doc.status === 401, heard: Date.now() });
  document.body.classList.toggle("closed", held.closed);
  $("broken").hidden = !doc.error;
  say($("broken"), doc.status ? `The dashboard says: ${doc.error}` :
    `The dashboard has not answered since ${clockText(held.heard / 1000)}. Below is what was known then.`);
  if (!doc.error) take(doc);
  if (!held.closed) setTimeout(poll, 1000);
}

const timeline = new Timeline($("tl"));

function start() {
  const on = (id, kind, act) => $(id).addEventListener(kind, act);
  parts.push(renderHead, renderKey, renderCosts, renderServers, renderTables, renderEvents, renderWhatIf);
  parts.push(({ workers }) => renderTable("workers", workers));
  makeCharts();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    looked = null;
    timeline.draw();
    render();
  });
  on("tl-pause", "click", () => timeline.pause());
  on("tl-out", "click", () => timeline.zoom(1.5));
  on("tl-in", "click", () => timeline.zoom(1 / 1.5));
  on("give", "submit", giveToken);
  for (const id of ["protocol", "learning_rate"]) on(id, "submit", tryChange);
  for (const id of ["smooth", "over", "span"]) on(id, "input", render);
  document.addEventListener("scrollend", render);
  held.token = held.reader = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  if (held.token) history.replaceState(null, "", location.pathname + location.search);
  // What is held and what each chart draws, for those who ask.
  window.pyps = { held, charts, timeline };
  if ($("data")) take(JSON.parse($("data").textContent)); else poll();
}
start();
