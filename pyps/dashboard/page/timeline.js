"use strict";
// The picture of who computes, who waits for whom, and how old each gradient was: a lane a worker, on a canvas.
// What stands still is drawn once a change of data onto a bitmap, which each frame only shifts.

const AGES = 7; // classes of staleness, each with a colour
const KEPT_SECONDS = 900;
const KEPT_STEPS = 50000;
const AHEAD_SECONDS = 3; // drawn beyond the right edge, for the frames until the next data
const UPDATES = 26, AXIS = 22; // heights below the lanes

// The largest staleness of each class but the last: 0, 1, 2, 4, 8, 16; more where many workers make gradients older.
function ageBounds(mean) {
  let top = 16;
  while (top < 1.5 * mean) top *= 2;
  return [0, top / 16, top / 8, top / 4, top / 2, top];
}

function ageOf(staleness, bounds) {
  const found = bounds.findIndex((bound) => staleness <= bound);
  return found < 0 ? AGES - 1 : found;
}

// The index of the first item that ends at or after the time.
function since(items, time) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].ended < time) low = middle + 1; else high = middle;
  }
  return low;
}

function fitted(context, words, width) {
  const fits = (length) => context.measureText(words.slice(0, length)).width <= width;
  // Of a long one only what may be seen is measured.
  let low = 1, high = Math.min(words.length, Math.ceil(width / 2));
  if (words.length <= high && fits(high)) return words;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (fits(middle)) low = middle; else high = middle - 1;
  }
  return `${words.slice(0, Math.max(1, low - 1))}…`;
}

class Timeline {
  // hooks: look() gives colours, tell(words or null, x, y), choose(worker), changed() when it follows or stops
  constructor(box, hooks) {
    Object.assign(this, { box, hooks, lanes: new Map(), updates: [], workers: [], names: [], slow: "", chosen: "" });
    Object.assign(this, { span: 30, spanKnown: false, end: null, now: 0, heard: 0, live: true, shown: true, painted: [] });
    Object.assign(this, { pointer: null, pressed: null, over: [], bounds: ageBounds(0), nameWidth: 90 });
    const add = (tag) => box.appendChild(document.createElement(tag));
    [this.canvas, this.spacer, this.bitmap] = [add("canvas"), add("div"), document.createElement("canvas")];
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new IntersectionObserver(([entry]) => { this.shown = entry.isIntersecting; this.wake(); }).observe(box);
    new ResizeObserver(() => this.redraw()).observe(box);
    box.addEventListener("scroll", () => this.redraw());
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    for (const kind of ["down", "move", "up", "cancel", "leave"]) box.addEventListener(`pointer${kind}`, (event) => this.point(kind, event));
  }

  // --- data ---

  clear() { this.lanes.clear(); this.updates = []; }

  lane(name) {
    if (!this.lanes.has(name)) this.lanes.set(name, { steps: [], waits: [] });
    return this.lanes.get(name);
  }

  add(steps, waits) {
    for (const [, name, began, ended, staleness, outcome, reason, updates] of steps) {
      this.lane(name).steps.push({ began, ended, staleness, outcome, reason, updates });
      if (updates > 0) this.updates.push({ ended, updates });
    }
    for (const [, name, began, ended, others] of waits) this.lane(name).waits.push({ began, ended, others });
    this.updates.sort((a, b) => a.ended - b.ended);
    const held = [...this.lanes.values()].reduce((sum, lane) => sum + lane.steps.length, 0);
    const oldest = this.newest() - KEPT_SECONDS / Math.max(1, held / KEPT_STEPS * 1.2);
    for (const items of [this.updates, ...[...this.lanes.values()].flatMap((lane) => [lane.steps, lane.waits])]) items.splice(0, since(items, oldest));
    if (this.spanKnown || steps.length < 8) return;
    // As much time as leaves a usual step room for its number.
    const length = steps.reduce((sum, step) => sum + step[3] - step[2], 0) / steps.length;
    this.span = Math.min(120, Math.max(2, Math.max(6, (this.box.clientWidth - 100) / 62) * length));
    this.spanKnown = true;
  }

