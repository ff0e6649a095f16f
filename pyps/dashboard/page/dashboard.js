"use strict";
// Takes the run's history from /data each second, or from #data of a saved page, and draws all but the timeline.

const LINES_MAX = 12; // workers with a line each; beyond, the median and a band
const ROWS_MAX = 4000; // held before everything is asked for anew, thinned
const EVENTS_SHOWN = 200;
const DASHES = [[], [6, 3], [2, 3]];
const SIGNS = {
  joined: "+", back: "+", counts: "·", left: "−", expired: "✕", stalled: "!", replica: "◇", owner: "◇", round: "·", work: "·", coordinator: "◇",
  configured: "⇄", warning: "!", checkpoint: "▾", standstill: "✕", finished: "✓", reset: "↺", score: "★", lost: "✕", found: "+",
};
const GRAVE = new Set(["expired", "stalled", "standstill", "lost", "warning", "reset"]);
const MARKED = new Set([...GRAVE, "left", "back", "found", "configured", "finished", "replica"]);

const $ = (id) => document.getElementById(id);
const held = { rows: [], events: [], doc: null, number: 0, id: "", chosen: "", token: "", reader: "", failing: 0 };
const view = { span: 0, from: null, to: null, hover: null };
const charts = {};

// --- words ---

const number = (value, digits = 3) => value == null ? "–" : Math.abs(value) >= 100 || Number.isInteger(value)
  ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(digits));
