"use strict";
// The charts over time, by uPlot: one cursor and one span for all, the signs of events in each.

const LINES_MAX = 12; // workers with a line each; beyond, the median and a band
const DASHES = [[], [8, 3], [2, 3], [8, 3, 2, 3], [14, 4]];
const charts = {};
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

class Chart {
  // lines() gives {x, lines: [{name, values, colour, dash, width}], band: [low, high] or none}, or words where there is nothing yet.
  constructor(id, lines, { format = number, floor = true, height = 180, timed = () => true, over = null } = {}) {
    Object.assign(this, { id, lines, format, floor, height, timed, over, box: $(id) });
    addPart(this.box, () => this.draw());
    new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height })).observe(this.box);
  }

  forget() { this.plot?.destroy(); this.plot = this.made = null; }

  draw() {
    const drawn = this.lines();
    if (typeof drawn === "string") {
      this.forget();
      return fill(this.box, make("p", { class: "empty" }, drawn));
    }
    const data = [drawn.x, ...(drawn.band ?? []), ...drawn.lines.map((line) => line.values)];
    const made = JSON.stringify([this.timed(), !!drawn.band, drawn.lines.map((line) => ({ ...line, values: 0 }))]);
    if (this.made !== made) this.create(drawn, data); else this.plot.setData(data);
    this.made = made;
    this.read();
  }

  create({ lines, band }, data) {
    this.forget();
    const colours = look(), timed = this.timed(), grid = { stroke: colours.grid, width: 1 };
    const axis = { stroke: colours.quiet, font: colours.small, ticks: { show: false }, grid };
    const of = (format) => (_, ticks) => ticks.map((tick) => format(tick));
    // Of small ticks as many digits as tell one from the next.
    const exact = (tick) => this.format === number && Math.abs(tick) < 100 ? +tick.toPrecision(6) : this.format(tick);
    const edge = { stroke: "transparent", spanGaps: true, points: { show: false } };
    const points = { show: (plot) => plot.data[0].length < 60 };
    const series = lines.map(({ colour, dash, width }) => ({ stroke: colour, dash, width, spanGaps: true, points }));
    this.values = lines.map(() => make("b"));
    const chooser = (name) => make("button", { type: "button", onclick: () => choose(name) }, nameNode(name));
    const key = lines.map(({ name, worker, colour, dash, width }, at) => make("li", {}, swatch(colour, dash, width),
      worker ? chooser(name) : name, this.values[at]));
    const place = make("div");
    fill(this.box, ...(lines.length ? [make("ul", { class: "key" }, ...key)] : []), place);
    this.plot = new uPlot({
      width: this.box.clientWidth, height: this.height, padding: [14, 8, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => timed ? timeRange() : [low, high > low ? high : low + 1] },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      series: [{}, ...(band ? [edge, edge] : []), ...series],
      bands: band ? [{ series: [2, 1], fill: `${colours.bar}40` }] : [],
      axes: [
        { ...axis, size: 26, space: 78, values: of(timed ? clockText : big), incrs: timed ? TIME_STEPS : undefined },
        { ...axis, size: 58, space: 34, show: !!lines.length, values: of(exact), incrs: this.format === bytes ? BYTE_STEPS : undefined },
      ],
      legend: { show: false },
      cursor: {
        y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { show(0); return null; } },
        sync: timed ? { key: "time", scales: ["x", null] } : undefined,
      },
      hooks: {
        drawClear: [(plot) => { if (timed) this.drawMarks(plot); }],
        draw: [(plot) => this.over?.(plot)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4 && timed) show(0, plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          if (width) plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        setCursor: [() => this.read()],
      },
    }, data, place);
  }

  range(low, high) {
    if (low == null || (low === 0 && high === 0)) return [0, 1];
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return [this.floor ? Math.min(0, low) : low - margin, high + margin];
  }

  // The values at the cursor, else the newest.
  read() {
    const { data, cursor } = this.plot ?? {};
    this.values?.forEach((node, at) => {
      const values = data[data.length - this.values.length + at];
      let index = cursor.left >= 0 && cursor.idx != null ? cursor.idx : values.length - 1;
      while (index > 0 && values[index] == null) index--;
      say(node, this.format(values[index]));
    });
  }

  // The time that the timeline shows, and a line an event that matters.
  drawMarks(plot) {
    const { ctx, bbox: { left, top, width, height } } = plot, ratio = devicePixelRatio, colours = look();
    const at = (time) => plot.valToPos(time, "x", true);
    const from = Math.max(left, at(timeline.viewEnd - timeline.span)), to = Math.min(left + width, at(timeline.viewEnd));
    Object.assign(ctx, { fillStyle: `${colours.accent}16`, textAlign: "center", font: colours.sized });
    if (to > from) ctx.fillRect(from, top, to - from, height);
    this.marks = [];
    for (const [, time, , kind] of held.events) {
      const x = Math.round(at(time));
      if (!MARKED.has(kind) || x < left || x > left + width) continue;
      ctx.fillStyle = GRAVE.has(kind) ? colours.bad : colours.quiet;
      for (let y = top; y < top + height; y += 5 * ratio) ctx.fillRect(x, y, ratio, 2 * ratio);
      this.marks.push(kind);
      if (!this.over) ctx.fillText(signOf(kind), x, top - 3 * ratio);
    }
  }
}