  ends(lane) { return Math.max(lane.steps.at(-1)?.ended ?? 0, lane.waits.at(-1)?.ended ?? 0); }
  newest() { return [...this.lanes.values()].reduce((newest, lane) => Math.max(newest, this.ends(lane)), 0); }
  oldest() {
    const begins = [...this.lanes.values()].flatMap(({ steps, waits }) => [steps[0]?.began, waits[0]?.began]);
    return Math.min(this.now, ...begins.filter((began) => began != null));
  }

  set({ now, live, workers, slow, mean }) {
    Object.assign(this, { now, live, workers, slow, heard: performance.now(), bounds: ageBounds(mean) });
    if (live || this.end !== null) return this.redraw();
    // A run that has ended is opened where all workers are at work, not at its end.
    this.stand(this.newest() - Math.min(30, (this.newest() - this.oldest()) / 2) + this.span / 2);
  }

  // --- the time that is seen ---

  get following() { return this.end === null; }
  // Behind the servers' time by what a step may take to become known, so that bars come in at the edge.
  get edge() {
    const passed = this.still.matches ? 0 : Math.min(4, (performance.now() - this.heard) / 1000);
    return this.now + passed - 1.7 - this.workers.length / 256;
  }
  get viewEnd() { return this.end ?? this.edge; }

  stand(end) { this.end = end; this.redraw(); this.hooks.changed(); }
  follow() { this.stand(this.live ? null : this.newest() + 0.02 * this.span); }
  pause() { if (this.following || !this.live) this.stand(this.viewEnd); else this.follow(); }
  move(seconds) {
    const end = Math.max(this.viewEnd + seconds, this.oldest() + 0.3 * this.span);
    this.stand(this.live && end >= this.edge ? null : Math.min(end, this.newest() + 0.3 * this.span));
  }
  zoom(factor) {
    const span = Math.min(KEPT_SECONDS, Math.max(0.05, this.span * factor));
    if (!this.following) this.end += (span - this.span) / 2;
    Object.assign(this, { span, spanKnown: true });
    this.redraw();
  }