const share = (value) => value == null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
function big(value) {
  const at = [[1e9, "G"], [1e6, "M"], [1e5, "k"]].find(([least]) => value >= least);
  return at ? `${number(value / (at[1] === "k" ? 1e3 : at[0]))} ${at[1]}` : number(value);
}
function bytes(value) {
  if (value == null) return "–";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
function secondsText(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${number(seconds)} s`;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}
function clockText(time, exact = false) {
  const date = new Date(1000 * time), two = (value) => String(value).padStart(2, "0");
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return exact ? `${clock}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, 2)}` : clock;
}
const namesText = (names) => names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");

// --- elements ---

function make(tag, set = {}, ...inside) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(set)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...inside);
  return node;
}
const nameNode = (name) => make("span", name === held.doc?.slow && { class: "slow" } || {}, name);
function fill(node, ...inside) { node.replaceChildren(...inside); }
function say(node, words) { if (node.textContent !== words) node.textContent = words; }
// The words with the slow worker's name marked.
function marked(words) {
  const slow = held.doc?.slow;
  if (!slow) return [words];
  const found = new RegExp(`(?<![\\w-])(${slow.replace(/[^\w]/g, "\\$&")})(?![\\w-])`);
  return words.split(found).map((part) => part === slow ? nameNode(part) : part);
}

// --- colours ---

let looked = null;
function look() {
  if (looked) return looked;
  const styles = getComputedStyle(document.documentElement);
  const of = (name) => styles.getPropertyValue(`--${name}`).trim();
  looked = Object.fromEntries(["card", "line", "grid", "text", "quiet", "accent", "slow", "bad", "bar"].map((name) => [name, of(name)]));
  const dark = document.documentElement.dataset.theme === "dark", family = getComputedStyle(document.body).fontFamily;
  const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 }), ink = tile.getContext("2d");
  ink.strokeStyle = of("hatch");
  ink.lineWidth = 1.3;
  for (const from of [-8, 0, 8]) { ink.moveTo(from - 1, 9); ink.lineTo(from + 9, -1); }
  ink.stroke();
  return Object.assign(looked, {
    ages: Array.from({ length: AGES }, (_, age) => of(`age${age}`)), edge: dark ? "#0009" : "#0006", hatch: ink.createPattern(tile, "repeat"), hatched: of("hatch"),
    font: `13px ${family}`, bold: `700 13px ${family}`, small: `11px ${family}`,
    lines: dark ? ["#74a9f0", "#5fc9a6", "#c3a6ff", "#a9b4bf", "#59c8dc", "#d8c77a"] : ["#2766b8", "#1c8a66", "#7a52c0", "#66727e", "#0a8ba0", "#93791a"],
  });
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  say($("theme"), theme === "dark" ? "Light" : "Dark");
  looked = null;
  for (const chart of Object.values(charts)) chart.forget();
  timeline.redraw();
  if (held.doc) render();
}
function styleOf(name) {
  if (name === held.doc?.slow) return { colour: look().slow, dash: [], width: 2.6 };
  const at = Math.max(0, held.doc.workers.filter((worker) => worker.name !== held.doc.slow).findIndex((worker) => worker.name === name));
  const colours = look().lines;
  return { colour: colours[at % colours.length], dash: DASHES[Math.floor(at / colours.length) % DASHES.length], width: name === held.chosen ? 3 : 1.6 };
}

// --- charts over time ---

class Chart {
  // lines() gives {x, lines: [{name, values, colour, dash, width}], band: [low, high] or none}, or words where there is nothing yet
  constructor(id, { lines, format = (value) => number(value), floor = true, height = 190, timed = () => true, over = () => {} }) {
    Object.assign(this, { id, lines, format, floor, height, timed, over, box: $(id), shown: false });
    new IntersectionObserver(([entry]) => { this.shown = entry.isIntersecting; if (this.shown && held.doc) this.draw(); }).observe(this.box);
    new ResizeObserver(() => { if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height }); }).observe(this.box);
  }

  forget() { this.plot?.destroy(); this.plot = this.made = null; }

  draw() {
    const drawn = this.drawn = this.lines();
    if (typeof drawn === "string") {
      this.forget();
      return fill(this.box, make("p", { class: "empty" }, drawn));
    }
    const data = [drawn.x, ...(drawn.band ?? []), ...drawn.lines.map((line) => line.values)];
    const made = JSON.stringify([this.timed(), !!drawn.band, drawn.lines.map(({ values, ...style }) => style)]);
    if (this.made !== made) this.create(drawn, data); else this.plot.setData(data);
    this.made = made;
    this.read();
  }

  create(drawn, data) {
    this.forget();
    const colours = look(), timed = this.timed(), narrow = this.box.clientWidth < 460;
    const series = drawn.lines.map((line) => ({ stroke: line.colour, dash: line.dash, width: line.width ?? 1.8, spanGaps: true, points: { show: data[0].length < 2 } }));
    const edge = { stroke: "transparent", fill: `${colours.bar}40`, spanGaps: true, points: { show: false } };
    const axis = { stroke: colours.quiet, font: colours.small, ticks: { show: false }, grid: { stroke: colours.grid, width: 1 } };
    this.values = drawn.lines.map((line) => make("b"));
    this.key = make("ul", { class: "key" }, ...drawn.lines.map((line, at) => {
      const name = line.worker ? make("button", { type: "button", onclick: () => choose(line.name) }, nameNode(line.name)) : line.name;
      return make("li", {}, swatch(line), name, this.values[at]);
    }));
    const place = make("div");
    fill(this.box, ...(drawn.lines.length ? [this.key] : []), place);
    this.plot = new uPlot({
      width: this.box.clientWidth, height: this.height, padding: [12, drawn.lines.length ? narrow ? 66 : 92 : 8, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => timed ? timeRange(low, high) : [low, high > low ? high : low + 1] },
        y: { range: (_, low, high) => low == null ? [0, 1] : [this.floor ? Math.min(0, low) : low - 0.06 * (high - low || 1), high > low || high ? high + 0.06 * (high - low || 1) : 1] },
      },
      series: [{}, ...(drawn.band ? [edge, edge] : []), ...series],
      bands: drawn.band ? [{ series: [2, 1], fill: `${colours.bar}38` }] : [],
      axes: [
        { ...axis, size: 26, space: narrow ? 70 : 84, values: (_, ticks) => ticks.map((tick) => timed ? clockText(tick) : big(tick)), incrs: timed ? TIME_STEPS : undefined },
        { ...axis, size: 58, space: 34, show: drawn.lines.length > 0, values: (_, ticks) => ticks.map((tick) => this.format(tick)), incrs: this.format === bytes ? BYTE_STEPS : undefined },
      ],
      legend: { show: false },
      cursor: {
        y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { show(0); return null; } },
        sync: timed ? { key: "time", scales: ["x", null] } : undefined,
      },
      hooks: {
        drawClear: [(plot) => timed && this.marks(plot)],
        draw: [(plot) => { this.names(plot, drawn.lines); this.over(plot); }],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          if (timed) show(0, plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        setCursor: [(plot) => { this.read(); if (timed && plot.cursor.event) hover(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null, this); }],
      },
    }, data, place);
  }

  // The values at the cursor, else the newest.
  read() {
    const { data, cursor } = this.plot, first = data.length - this.values.length;
    this.values.forEach((node, at) => {
      const values = data[first + at];
      let index = cursor.left >= 0 && cursor.idx != null ? cursor.idx : values.length - 1;
      while (index > 0 && values[index] == null) index--;
      say(node, this.format(values[index]));
    });
  }

  marks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, colours = look();
    const at = (time) => plot.valToPos(time, "x", true), end = timeline.viewEnd();
    const [from, to] = [Math.max(bbox.left, at(end - timeline.span)), Math.min(bbox.left + bbox.width, at(end))];
    ctx.fillStyle = `${colours.accent}14`;
    if (to > from) ctx.fillRect(from, bbox.top, to - from, bbox.height);
    ctx.textAlign = "center";
    ctx.font = `${11 * ratio}px sans-serif`;
    for (const [, time, , kind] of held.events) {
      const x = at(time);
      if (!MARKED.has(kind) || x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.fillStyle = GRAVE.has(kind) ? colours.bad : colours.quiet;
      for (let y = bbox.top; y < bbox.top + bbox.height; y += 5 * ratio) ctx.fillRect(x, y, ratio, 2 * ratio);
      if (this.id !== "marks") ctx.fillText(SIGNS[kind] ?? "·", x, bbox.top - 2 * ratio);
    }
  }

  // Each line's name at its end, pushed apart where they would overlap.
  names(plot, lines) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, first = plot.series.length - lines.length;
    ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    const [low, high] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
    const ends = lines.map((line, at) => {
      const values = plot.data[first + at];
      let last = high;
      while (last > low && values[last] == null) last--;
      return { line, y: values[last] == null ? NaN : plot.valToPos(values[last], "y", true) };
    }).filter((end) => end.y >= 0).sort((a, b) => a.y - b.y);
    const apart = 13 * ratio;
    ends.forEach((end, at) => { if (at) end.y = Math.max(end.y, ends[at - 1].y + apart); });
    for (let at = ends.length - 1, floor = bbox.top + bbox.height; at >= 0; at--) { ends[at].y = Math.min(ends[at].y, floor); floor = ends[at].y - apart; }
    for (const { line, y } of ends) {
      ctx.fillStyle = line.colour;
      const name = (line.name === held.doc.slow ? "◆ " : "") + line.name;
      ctx.fillText(fitted(ctx, name, plot.width * ratio - bbox.left - bbox.width - 8 * ratio), bbox.left + bbox.width + 6 * ratio, y);
    }
  }
}
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

function swatch({ colour, dash = [], width = 2 }) {
  const line = make("svg:line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: colour, "stroke-width": width, "stroke-dasharray": dash.join(" ") });
  return make("svg:svg", { width: 18, height: 10, "aria-hidden": "true" }, line);
}

function timeRange(low, high) {
  if (view.from != null) return [view.from, view.to];
  const end = held.doc.live ? held.doc.now : held.rows.at(-1)?.t ?? high ?? held.doc.now;
  return [view.span ? end - view.span : held.rows[0]?.t ?? low ?? end - 60, end];
}
// The time that all charts show: the last `span` seconds (0: all), or from one time to another.
function show(span, from = null, to = null) {
  Object.assign(view, { span, from, to });
  for (const button of document.querySelectorAll("[data-span]")) button.setAttribute("aria-pressed", from == null && +button.dataset.span === span);
  render();
}
function hover(time, by) {
  view.hover = time;
  if (by !== timeline) { timeline.hoverTime = time; timeline.wake(); return; }
  for (const { plot, timed } of Object.values(charts)) {
    if (plot && timed()) plot.setCursor({ left: time == null ? -10 : plot.valToPos(time, "x"), top: time == null ? -10 : 10 }, true, false);
  }
}

function column(key, name, style = {}) {
  return { name, values: held.rows.map((row) => row[key] ?? null), colour: look().lines[0], dash: [], ...style };
}
const times = () => held.rows.map((row) => row.t);
const second = () => ({ colour: look().lines[1], dash: [6, 3] });
function timeLines(empty, ...lines) {
  return lines.some((line) => line.values.some((value) => value != null)) ? { x: times(), lines } : empty;
}
// A line a key of the rows' dictionaries, e.g. a server each.
function dictionaries(field, empty, styled) {
  const keys = [...new Set(held.rows.flatMap((row) => Object.keys(row[field] ?? {})))].sort();
  const rows = held.rows.filter((row) => row[field]);
  return keys.length ? { x: rows.map((row) => row.t), lines: keys.map((key, at) => ({ name: key, values: rows.map((row) => row[field][key] ?? null), ...styled(key, at) })) } : empty;
}
const cycled = (key, at) => ({ colour: look().lines[at % 6], dash: DASHES[at % 3], width: 1.8 });

function smoothed(values) {
  const keep = +$("smooth").value;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}
function lossLines() {
  const by = $("loss-x").value;
  let last = -Infinity;
  const rows = held.rows.filter((row) => row.loss && row[by] != null && row[by] >= last && ((last = row[by]), true));
  if (!rows.length) return "No worker reports a loss: call optimizer.report(loss=...) in the training loop.";
  const x = rows.map((row) => row[by]), names = held.doc.workers.map((worker) => worker.name);
  const lineOf = (name) => ({ name, worker: true, values: smoothed(rows.map((row) => row.loss[name] ?? null)), ...styleOf(name) });
  if (names.length <= LINES_MAX) {
    const shown = names.map(lineOf).filter((line) => line.values.some((value) => value != null));
    if (held.chosen) for (const line of shown) if (line.name !== held.chosen) line.colour += "70";
    return { x, lines: shown };
  }
  for (const row of rows) {
    if (row.quantiles) continue;
    const values = Object.values(row.loss).filter((value) => value != null).sort((a, b) => a - b);
    row.quantiles = [0.1, 0.5, 0.9].map((part) => values[Math.round(part * (values.length - 1))] ?? null);
  }
  const quantile = (at) => smoothed(rows.map((row) => row.quantiles[at]));
  const median = { name: "median", values: quantile(1), colour: look().lines[0], dash: [], width: 2.2 };
  const singled = [...new Set([held.doc.slow, held.chosen])].filter((name) => names.includes(name)).map(lineOf);
  return { x, band: [quantile(0), quantile(2)], lines: [median, ...singled] };
}

// The words of events, where there is room for them; grave ones first.
function drawWords(plot) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio, colours = look(), rows = [[], [], [], []];
  ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const inside = held.events.map(([, time, , kind, message, worker]) => ({ x: plot.valToPos(time, "x", true), kind, message, worker }))
    .filter(({ x }) => x >= bbox.left - 1 && x <= bbox.left + bbox.width + 1);
  for (const event of inside.sort((a, b) => MARKED.has(b.kind) - MARKED.has(a.kind) || GRAVE.has(b.kind) - GRAVE.has(a.kind))) {
    const sign = SIGNS[event.kind] ?? "·", words = fitted(ctx, `${sign} ${event.message || event.kind}`, 210 * ratio), room = ctx.measureText(words).width + 10 * ratio;
    const left = Math.min(event.x + 3 * ratio, bbox.left + bbox.width - room);
    const row = rows.findIndex((taken) => taken.every(([from, to]) => left > to || left + room < from));
    ctx.fillStyle = GRAVE.has(event.kind) ? colours.bad : MARKED.has(event.kind) ? colours.text : colours.quiet;
    if (row >= 0) {
      rows[row].push([left, left + room]);
      const ink = ctx.fillStyle, y = bbox.top + (row + 0.6) * 17 * ratio;
      ctx.fillStyle = colours.card;
      ctx.fillRect(left - 2 * ratio, y - 7 * ratio, room - 4 * ratio, 14 * ratio);
      ctx.fillStyle = ink;
      ctx.fillText(words, left, y);
    } else ctx.fillRect(event.x, bbox.top + bbox.height - 6 * ratio, ratio, 6 * ratio);
  }
}

const EMPTY = "Nothing yet: this fills as soon as workers push gradients.";
function makeCharts() {
  const add = (id, options) => { charts[id] = new Chart(id, options); };
  add("loss", { lines: lossLines, floor: false, height: 250, timed: () => $("loss-x").value === "t" });
  add("score", { lines: () => dictionaries("score", "No held-out score yet: run pyps eval beside the workers.", cycled), floor: false, height: 250 });
  add("marks", { lines: () => held.events.length ? { x: times().length ? times() : [held.doc.now], lines: [] } : "No events yet.", height: 108, over: drawWords });
  add("pace", { lines: () => timeLines(EMPTY, column("steps", "steps"), column("updates", "updates", second())) });
  add("waited", { lines: () => timeLines(EMPTY, column("waited", "waited")), format: share });
  add("bytes", { lines: () => timeLines(EMPTY, column("bytes_in", "in"), column("bytes_out", "out", second())), format: bytes });
  add("stale", { lines: () => timeLines(EMPTY, column("staleness", "mean")) });
  add("cpu", { lines: () => dictionaries("cpu", EMPTY, cycled) });
  add("queue", { lines: () => timeLines(EMPTY, column("queue", "waiting")) });
}

// --- what is known now ---

function renderHead(doc) {
  document.title = `${doc.run || "pyps"}: ${doc.sentence}`;
  say($("run"), doc.run || "no run yet");
  say($("state"), doc.live ? doc.state : `${doc.state}, looked at again`);
  say($("clock"), clockText(doc.live ? doc.now : held.rows.at(-1)?.t ?? doc.now));
  if ($("sentence").textContent.replaceAll("◆", "") !== doc.sentence || held.marked !== doc.slow) fill($("sentence"), ...marked(doc.sentence));
  held.marked = doc.slow;
  if ($("warnings").dataset.words !== doc.warnings.join("\n")) fill($("warnings"), ...doc.warnings.map((words) => make("li", {}, words)));
  $("warnings").dataset.words = doc.warnings.join("\n");
  const facts = {
    protocol: doc.warmup ? `${doc.protocol}, warm-up ${doc.warmup}` : doc.protocol, staleness: doc.staleness_policy, "update rule": doc.rule,
    rate: doc.schedule ? `${number(doc.rate)}, ${doc.schedule}` : number(doc.rate), version: number(doc.version), examples: big(doc.examples),
    "workers alive": `${doc.alive} of ${doc.workers.length}`, "steps a second": number(held.rows.at(-1)?.steps), running: doc.began ? secondsText(Math.max(0, doc.now - doc.began)) : "–",
  };
  Object.entries(facts).forEach(([name, value], at) => {
    const cell = $("facts").children[at] ?? $("facts").appendChild(make("div", {}, make("dt", {}, name), make("dd")));
    say(cell.lastChild, value || "–");
  });
}

function renderKey() {
  const { bounds } = timeline, colours = look();
  const square = (inside) => make("svg:svg", { width: 14, height: 14, "aria-hidden": "true" }, ...inside);
  const rect = (colour, set) => make("svg:rect", { x: 0.5, y: 0.5, width: 13, height: 13, fill: colour, stroke: colours.quiet, ...set });
  const path = (d, colour) => make("svg:path", { d, stroke: colour, "stroke-width": 1.5 });
  const names = [...bounds, Infinity].map((bound, at) => at === 0 ? "0" : bound === Infinity ? `${bounds[at - 1] + 1}+` : bounds[at - 1] + 1 >= bound ? `${bound}` : `${bounds[at - 1] + 1}–${bound}`);
  const signs = [[rect("none"), path("M1 13L13 1M1 7L7 1M7 13L13 7", colours.hatched)], [path("M3 3L11 11M11 3L3 11", colours.bad)], [rect("none", { "stroke-dasharray": "2 2" })]];
  fill($("tl-key"), make("li", {}, "staleness"), ...names.map((name, age) => make("li", {}, square([rect(colours.ages[age])]), name)),
    ...["waits", "rejected or dropped", "not ended"].map((name, at) => make("li", {}, square(signs[at]), name)));
}

function renderHistogram({ buckets, mean, max, law, law_words }) {
  const total = buckets.reduce((sum, [, count]) => sum + count, 0), box = $("histogram"), width = box.clientWidth, height = 210, base = 186;
  if (!total) return fill(box, make("p", { class: "empty" }, EMPTY));
  // A few gradients of one that came back late would press all others into the first bar.
  let rest = total;
  const far = buckets.find(([, count]) => (rest -= count) <= 0.005 * total)?.[0] ?? max;
  const top = Math.max(4, far, Math.ceil(law ?? 0) + 1), bin = Math.ceil((top + 1) / 36), bins = new Array(Math.ceil((top + 1) / bin)).fill(0);
  for (const [staleness, count] of buckets) bins[Math.min(bins.length - 1, Math.floor(staleness / bin))] += count / total;
  const most = Math.max(...bins), across = width / bins.length, colours = look(), at = (value) => (value / bin + 0.5) * across;
  const parts = bins.flatMap((part, index) => {
    const tall = part / most * (base - 44), x = index * across;
    const label = across > 34 && part > 0 && make("svg:text", { x: x + across / 2, y: base - tall - 4, "text-anchor": "middle", class: "quiet" }, share(part));
    const last = index === bins.length - 1 && max > top;
    const tick = (last || index % Math.ceil(34 / across) === 0 && index + 34 / across < bins.length) && make("svg:text", { x: x + across / 2, y: base + 15, "text-anchor": "middle", class: "quiet" }, last ? `${index * bin}+` : index * bin);
    const colour = colours.ages[ageOf(index * bin, timeline.bounds)];
    return [make("svg:rect", { x: x + 1, y: base - tall, width: Math.max(1, across - 2), height: tall, fill: colour, stroke: colours.quiet, "stroke-width": 0.5 }), label, tick].filter(Boolean);
  });
  const line = (value, words, y, dash, colour) => {
    const x = at(value), right = x > 0.6 * width;
    return [make("svg:line", { x1: x, x2: x, y1: y + 4, y2: base, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }),
      make("svg:text", { x: right ? x - 5 : x + 5, y: y + 10, "text-anchor": right ? "end" : "start" }, words)];
  };
  if (law != null) parts.push(...line(law, `law: ${number(law)}`, 14, "5 3", colours.accent));
  parts.push(...line(mean, `mean: ${number(mean)}`, 0, "", colours.text), make("svg:line", { x1: 0, x2: width, y1: base, y2: base, stroke: colours.line }));
  const words = `Mean ${number(mean)}, largest ${number(max)}${law == null ? "" : `; for equal workers the law ${law_words} says ${number(law)}`}.`;
  fill(box, make("svg:svg", { width, height, role: "img", "aria-label": words }, ...parts));
  say($("law"), words);
}

function bars(list, items) {
  fill(list, ...items.map(({ name, part, now, worker }) => {
    const bar = make("b");
    bar.style.width = `${100 * Math.min(1, part || 0)}%`;
    const slow = worker && name === held.doc.slow;
    return make("li", { class: now ? "now" : "" }, make("span", { title: name, class: slow ? "slow" : "" }, now ? `${name} (now)` : name), make("i", { "aria-hidden": "true" }, bar), make("span", {}, share(part)));
  }));
}
function renderLost(doc) {
  bars($("policies"), doc.staleness.policies.map(({ name, lost, in_force }) => ({ name, part: lost, now: in_force })));
  const losers = doc.workers.filter((worker) => worker.step_lost != null).sort((a, b) => b.step_lost - a.step_lost);
  bars($("losers"), losers.slice(0, 8).map(({ name, step_lost }) => ({ name, part: step_lost, worker: true })));
  if (losers.length > 8) $("losers").append(make("li", {}, make("span", { class: "quiet" }, `and ${losers.length - 8} workers that lose less`)));
  if (!losers.length) fill($("losers"), make("li", {}, make("span", { class: "quiet" }, "nothing yet")));
}

function renderLinks(doc) {
  const kinds = new Map();
  for (const worker of doc.workers) {
    const sum = kinds.get(worker.transport || "–") ?? [0, 0, 0];
    kinds.set(worker.transport || "–", [sum[0] + 1, sum[1] + (worker.bytes_in ?? 0), sum[2] + (worker.bytes_out ?? 0)]);
  }
  const cells = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, tag === "th" ? { scope: "col" } : {}, text)));
  fill($("links"), make("thead", {}, cells("th", ["transport", "workers", "in a second", "out a second"])),
    make("tbody", {}, ...[...kinds].sort().map(([kind, [count, into, out]]) => cells("td", [kind, String(count), bytes(into), bytes(out)]))));
}

function renderServers(doc) {
  fill($("servers"), ...doc.servers.map((server) => {
    const kinds = Object.entries(server.memory ?? {}), total = kinds.reduce((sum, [, size]) => sum + size, 0), colours = [...look().lines];
    let x = 0;
    const parts = kinds.map(([, size], at) => {
      const part = make("svg:rect", { x: `${100 * x / total}%`, y: 0, width: `${100 * size / total}%`, height: 22, fill: colours[at % 6], stroke: look().card, "stroke-width": 2 });
      x += size;
      return part;
    });
    const fact = (name, value, colour) => make("div", {}, make("dt", {}, ...(colour ? [swatch({ colour, width: 8 }), " "] : []), name), make("dd", {}, value));
    const facts = [["version", number(server.version)], ["processor", `${number(server.cpu)} cores`], ["waiting", number(server.queue)], ["checkpoint", server.checkpoint], ["standby", server.standby]];
    return make("div", { class: server.error ? "server lost" : "server" },
      make("h3", {}, `${server.address} `, make("span", { class: server.error ? "bad" : "quiet" }, server.error ? `✕ silent for ${secondsText(server.silent_seconds)}: ${server.error}` : server.state)),
      ...(total ? [make("svg:svg", { role: "img", "aria-label": `${bytes(total)} of memory` }, ...parts)] : []),
      make("dl", {}, ...(total ? [fact("memory", bytes(total))] : []), ...kinds.map(([kind, size], at) => fact(kind, bytes(size), colours[at % 6]))),
      make("dl", {}, ...facts.filter(([, value]) => value && value !== "–").map(([name, value]) => fact(name, value))));
  }));
}

function renderEvents() {
  if (held.listed === held.events.at(-1)?.[0]) return;
  const grave = held.events.filter((event) => event[0] > (held.listed ?? Infinity) && GRAVE.has(event[3]));
  held.listed = held.events.at(-1)?.[0];
  if (grave.length) say($("grave"), grave.map((event) => event[4]).join(". "));
  fill($("events"), ...held.events.slice(-EVENTS_SHOWN).reverse().map(([, time, server, kind, message, worker]) => make("li", { title: server },
    make("span", { class: "quiet" }, clockText(time)), make("span", { class: GRAVE.has(kind) ? "bad" : "", "aria-hidden": "true" }, SIGNS[kind] ?? "·"),
    make("span", { class: GRAVE.has(kind) ? "bad" : "" }, kind), make("span", {}, ...marked(message || worker)))));
}

// --- the workers' table: cells stay and only change their text, so that focus does too ---

const COLUMNS = [
  ["worker", "name"], ["state", "state"], ["steps", "steps", number], ["steps/s", "pace", number], ["times slower", "slower", number], ["loss", "loss", number],
  ["staleness", "staleness_mean", number], ["largest", "staleness_max", number], ["step lost", "step_lost", share], ["waited", "waited", share], ["waits for", "waits_for", namesText],
  ["silent", "silent_seconds", secondsText], ["rejected", "rejected", number], ["dropped", "dropped", number], ["in/s", "bytes_in", bytes], ["out/s", "bytes_out", bytes],
  ["transport", "transport"], ["codecs", "codecs"], ["host", "host"], ["device", "device"], ["says", "message"],
];
const TEXTS = new Set(["name", "state", "waits_for", "transport", "codecs", "host", "device", "message"]);
const table = { rows: new Map(), by: "name", sign: 1, names: "" };
const natural = new Intl.Collator("en", { numeric: true }).compare;

function renderWorkers({ workers, slow }) {
  if (!$("workers").tHead) {
    const heads = COLUMNS.map(([words, key]) => make("th", { scope: "col", class: TEXTS.has(key) ? "text" : "" }, make("button", { type: "button", onclick: () => sortBy(key) }, words)));
    $("workers").append(make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
  }
  COLUMNS.forEach(([, key], at) => $("workers").tHead.rows[0].cells[at].setAttribute("aria-sort", key !== table.by ? "none" : table.sign > 0 ? "ascending" : "descending"));
  $("workers-empty").hidden = workers.length > 0;
  say($("workers-empty"), "No worker has joined. Start one with PYPS_SERVERS set to the servers’ addresses, or try pyps demo.");
  const value = (worker) => worker[table.by] ?? -Infinity;
  const sorted = [...workers].sort((a, b) => table.sign * (TEXTS.has(table.by) ? natural(value(a), value(b)) : value(a) - value(b)) || natural(a.name, b.name));
  for (const worker of sorted) {
    if (!table.rows.has(worker.name)) {
      const cells = COLUMNS.map(([, key]) => make("td", { class: TEXTS.has(key) ? "text" : "" }));
      cells[0].append(make("button", { type: "button", onclick: () => choose(worker.name) }));
      table.rows.set(worker.name, make("tr", {}, ...cells));
    }
    const row = table.rows.get(worker.name);
    row.className = `${worker.name === held.chosen ? "chosen" : ""} ${worker.state === "alive" ? "" : "dead"}`;
    COLUMNS.forEach(([, key, format = String], at) => say(at ? row.cells[at] : row.cells[0].firstChild, worker[key] == null ? "–" : format(worker[key])));
    row.cells[0].firstChild.className = worker.name === slow ? "slow" : "";
    row.cells[0].firstChild.setAttribute("aria-pressed", worker.name === held.chosen);
    row.cells[1].className = worker.state === "alive" ? "text" : "text bad";
  }
  const names = sorted.map((worker) => worker.name).join("\n");
  if (names === table.names) return;
  table.names = names;
  fill($("workers").tBodies[0], ...sorted.map((worker) => table.rows.get(worker.name)));
  const known = new Set(workers.map((worker) => worker.name));
  for (const name of table.rows.keys()) if (!known.has(name)) table.rows.delete(name);
  fill($("chosen"), make("option", { value: "" }, "all"), ...[...known].sort(natural).map((name) => make("option", { value: name, selected: name === held.chosen }, name)));
}
function sortBy(key) {
  table.sign = key === table.by ? -table.sign : TEXTS.has(key) ? 1 : -1;
  table.by = key;
  renderWorkers(held.doc);
}
function choose(name) {
  held.chosen = timeline.chosen = held.chosen === name ? "" : name;
  $("chosen").value = held.chosen;
  timeline.redraw();
  render();
}

// --- what if ---

function renderWhatIf() {
  const reason = $("data") ? "A saved page changes nothing." : !held.doc.live ? "This run is only looked at again: nothing can be changed."
    : held.token ? "" : "Read-only: a change needs the operator’s token.";
  $("whatif-reason").hidden = !reason;
  say($("whatif-reason").firstElementChild, reason);
  $("give-token").hidden = !!$("data") || !held.doc.live;
  for (const field of document.querySelectorAll(".forms input, .forms button")) field.disabled = !!reason;
  for (const form of document.querySelectorAll(".forms form")) {
    if (!form.value.value && document.activeElement !== form.value) form.value.placeholder = form.dataset.field === "protocol" ? held.doc.protocol : held.doc.rate;
  }
}
async function configure(change) {
  try {
    const reply = await fetch("configure", { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${held.token}` }, body: JSON.stringify(change) });
    const answer = await reply.json().catch(() => ({ error: `the dashboard answers ${reply.status}` }));
    return reply.ok ? answer : { error: answer.error ?? `the dashboard answers ${reply.status}` };
  } catch { return { error: "the dashboard does not answer" }; }
}
function ask(title, lines, button, token) {
  say($("confirm-title"), title);
  fill($("confirm-lines"), ...lines.map((line) => make("li", {}, line)));
  $("token-label").hidden = !token;
  say($("confirm-yes"), button);
  $("confirm").returnValue = "";
  $("confirm").showModal();
  return new Promise((done) => $("confirm").addEventListener("close", () => done($("confirm").returnValue === "yes"), { once: true }));
}
async function giveToken() {
  if (await ask(held.closed ? "A token, to see this run" : "The operator’s token", ["It stays in this page until it is closed."], "Use it", true)) held.token = $("token").value.trim();
  if (held.closed) held.reader = held.token;
  $("token").value = "";
  if (held.doc) renderWhatIf();
}
async function tryChange(event) {
  event.preventDefault();
  const { field } = event.target.dataset, words = event.target.value.value.trim(), change = { [field]: field === "protocol" ? words : +words };
  say($("whatif-said"), "Asking the servers …");
  const look = await configure({ ...change, validate_only: true });
  if (look.error) return say($("whatif-said"), `Not possible: ${look.error}`);
  say($("whatif-said"), "");
  if (!await ask(`Change the ${field === "protocol" ? "protocol" : "rate"} of all servers to ${words}?`, look.lines, "Change it", false)) return say($("whatif-said"), "Nothing was changed.");
  const made = await configure(change);
  say($("whatif-said"), made.error ? `Not changed: ${made.error}` : `Changed.\n${made.lines.join("\n")}`);
}

