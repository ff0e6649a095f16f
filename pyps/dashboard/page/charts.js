"use strict";
// The charts, by uPlot: those over time have one cursor, one span, and the same signs of events.

const charts = {};
const LINES_MAX = 12; // workers with a line each; beyond, the median and the slow one
const DASHES = [[], [8, 3], [2, 3], [8, 3, 2, 3], [14, 4]];
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const WHOLE = Array.from({ length: 46 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

class Chart {
  // lines() gives {x, lines: [{name, values, raw, colour, dash, width}]}; without lines `empty` is said.
  constructor(id, lines, options) {
    Object.assign(this, { lines, format: number, height: 180, floor: true, by: () => "t", box: $(id) }, options);
    parts.push(() => this.draw());
    const resize = () => this.plot?.setSize({ width: this.box.clientWidth, height: this.height });
    new ResizeObserver(resize).observe(this.box);
  }

  draw() {
    const drawn = this.drawn = this.lines();
    if (!drawn.lines.length) {
      this.plot?.destroy();
      this.plot = this.made = null;
      const words = held.doc.live ? "Nothing yet: this fills when workers push gradients." : "Not in an update log.";
      return this.box.replaceChildren(make("p", { class: "empty" }, this.empty ?? words));
    }
    const made = JSON.stringify([this.by(), drawn.lines.map((line) => ({ ...line, values: 0, raw: 0 }))]);
    const data = [drawn.x, ...drawn.lines.map((line) => line.values)];
    if (this.made !== made) this.create(drawn.lines, data); else this.plot.setData(data);
    this.made = made;
    this.read();
  }

  create(lines, data) {
    this.plot?.destroy();
    const { quiet, grid, small: font } = look(), timed = this.by() === "t", place = make("div");
    const axis = { stroke: quiet, font, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const of = (format) => (_, ticks) => ticks.map((tick) => format(tick));
    const points = { show: (plot) => plot.data[0].length < 60 };
    const series = lines.map(({ colour, dash, width }) => ({ stroke: colour, dash, width, spanGaps: true, points }));
    if (this.bars) Object.assign(series[0], { paths: this.bars, points: { show: false } });
    this.values = lines.map(() => make("b"));
    const key = lines.map((line, at) => make("li", {}, swatch(line), nameNode(line.name), this.values[at]));
    this.box.replaceChildren(this.bars ? "" : make("ul", { class: "key" }, ...key), place);
    this.plot = new uPlot({
      width: this.box.clientWidth, height: this.height, padding: [14, 26, 0, 0], series: [{}, ...series],
      scales: {
        x: { time: false, range: (_, low, high) => this.drawn.range ?? (timed ? timeRange() : [low, high + 1]) },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, size: 26, space: 78, values: of(timed ? clockText : number), incrs: timed ? TIME_STEPS : WHOLE },
        { ...axis, size: 58, space: 34, values: of(this.format), incrs: this.format === bytes && BYTE_STEPS },
      ],
      legend: { show: false },
      cursor: {
        y: false, points: { size: 7 }, drag: { x: timed, y: false, setScale: false },
        bind: { dblclick: () => () => { $("span").value = 0; render(); } },
        sync: timed ? { key: "time", scales: ["x", null] } : undefined,
      },
      hooks: {
        drawClear: [(plot) => { if (timed) this.drawMarks(plot); }],
        draw: [(plot) => this.over?.(plot)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (!width) return;
          held.view = [left, left + width].map((x) => plot.posToVal(x, "x"));
          $("span").value = "";
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          render();
        }],
        setCursor: [() => this.read()],
      },
    }, data, place);
  }

  range(low, high) {
    if (low == null || (low === 0 && high === 0)) return [0, 1];
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    if (this.bars) return [0, 1.25 * high];
    return [this.floor ? Math.min(0, low) : low - margin, high + margin];
  }

  // The values at the cursor, else the newest.
  read() {
    const { data, cursor } = this.plot ?? {};
    this.values?.forEach((node, at) => {
      const values = this.drawn.lines[at].raw ?? data[at + 1];
      let index = cursor.left >= 0 && cursor.idx != null ? cursor.idx : values.length - 1;
      while (index > 0 && values[index] == null) index--;
      say(node, this.format(values[index]));
    });
  }

  // The sign of each event, and a line if it changes the run.
  drawMarks(plot) {
    const { ctx, bbox: { left, top, width, height } } = plot, ratio = devicePixelRatio, colours = look();
    Object.assign(ctx, { textAlign: "center", textBaseline: "middle", font: colours.sized });
    this.marks = [];
    for (const [, time, , kind, message] of held.events) {
      const x = Math.round(plot.valToPos(time, "x", true)), sign = signOf(kind, message);
      if (x < left || x > left + width) continue;
      ctx.fillStyle = isGrave(sign) ? colours.bad : colours.text;
      for (let y = top; y < top + height && !SMALL.includes(sign); y += 5 * ratio) ctx.fillRect(x, y, ratio, 2 * ratio);
      ctx.fillText(sign, x, top - 6 * ratio);
      this.marks.push(kind);
    }
  }
}

// The time that all charts show.
function timeRange() {
  const { doc, rows, events } = held, end = doc.live ? doc.now : Math.max(rows.at(-1)?.t ?? 0, timeline.newest());
  const span = $("span").value, first = Math.min(rows[0]?.t ?? events[0]?.[1] ?? end, end - 5);
  return span === "" ? held.view : [+span ? end - span : first, end];
}

// A value that can be drawn: names are the run's, and may be those of JavaScript's own.
function own(values, key) { return Object.hasOwn(values, key) && Math.abs(values[key]) < 1e100 ? values[key] : null; }
// A line a name that has values.
function linesOf(names, valueOf, rows = held.rows, by = "t") {
  const lines = names.map((name, at) => ({ name, values: rows.map((row) => valueOf(row, name)), ...styleOf(at) }));
  return { x: rows.map((row) => row[by]), lines: lines.filter((line) => line.values.some((value) => value != null)) };
}
function fields(fieldOf) { return linesOf(Object.keys(fieldOf), (row, name) => own(row, fieldOf[name])); }
// The rows that have the field, in the order of time, examples or versions.
function rowsWith(field, by) {
  return held.rows.filter((row) => row[field] && row[by] != null).sort((a, b) => a[by] - b[by]);
}
// A line a key of the rows' dictionaries, e.g. a server each.
function dictionaries(field, by = "t") {
  const rows = rowsWith(field, by), keys = new Set(rows.flatMap((row) => Object.keys(row[field])));
  return linesOf([...keys].sort(), (row, key) => own(row[field], key), rows, by);
}
function smoothed(values) {
  const keep = +$("smooth").value;
  let mean = null;
  return values.map((value) => value == null ? null : mean = keep * (mean ?? value) + (1 - keep) * value);
}
function medianOf(losses) {
  const values = Object.keys(losses).map((name) => own(losses, name)).filter((value) => value != null);
  return values.sort((a, b) => a - b)[values.length >> 1] ?? null;
}
function losses() {
  const by = $("over").value, { workers, slow } = held.doc, few = workers.length <= LINES_MAX;
  const names = few ? workers.map((worker) => worker.name) : ["median", slow];
  const valueOf = (row, name) => few || name === slow ? own(row.loss, name) : row.median ??= medianOf(row.loss);
  const drawn = linesOf(names, valueOf, rowsWith("loss", by), by);
  for (const line of drawn.lines) {
    Object.assign(line, { raw: line.values, values: smoothed(line.values) });
    if (line.name === slow) Object.assign(line, { colour: look().slow, dash: [], width: 2.6 });
  }
  return drawn;
}

// The share of gradients by staleness. A few of one that came back late would press all others into the first bar.
function histogram() {
  const { buckets, mean, max, law, law_words } = held.doc.staleness;
  const total = buckets.reduce((sum, [, count]) => sum + count, 0), { ages, quiet } = look();
  if (!total) return { lines: [] };
  let rest = total;
  const far = buckets.find(([, count]) => (rest -= count) <= 0.005 * total)[0];
  const top = Math.max(4, far, Math.ceil(law ?? 0) + 1), bin = Math.ceil((top + 1) / 36);
  const values = new Array(Math.ceil((top + 1) / bin)).fill(0), x = values.map((_, at) => (at + 0.5) * bin - 0.5);
  for (const [staleness, count] of buckets) values[Math.floor(Math.min(staleness, top) / bin)] += count / total;
  const lawWords = law == null ? "" : `; for equal workers the law ${law_words} says ${number(law)}`;
  const farWords = max > top ? `, all in the last bar from ${(values.length - 1) * bin} on` : "";
  say($("law"), `Mean ${number(mean)}, largest ${number(max)}${farWords}${lawWords}.`);
  const fills = x.map((middle) => ages[ageOf(Math.ceil(middle - bin / 2), timeline.bounds)]);
  const lines = [{ name: "share", values, colour: quiet, dash: [], width: 0.5 }];
  return { x, fills, strokes: x.map(() => quiet), range: [-0.5, x.at(-1) + bin / 2], lines };
}
// Lines at mean and law, with their words.
function drawLaw(plot) {
  const { ctx, bbox: { left, top, height } } = plot, { staleness: { mean, law } } = held.doc, ratio = devicePixelRatio;
  Object.assign(ctx, { font: look().sized, textBaseline: "middle" });
  for (const [words, value, colour, row] of [["mean", mean, look().text, 7], ["law", law, look().accent, 21]]) {
    if (value == null) continue;
    const x = plot.valToPos(value, "x", true), y = top + row * ratio;
    const right = value <= Math.min(mean, law ?? mean) && x > left + 70 * ratio;
    Object.assign(ctx, { textAlign: right ? "right" : "left", fillStyle: colour });
    ctx.fillRect(x - ratio, y, 2 * ratio, top + height - y);
    ctx.fillText(`${words}: ${number(value)}`, x + (right ? -6 : 6) * ratio, y);
  }
}

function makeCharts() {
  const learning = { floor: false, height: 250, by: () => $("over").value };
  const unscored = "No held-out score: pyps dashboard draws one with --eval and a script that scores the model.";
  const lossless = "No worker reports a loss: call optimizer.report(loss=...) in the training loop.";
  const of = (key) => ({ unit: 3, values: () => charts.histogram.drawn[key] });
  const bars = uPlot.paths.bars({ size: [0.94], disp: { fill: of("fills"), stroke: of("strokes") } });
  for (const [id, lines, options] of [
    ["loss", losses, { ...learning, empty: lossless }],
    ["score", () => dictionaries("score", $("over").value), { ...learning, empty: unscored }],
    ["histogram", histogram, { format: share, height: 206, by: () => "staleness", over: drawLaw, bars }],
    ["pace", () => fields({ steps: "steps", updates: "updates" })],
    ["waited", () => fields({ waited: "waited" }), { format: share }],
    ["stale", () => fields({ mean: "staleness" })],
    ["bytes", () => fields({ in: "bytes_in", out: "bytes_out" }), { format: bytes }],
    ["cpu", () => dictionaries("cpu")],
    ["queue", () => fields({ waiting: "queue" })],
  ]) charts[id] = new Chart(id, lines, options);
}