function timeRange() {
  const { doc, rows } = held, end = doc.live ? doc.now : Math.max(rows.at(-1)?.t ?? 0, timeline.newest());
  if (view.from != null) return [view.from, view.to];
  return [view.span ? end - view.span : Math.min(rows[0]?.t ?? end, held.events[0]?.[1] ?? end, end - 5), end];
}
// The time that all charts show: the last `span` seconds (0: all), or from one time to another.
function show(span, from = null, to = null) {
  Object.assign(view, { span, from, to });
  for (const button of document.querySelectorAll("[data-span]")) button.setAttribute("aria-pressed", from == null && +button.dataset.span === span);
  render();
}
// A value that can be drawn: names are the run's, and may be those of JavaScript's own.
function own(values, key) { return Object.hasOwn(values, key) && Math.abs(values[key]) < 1e100 ? values[key] : null; }
function column(key, name, at = 0) { return { name, values: held.rows.map((row) => own(row, key)), ...styleOf(at) }; }
function columns(...lines) {
  return lines.some((line) => line.values.some((value) => value != null)) ? { x: held.rows.map((row) => row.t), lines } : nothing();
}
// The rows that have the field, in the order of time, examples or versions.
function rowsWith(field, by = "t") {
  const rows = [];
  for (const row of held.rows) if (row[field] && row[by] != null && !(row[by] < rows.at(-1)?.[by])) rows.push(row);
  return rows;
}
// A line a key of the rows' dictionaries, e.g. a server each.
function dictionaries(field, empty, by = "t") {
  const rows = rowsWith(field, by), keys = [...new Set(rows.flatMap((row) => Object.keys(row[field])))].sort(natural);
  const lines = keys.map((key, at) => ({ name: key, values: rows.map((row) => own(row[field], key)), ...styleOf(at) }));
  return keys.length ? { x: rows.map((row) => row[by]), lines } : empty;
}
function smoothed(values) {
  const keep = +$("smooth").value;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + 1 - keep;
    return mean / weight;
  });
}
function quantiles(row) {
  const values = Object.keys(row.loss).map((name) => own(row.loss, name)).filter((value) => value != null).sort((a, b) => a - b);
  return [0.1, 0.5, 0.9].map((part) => values[Math.round(part * (values.length - 1))] ?? null);
}
function lossLines() {
  const by = $("over").value, rows = rowsWith("loss", by);
  if (!rows.length) return "No worker reports a loss: call optimizer.report(loss=...) in the training loop.";
  const x = rows.map((row) => row[by]), names = held.doc.workers.map((worker) => worker.name), few = names.length <= LINES_MAX;
  const singled = few ? names : [...new Set([held.doc.slow, held.chosen])].filter((name) => names.includes(name));
  const lines = singled.map((name) => ({ name, worker: true, values: smoothed(rows.map((row) => own(row.loss, name))), ...styleOfWorker(name) }))
    .filter((line) => line.values.some((value) => value != null));
  if (few) return { x, lines: lines.map((line) => held.chosen && line.name !== held.chosen ? { ...line, colour: `${line.colour}70` } : line) };
  for (const row of rows) row.quantiles ??= quantiles(row);
  const [low, median, high] = [0, 1, 2].map((at) => smoothed(rows.map((row) => row.quantiles[at])));
  return { x, band: [low, high], lines: [{ name: "median", values: median, ...styleOf(0), width: 2.2 }, ...lines] };
}

// The words of events, where there is room for them; grave ones first.
function drawWords({ ctx, bbox: { left, top, width, height }, valToPos }) {
  const ratio = devicePixelRatio, colours = look(), rows = [[], [], [], []], rank = (kind) => GRAVE.has(kind) ? 2 : MARKED.has(kind) ? 1 : 0;
  Object.assign(ctx, { font: colours.sized, textAlign: "left", textBaseline: "middle" });
  for (const event of [...held.events].sort((a, b) => rank(b[3]) - rank(a[3]))) {
    const [, time, , kind] = event;
    const x = valToPos(time, "x", true);
    if (x < left - 1 || x > left + width + 1) continue;
    const words = fitted(ctx, `${signOf(kind)} ${wordsOf(event)}`, 210 * ratio), room = ctx.measureText(words).width + 10 * ratio;
    const from = Math.min(x + 3 * ratio, left + width - room), row = rows.findIndex((taken) => taken.every(([a, b]) => from > b || from + room < a));
    const y = top + (row + 0.6) * 17 * ratio, colour = [colours.quiet, colours.text, colours.bad][rank(kind)];
    ctx.fillStyle = row < 0 ? colour : colours.card;
    if (row < 0) { ctx.fillRect(x, top + height - 6 * ratio, ratio, 6 * ratio); continue; }
    rows[row].push([from, from + room]);
    ctx.fillRect(from - 2 * ratio, y - 7 * ratio, room - 4 * ratio, 14 * ratio);
    ctx.fillStyle = colour;
    ctx.fillText(words, from, y);
  }
}

function makeCharts() {
  const add = (id, lines, options) => { charts[id] = new Chart(id, lines, options); };
  const learning = { floor: false, height: 250, timed: () => $("over").value === "t" };
  const unscored = "No held-out score: pyps dashboard draws one with --eval and a script that scores the model.";
  add("loss", lossLines, learning);
  add("score", () => dictionaries("score", unscored, $("over").value), learning);
  const times = () => held.rows.length ? held.rows.map((row) => row.t) : timeRange();
  add("marks", () => held.events.length ? { x: times(), lines: [] } : "No events yet.", { height: 116, over: drawWords });
  add("pace", () => columns(column("steps", "steps"), column("updates", "updates", 1)));
  add("waited", () => columns(column("waited", "waited")), { format: share });
  add("stale", () => columns(column("staleness", "mean")));
  add("bytes", () => columns(column("bytes_in", "in"), column("bytes_out", "out", 1)), { format: bytes });
  add("cpu", () => dictionaries("cpu", nothing()));
  add("queue", () => columns(column("queue", "waiting")));
}