// --- the course of things ---

function take(doc) {
  if (doc.whole) {
    Object.assign(held, { rows: [], events: [], listed: undefined });
    timeline.clear();
  }
  held.rows.push(...doc.rows);
  held.events = [...held.events, ...doc.events].slice(-2000);
  timeline.add(doc.steps, doc.waits);
  Object.assign(held, { doc, id: doc.id, number: held.rows.length > ROWS_MAX ? 0 : doc.number });
  timeline.set({ now: doc.now, live: doc.live, workers: doc.workers, slow: doc.slow, mean: doc.staleness.mean });
  $("tl-empty").hidden = timeline.lanes.size > 0 || doc.workers.length > 0;
  say($("tl-empty"), "No worker has pushed a gradient. Start one with PYPS_SERVERS set to the servers’ addresses, or try pyps demo.");
  render();
}

// One piece of work a frame, so that the timeline's own frames keep their pace.
let waiting = [];
function render() {
  const idle = waiting.length === 0, doc = held.doc;
  if (!doc) return;
  waiting = [() => renderHead(doc), ...Object.values(charts).filter((chart) => chart.shown).map((chart) => () => chart.draw()), () => renderEvents(), renderKey,
    () => renderHistogram(doc.staleness), () => renderLost(doc), () => renderLinks(doc), () => renderServers(doc), () => renderWorkers(doc), renderWhatIf];
  if (idle) setTimeout(work);
}
function work() {
  waiting.shift()?.();
  if (waiting.length) document.hidden ? setTimeout(work) : requestAnimationFrame(work);
}