  key(event) {
    const acts = {
      ArrowLeft: () => this.move(-0.1 * this.span), ArrowRight: () => this.move(0.1 * this.span), PageUp: () => this.move(-0.9 * this.span),
      PageDown: () => this.move(0.9 * this.span), Home: () => this.move(-1e12), End: () => this.follow(), l: () => this.follow(), " ": () => this.pause(),
      "+": () => this.zoom(0.8), "=": () => this.zoom(0.8), "-": () => this.zoom(1.25),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  wheel(event) {
    // A plain wheel scrolls lanes and page.
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 300));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.plot().width * this.span);
    else return;
    event.preventDefault();
  }

  point(kind, event) {
    const { left, width } = this.plot(), before = this.pointer, box = this.canvas.getBoundingClientRect();
    const pointer = { x: event.clientX - box.left, y: event.clientY - box.top, clientX: event.clientX, clientY: event.clientY };
    if (kind === "down") {
      this.pressed = pointer;
      this.pointer = pointer;
      this.box.setPointerCapture(event.pointerId);
    } else if (kind === "move") {
      this.pointer = pointer;
      this.wake();
      if (this.pressed && Math.abs(pointer.x - this.pressed.x) > 4) this.move((before.x - pointer.x) / width * this.span);
    } else {
      const name = this.laneAt(pointer.y), clicked = kind === "up" && Math.abs(pointer.x - this.pressed?.x) < 4;
      this.pressed = null;
      if (clicked && name && pointer.x < left) this.hooks.choose(name);
      if (kind === "up" && event.pointerType === "mouse") return;
      this.pointer = null;
      this.hooks.tell(null);
      this.wake();
    }
  }

  // --- where things are ---

  // Lanes are in the order of names; where not all are seen at once, the worker of the sentence and the chosen one come first.
  order() {
    const names = this.workers.map((worker) => worker.name), roomy = names.length * laneHeight(names.length) <= lanesRoom();
    const first = roomy ? [] : [...new Set([this.slow, this.chosen])].filter((name) => names.includes(name));
    return [...first, ...names.filter((name) => !first.includes(name))];
  }

  plot() {
    const count = this.names.length, height = laneHeight(count), lanes = Math.min(count * height, lanesRoom()), whole = this.box.clientWidth;
    const left = Math.min(Math.round(whole * 0.3), this.nameWidth);
    return { left, width: Math.max(40, whole - left), height, lanes, total: lanes + UPDATES + AXIS, hidden: count * height - lanes };
  }

  laneAt(y) {
    const { lanes, height } = this.plot();
    return y < 0 || y >= lanes ? "" : this.names[Math.floor((y + this.box.scrollTop) / height)] ?? "";
  }

  wordsAt(time, y) {
    const name = this.laneAt(y), lane = this.lanes.get(name), worker = this.workers.find((one) => one.name === name);
    const of = (items = []) => { const item = items[since(items, time)]; return item?.began <= time ? item : null; };
    const step = of(lane?.steps), wait = of(lane?.waits), length = secondsText((step ?? wait ?? { ended: 0 }).ended - (step ?? wait)?.began || 0);
    if (step) {
      const made = step.updates ? `, completed ${step.updates === 1 ? "an update" : `${step.updates} updates`}` : "";
      return `${name}\nstep of ${length}, staleness ${step.staleness}\n${step.outcome}${step.reason ? `: ${step.reason}` : ""}${made}`;
    }
    if (wait) return `${name}\nwaited ${length}${wait.others.length ? ` for ${namesText(wait.others)}` : ""}`;
    if (!worker || !lane || time < this.ends(lane)) return name;
    return `${name}\n${worker.waits_for.length ? `waits for ${namesText(worker.waits_for)}` : worker.state}`;
  }

  // --- drawing ---

  redraw() { this.dirty = true; this.wake(); }
  wake() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame((time) => { this.asked = false; this.frame(time); });
  }

  frame(time) {
    if (!this.shown || !this.now || !this.box.clientWidth) return;
    const end = this.viewEnd, { width } = this.plot(), shift = (end - this.span - this.from) * width / this.span;
    if (this.dirty || !(shift >= 0 && shift <= this.slack)) this.drawBitmap(end);
    this.paint(end);
    this.painted = [...this.painted.filter((before) => before > time - 1000), time];
    if (this.following && !this.still.matches && performance.now() - this.heard < 4000) this.wake();
  }

  paint(end) {
    const { left, width, total } = this.plot(), ratio = devicePixelRatio, ink = this.canvas.getContext("2d");
    const shift = Math.round(Math.max(0, (end - this.span - this.from) * width / this.span) * ratio);
    const from = Math.round(left * ratio), across = this.canvas.width - from, down = this.canvas.height;
    ink.setTransform(1, 0, 0, 1, 0, 0);
    ink.clearRect(from, 0, across, down);
    ink.drawImage(this.bitmap, shift, 0, across, down, from, 0, across, down);
    const look = this.hooks.look(), x = this.pointer?.x ?? 0;
    ink.fillStyle = look.quiet;
    if (x > left) ink.fillRect(Math.round(x * ratio), 0, ratio, (total - AXIS) * ratio);
    // What became of those who are gone stays in sight.
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const { state, last, y } of this.over.filter((each) => each.y > 0 && each.y < total - AXIS - UPDATES)) {
      const finished = state === "finished";
      Object.assign(ink, { font: look.small, fillStyle: finished ? look.quiet : look.bad });
      const x = Math.max(4, (last - end + this.span) * width / this.span + 6);
      ink.fillText(`${finished ? "✓" : "✕"} ${state}`, left + x, y);
    }
    if (!this.pointer) return;
    const time = end - this.span + (x - left) / width * this.span;
    this.hooks.tell(x > left ? this.wordsAt(time, this.pointer.y) : null, this.pointer.clientX, this.pointer.clientY);
  }

  drawBitmap(end) {
    const look = this.hooks.look(), ratio = devicePixelRatio, labels = this.canvas.getContext("2d"), ink = this.bitmap.getContext("2d");
    this.dirty = false;
    this.names = this.order();
    labels.font = look.bold;
    this.nameWidth = Math.min(170, 14 + Math.ceil(this.names.slice(0, 60).reduce((most, name) => Math.max(most, labels.measureText(`◆ ${name}`).width), 52)));
    const { left, width, height, lanes, total, hidden } = this.plot(), scale = width / this.span, top = this.box.scrollTop;
    this.slack = Math.min(width, AHEAD_SECONDS * scale);
    // On whole pixels, so that nothing trembles from one bitmap to the next.
    this.from = Math.floor((end - this.span) * scale) / scale;
    resize(this.canvas, this.box.clientWidth, total);
    resize(this.bitmap, width + this.slack + 2, total);
    this.canvas.style.height = this.box.style.height = `${total}px`;
    this.spacer.style.height = `${Math.max(0, hidden)}px`;
    for (const [context, wide, font] of [[labels, left, look.font], [ink, width + this.slack + 2, look.small]]) {
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, wide, total);
      Object.assign(context, { font, textBaseline: "middle" });
    }
    const space = { ink, look, scale, wide: width + this.slack, x: (time) => (time - this.from) * scale };
    // Of what was drawn last, for those who ask.
    this.drawn = { steps: 0, waits: 0, crosses: 0, updates: 0 };
    this.over = [];
    this.drawAxis(space, lanes, total);
    labels.fillStyle = look.quiet;
    labels.fillText("updates", 0, lanes + UPDATES / 2);
    for (const [context, wide] of [[labels, left - 6], [ink, space.wide]]) {
      context.save();
      context.beginPath();
      context.rect(0, 0, wide, lanes);
      context.clip();
    }
    const workers = new Map(this.workers.map((worker) => [worker.name, worker]));
    for (let at = Math.floor(top / height); at < Math.min(this.names.length, (top + lanes) / height); at++) {
      const name = this.names[at], y = at * height - top, slow = name === this.slow;
      labels.font = slow || name === this.chosen ? look.bold : look.font;
      labels.fillStyle = slow ? look.slow : name === this.chosen ? look.accent : look.text;
      labels.fillText(fitted(labels, (slow ? "◆ " : "") + name, left - 10), 0, y + height / 2);
      ink.fillStyle = look.grid;
      if (name === this.chosen) ink.fillRect(0, y, space.wide, height);
      this.drawLane(space, this.lane(name), workers.get(name), y + 3, height - 6);
    }
    labels.restore();
    ink.restore();
    this.drawUpdates(space, lanes);
  }

  drawAxis({ ink, look, scale, wide, x }, lanes, total) {
    const apart = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300].find((step) => step * scale > 78) ?? 600;
    ink.fillStyle = look.line;
    for (const y of [lanes, total - AXIS]) ink.fillRect(0, y, wide, 1);
    ink.textAlign = "center";
    for (let tick = Math.ceil(this.from / apart); x(tick * apart) < wide; tick++) {
      ink.fillStyle = look.grid;
      ink.fillRect(Math.round(x(tick * apart)), 0, 1, total - AXIS);
      ink.fillStyle = look.quiet;
      ink.fillText(clockText(tick * apart, apart < 1), x(tick * apart), total - 9);
    }
  }

  drawLane(space, { steps, waits }, worker, y, height) {
    const { ink, look, x, wide, scale } = space, until = this.from + wide / scale;
    for (let at = since(waits, this.from); waits[at]?.began < until; at++) {
      this.drawWait(space, x(waits[at].began), x(waits[at].ended), y, height, waits[at].others);
    }
    let drawnTo = -1;
    for (let at = since(steps, this.from); steps[at]?.began < until; at++) {
      const { began, ended, staleness, outcome } = steps[at];
      this.drawn.steps++;
      // Of bars thinner than a pixel one a pixel is enough.
      if (x(ended) < drawnTo + 1 && x(ended) - x(began) < 1) continue;
      drawnTo = x(ended);
      this.drawStep(space, x(began), Math.max(1, x(ended) - x(began)), y, height, staleness, outcome === "rejected");
    }
    // What the worker does since its last step: it ends only with a later answer.
    const last = x(this.ends({ steps, waits }));
    if (!worker || !(steps.length || waits.length) || last > wide) return;
    if (worker.state !== "alive") {
      this.over.push({ state: worker.state, last: this.ends({ steps, waits }), y: y + height / 2 });
    } else if (this.live && worker.waits_for.length) this.drawWait(space, last, wide, y, height, worker.waits_for);
    else if (this.live) {
      Object.assign(ink, { strokeStyle: look.hatch, lineWidth: 1 });
      ink.setLineDash([3, 3]);
      ink.strokeRect(last + 1.5, y + 0.5, wide - last, height - 1);
      ink.setLineDash([]);
    }
  }

  drawStep({ ink, look }, x, width, y, height, staleness, rejected) {
    const age = ageOf(staleness, this.bounds), middle = x + width / 2, centre = y + height / 2, arm = Math.min(5, height / 3);
    Object.assign(ink, { fillStyle: rejected ? look.card : look.ages[age], strokeStyle: rejected ? look.bad : look.edge, lineWidth: 1 });
    ink.fillRect(x, y, width, height);
    if (width > 4) ink.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    if (rejected) {
      this.drawn.crosses++;
      ink.lineWidth = 2;
      ink.stroke(new Path2D(`M${middle - arm} ${centre - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}`));
    } else if (width > 10 + 7 * String(staleness).length && height > 11) {
      ink.fillStyle = age < 4 ? "#1b2128" : "#fff";
      ink.fillText(staleness, middle, centre + 0.5);
    }
  }

  drawWait({ ink, look, scale }, x, end, y, height, others) {
    this.drawn.waits++;
    if (end - x < 1) return;
    look.hatched.setTransform(new DOMMatrix().translate(-(this.from * scale) % 8, 0).scale(1 / devicePixelRatio));
    ink.fillStyle = look.hatched;
    ink.fillRect(x, y + 2, end - x, height - 4);
    const slow = others.includes(this.slow), more = others.length > 1 ? ` +${others.length - 1}` : "";
    const words = `for ${slow ? `◆ ${this.slow}` : others[0]}${more}`, room = ink.measureText(words).width + 8;
    // The end of a wait that goes on is out of sight: its words stand near what is seen of its begin.
    const from = Math.max(0, x), middle = from + Math.min(90, (end - from) / 2);
    if (!others.length || height < 16 || room > end - from - 4) return;
    ink.fillStyle = look.card;
    ink.fillRect(middle - room / 2, y + height / 2 - 8, room, 16);
    ink.fillStyle = slow ? look.slow : look.quiet;
    ink.fillText(words, middle, y + height / 2 + 0.5);
  }

  drawUpdates({ ink, look, x, wide }, lanes) {
    ink.fillStyle = look.text;
    for (let at = since(this.updates, this.from), before = -1; at < this.updates.length; at++) {
      const here = Math.round(x(this.updates[at].ended));
      if (here > wide) break;
      this.drawn.updates += this.updates[at].updates;
      if (here !== before) ink.fillRect(here, lanes + 5, 1, UPDATES - 10);
      before = here;
    }
  }
}

function laneHeight(count) { return count <= 8 ? 34 : count <= 16 ? 24 : 18; }
function lanesRoom() { return Math.max(220, Math.min(440, innerHeight / 2)); }
function resize(canvas, width, height) {
  const across = Math.round(width * devicePixelRatio), down = Math.round(height * devicePixelRatio);
  if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
}