async function poll() {
  let doc = null, refused = "";
  try {
    const headers = held.reader ? { Authorization: `Bearer ${held.reader}` } : {};
    const reply = await fetch(`data?after=${held.number}&id=${held.id}`, { cache: "no-store", headers, signal: AbortSignal.timeout(10000) });
    const answer = await reply.json();
    if (reply.ok) doc = answer; else refused = answer.error;
    held.closed = reply.status === 401;
  } catch { /* said below */ }
  held.failing = doc ? 0 : held.failing || Date.now();
  $("broken").hidden = !held.failing;
  document.body.classList.toggle("unheard", !!held.failing);
  if (refused) say($("broken"), `The dashboard says: ${refused}`);
  else if (held.failing) say($("broken"), `The dashboard does not answer since ${clockText(held.failing / 1000)}; below is what was known then. It is asked again and again.`);
  if (doc) take(doc);
  if (held.closed) await giveToken();
  setTimeout(poll, 1000);
}

const timeline = new Timeline($("tl"), {
  look, choose, hover: (time) => { if (time !== view.hover) hover(time, timeline); },
  changed() {
    $("tl-live").setAttribute("aria-pressed", timeline.following());
    $("tl-pause").setAttribute("aria-pressed", !timeline.following());
  },
  tell(words, x, y) {
    $("tip").hidden = !words;
    if (!words) return;
    say($("tip"), words);
    $("tip").style.left = `${Math.min(x + 14, innerWidth - $("tip").offsetWidth - 8)}px`;
    $("tip").style.top = `${y + 18 + $("tip").offsetHeight > innerHeight ? y - $("tip").offsetHeight - 10 : y + 18}px`;
  },
});

function start() {
  const remembered = (() => { try { return localStorage.getItem("pyps-theme"); } catch { return null; } })();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  makeCharts();
  setTheme(remembered ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("pyps-theme", document.documentElement.dataset.theme); } catch { /* a page from a file remembers nothing */ }
  });
  for (const [id, act] of Object.entries({ live: () => timeline.follow(), pause: () => timeline.pause(), out: () => timeline.zoom(1.5), in: () => timeline.zoom(1 / 1.5) })) $(`tl-${id}`).addEventListener("click", act);
  for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => show(+button.dataset.span));
  for (const id of ["smooth", "loss-x"]) $(id).addEventListener("input", () => charts.loss.draw());
  $("chosen").addEventListener("change", () => { held.chosen = ""; choose($("chosen").value); });
  for (const form of document.querySelectorAll(".forms form")) form.addEventListener("submit", tryChange);
  $("give-token").addEventListener("click", giveToken);
  addEventListener("resize", () => render());
  held.token = held.reader = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  if (held.token) history.replaceState(null, "", location.pathname + location.search);
  show(0);
  // For tests: what is held and what each chart draws.
  window.pyps = { held, charts, timeline, view };
  if ($("data")) take(JSON.parse($("data").textContent)); else poll();
}
start();
