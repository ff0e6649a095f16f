"use strict";
// The picture of who computes, who waits for whom, and how old each gradient was: a lane a worker, on a canvas.
// What stands still is drawn once a change of data onto a bitmap, which each frame only shifts.

const AGES = 7; // classes of staleness, each with a colour
const KEPT_SECONDS = 900;
const KEPT_STEPS = 50000;
const AHEAD_SECONDS = 3; // drawn beyond the right edge, for the frames until the next data

// The upper bounds of the classes but the last, e.g. 0, 1, 2, 4, 8, 16: wider where many workers make gradients older.
function ageBounds(mean) {
  let top = 16;
  while (top < 1.5 * mean) top *= 2;
  return [0, top / 16, top / 8, top / 4, top / 2, top];
}

function ageOf(staleness, bounds) {
  const found = bounds.findIndex((bound) => staleness <= bound);
  return found < 0 ? AGES - 1 : found;
}

// The first index whose item is at or after the time; items are in order of their field.
function since(items, time, field) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle][field] < time) low = middle + 1; else high = middle;
  }
  return low;
}

class Timeline {
  // hooks: look() gives colours, hover(time or null), tell(words, x, y), choose(worker), changed() after play or pause
  constructor(box, hooks) {
    Object.assign(this, { box, hooks, lanes: new Map(), updates: [], workers: [], slow: "", chosen: "" });
    Object.assign(this, { span: 30, spanChosen: false, end: null, pointer: null, touches: new Map(), bounds: ageBounds(0) });
    Object.assign(this, { now: 0, heard: 0, live: true, painted: [], shown: true, dirty: true, asked: false });
    this.canvas = box.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("aria-hidden", "true");
    this.spacer = box.appendChild(document.createElement("div"));
    this.bitmap = document.createElement("canvas");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new IntersectionObserver(([entry]) => { this.shown = entry.isIntersecting; this.wake(); }).observe(box);
    new ResizeObserver(() => this.redraw()).observe(box);
    box.addEventListener("scroll", () => this.redraw());
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) {
      box.addEventListener(kind, (event) => this.point(kind, event));
    }
  }

  clear() { this.lanes.clear(); this.updates = []; }

  add(steps, waits) {
    for (const [, name, began, ended, staleness, outcome, reason, updates] of steps) {
      this.lane(name).steps.push({ began, ended, staleness, outcome, reason, updates });
      if (updates > 0) this.updates.push({ ended, updates });
    }
    for (const [, name, began, ended, others] of waits) this.lane(name).waits.push({ began, ended, others });
    this.updates.sort((a, b) => a.ended - b.ended);
    this.trim();
    if (!this.spanChosen) {
      const lengths = steps.map((step) => step[3] - step[2]).sort((a, b) => a - b);
      const room = Math.max(6, (this.box.clientWidth - 100) / 62);
      if (lengths.length > 8) this.span = Math.min(120, Math.max(2, room * lengths[lengths.length >> 1]));
      this.spanChosen = lengths.length > 8;
    }
  }

  lane(name) {
    if (!this.lanes.has(name)) this.lanes.set(name, { steps: [], waits: [] });
    return this.lanes.get(name);
  }

  trim() {
    const held = [...this.lanes.values()].reduce((sum, lane) => sum + lane.steps.length, 0);
    const newest = this.newest();
    const oldest = held > KEPT_STEPS ? newest - KEPT_SECONDS * KEPT_STEPS / held / 1.2 : newest - KEPT_SECONDS;
    for (const lane of this.lanes.values()) {
      for (const items of [lane.steps, lane.waits]) items.splice(0, since(items, oldest, "ended"));
    }
    this.updates.splice(0, since(this.updates, oldest, "ended"));
  }

  newest() {
    let newest = 0;
    for (const { steps, waits } of this.lanes.values()) {
      newest = Math.max(newest, steps.at(-1)?.ended ?? 0, waits.at(-1)?.ended ?? 0);
    }
    return newest;
  }

  oldest() {
    let oldest = this.now;
    for (const { steps, waits } of this.lanes.values()) {
      oldest = Math.min(oldest, steps[0]?.began ?? oldest, waits[0]?.began ?? oldest);
    }
    return oldest;
  }

  // What changes with each answer of the dashboard.
  set({ now, live, workers, slow, mean }) {
    Object.assign(this, { now, live, workers, slow, heard: performance.now(), bounds: ageBounds(mean) });
    if (!live && this.end === null) this.end = this.newest() + 0.02 * this.span;
    this.redraw();
  }

  // Behind the servers' time by what a step may take to become known, so that bars come in at the edge.
  edge() {
    const passed = Math.min(4, (performance.now() - this.heard) / 1000);
    return this.now + (this.still.matches ? 0 : passed) - 1.7 - this.workers.length / 256;
  }
  following() { return this.end === null; }
  viewEnd() { return this.end ?? this.edge(); }

  follow() { this.end = this.live ? null : this.newest() + 0.02 * this.span; this.redraw(); this.hooks.changed(); }
  pause() {
    if (this.following()) this.end = this.viewEnd(); else if (this.live) this.end = null;
    this.redraw();
    this.hooks.changed();
  }
  move(seconds) {
    const end = Math.max(this.viewEnd() + seconds, this.oldest() + 0.3 * this.span);
    this.end = this.live && end >= this.edge() ? null : Math.min(end, this.now + 0.3 * this.span);
    this.redraw();
    this.hooks.changed();
  }
  zoom(factor, share = 1) {
    const span = Math.min(KEPT_SECONDS, Math.max(0.05, this.span * factor));
    if (this.end !== null) this.end += (span - this.span) * (1 - share);
    this.span = span;
    this.spanChosen = true;
    this.redraw();
  }

  key(event) {
    const acts = {
      ArrowLeft: () => this.move(-0.1 * this.span), ArrowRight: () => this.move(0.1 * this.span),
      PageUp: () => this.move(-0.9 * this.span), PageDown: () => this.move(0.9 * this.span),
      Home: () => this.move(-1e12), End: () => this.follow(), l: () => this.follow(), " ": () => this.pause(),
      "+": () => this.zoom(0.8), "=": () => this.zoom(0.8), "-": () => this.zoom(1.25),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  wheel(event) {
    const { left, width } = this.plot();
    const share = Math.min(1, Math.max(0, (event.offsetX - left) / width));
    // A plain wheel scrolls the page, unless the timeline was clicked and has no lanes to scroll.
    const focused = document.activeElement === this.box && !this.spacer.offsetHeight;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / width * this.span);
    else if (event.ctrlKey || event.metaKey || focused) this.zoom(Math.exp(event.deltaY / 300), share);
    else return;
    event.preventDefault();
  }

  point(kind, event) {
    const before = this.touches.get(event.pointerId);
    if (kind === "pointerdown") {
      this.touches.set(event.pointerId, event);
      this.pressed = event;
      this.box.setPointerCapture(event.pointerId);
    } else if (kind === "pointermove") {
      if (before) {
        const { width } = this.plot();
        const others = [...this.touches.values()].filter((touch) => touch.pointerId !== event.pointerId);
        this.touches.set(event.pointerId, event);
        if (others.length === 1) {
          const apart = (touch) => Math.max(20, Math.abs(touch.clientX - others[0].clientX));
          this.zoom(apart(before) / apart(event), 0.5);
        } else if (Math.abs(event.clientX - this.pressed.clientX) > 4) {
          this.move((before.clientX - event.clientX) / width * this.span);
        }
      }
      const box = this.canvas.getBoundingClientRect();
      this.pointer = { x: event.clientX - box.left, y: event.clientY - box.top, clientX: event.clientX, clientY: event.clientY };
      this.wake();
    } else {
      this.touches.delete(event.pointerId);
      if (kind === "pointerup" && this.pressed && Math.abs(event.clientX - this.pressed.clientX) < 4) {
        const { left } = this.plot();
        const name = this.laneAt(this.pointer?.y ?? -1);
        if (name && this.pointer.x < left) this.hooks.choose(name);
      }
      if (kind !== "pointerup" || event.pointerType === "touch") this.leave();
    }
  }

  leave() { this.pointer = null; this.hooks.tell(null); this.hooks.hover(null); this.wake(); }

  // The order of lanes: by name; where not all are seen at once, the worker of the sentence and the chosen one first.
  order() {
    const names = this.workers.map((worker) => worker.name);
    for (const name of this.lanes.keys()) if (!names.includes(name) && names.length < 500) names.push(name);
    if (names.length * this.laneHeight(names.length) <= this.roomMax()) return names;
    const first = [this.slow, this.chosen].filter((name, at, all) => name && all.indexOf(name) === at && names.includes(name));
    return [...first, ...names.filter((name) => !first.includes(name))];
  }
  laneHeight(count) { return count <= 8 ? 34 : count <= 16 ? 24 : 18; }
  roomMax() { return Math.max(220, Math.min(440, innerHeight * 0.5)); }

  plot() {
    const names = this.names ?? [];
    const height = this.laneHeight(names.length);
    const lanes = Math.min(names.length * height, this.roomMax());
    const width = this.box.clientWidth;
    const left = Math.min(Math.round(width * 0.3), this.nameWidth ?? 90);
    return { left, width: Math.max(40, width - left), lanes, height, total: lanes + 26 + 22, hidden: names.length * height - lanes };
  }

  laneAt(y) {
    const { lanes, height } = this.plot();
    return y < 0 || y > lanes ? "" : this.names?.[Math.floor((y + this.box.scrollTop) / height)] ?? "";
  }

  redraw() { this.dirty = true; this.wake(); }
  wake() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame((time) => { this.asked = false; this.frame(time); });
  }

  frame(time) {
    if (!this.shown || !this.box.clientWidth) return;
    const end = this.viewEnd();
    const { width } = this.plot();
    const shift = (end - this.span - this.drawnFrom) * width / this.span;
    if (this.dirty || !(shift >= 0 && shift <= this.slack)) this.drawBitmap(end);
    this.paint(end);
    this.painted = this.painted.filter((before) => before > time - 1000);
    this.painted.push(time);
    if (this.following() && this.live && !this.still.matches && performance.now() - this.heard < 4000) this.wake();
  }

  paint(end) {
    const { left, width, total } = this.plot();
    const ratio = devicePixelRatio;
    const context = this.canvas.getContext("2d");
    const shift = Math.round(Math.max(0, (end - this.span - this.drawnFrom) * width / this.span) * ratio);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(left * ratio, 0, width * ratio, total * ratio);
    const across = Math.round(width * ratio), down = Math.round(total * ratio);
    context.drawImage(this.bitmap, shift, 0, across, down, Math.round(left * ratio), 0, across, down);
    const at = this.pointer ? this.pointer.x : left + (this.hoverTime - end + this.span) * width / this.span;
    if (at > left && at < left + width) {
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = this.hooks.look().quiet;
      context.fillRect(at, 0, 1, total - 22);
    }
    if (!this.pointer) return;
    const time = end - this.span + (this.pointer.x - left) / width * this.span;
    this.hooks.hover(this.pointer.x > left ? time : null);
    this.hooks.tell(this.pointer.x > left ? this.wordsAt(time, this.pointer.y) : null, this.pointer.clientX, this.pointer.clientY);
  }

  wordsAt(time, y) {
    const name = this.laneAt(y);
    const lane = this.lanes.get(name);
    if (!name) return "";
    const of = (items) => { const item = items[since(items, time, "ended")]; return item && item.began <= time ? item : null; };
    const step = of(lane?.steps ?? []), wait = of(lane?.waits ?? []);
    const seconds = (item) => secondsText(item.ended - item.began);
    if (step) {
      const fate = step.outcome === "rejected" ? `rejected${step.reason ? `: ${step.reason}` : ""}` : step.outcome;
      const made = step.updates ? `, completed ${step.updates === 1 ? "an update" : `${step.updates} updates`}` : "";
      return `${name}\nstep of ${seconds(step)}, staleness ${step.staleness}\n${fate}${made}`;
    }
    if (wait) return `${name}\nwaited ${seconds(wait)}${wait.others.length ? ` for ${namesText(wait.others)}` : ""}`;
    const worker = this.workers.find((one) => one.name === name);
    if (!worker || time < (lane?.steps.at(-1)?.ended ?? 0)) return name;
    return `${name}\n${worker.waits_for?.length ? `waits for ${namesText(worker.waits_for)}` : worker.state}`;
  }

  drawBitmap(end) {
    this.dirty = false;
    this.names = this.order();
    const look = this.look = this.hooks.look();
    const context = this.canvas.getContext("2d");
    context.font = look.bold;
    const widest = this.names.slice(0, 60).reduce((most, name) => Math.max(most, context.measureText(`◆ ${name}`).width), 52);
    this.nameWidth = Math.min(170, Math.ceil(widest) + 14);
    const { left, width, lanes, height, total, hidden } = this.plot();
    const ratio = devicePixelRatio, scale = width / this.span;
    this.slack = Math.min(width, AHEAD_SECONDS * scale);
    this.drawnFrom = Math.floor((end - this.span) * scale) / scale;
    this.size(this.canvas, this.box.clientWidth, total);
    this.size(this.bitmap, width + this.slack + 2, total);
    this.box.style.height = `${total}px`;
    this.spacer.style.height = `${Math.max(0, hidden)}px`;
    this.drawLabels(context, look, left, lanes, height);
    const ink = this.bitmap.getContext("2d");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width + this.slack + 2, total);
    ink.font = look.small;
    ink.textBaseline = "middle";
    this.drawAxis(ink, look, { width: width + this.slack, lanes, total, scale });
    ink.save();
    ink.beginPath();
    ink.rect(0, 0, width + this.slack, lanes);
    ink.clip();
    const first = Math.floor(this.box.scrollTop / height), last = Math.ceil((this.box.scrollTop + lanes) / height);
    this.drawn = { steps: 0, waits: 0, crosses: 0, updates: 0 };
    const states = new Map(this.workers.map((worker) => [worker.name, worker]));
    for (let at = first; at < Math.min(last, this.names.length); at++) {
      const y = at * height - this.box.scrollTop;
      if (this.names[at] === this.chosen) {
        ink.fillStyle = look.grid;
        ink.fillRect(0, y, width + this.slack, height);
      }
      this.drawLane(ink, look, this.lane(this.names[at]), states.get(this.names[at]), y + 3, height - 6, scale, width + this.slack);
    }
    ink.restore();
    this.drawUpdates(ink, look, lanes, scale, width + this.slack);
  }

  size(canvas, width, height) {
    const across = Math.round(width * devicePixelRatio), down = Math.round(height * devicePixelRatio);
    if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
    if (canvas === this.canvas) canvas.style.height = `${height}px`;
  }

  drawLabels(context, look, left, lanes, height) {
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, left, lanes + 60);
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(0, 0, left - 6, lanes);
    context.clip();
    this.names.forEach((name, at) => {
      const y = at * height - this.box.scrollTop;
      if (y < -height || y > lanes) return;
      const slow = name === this.slow;
      context.font = slow || name === this.chosen ? look.bold : look.font;
      context.fillStyle = slow ? look.slow : name === this.chosen ? look.accent : look.text;
      context.fillText(fitted(context, (slow ? "◆ " : "") + name, left - 10), 0, y + height / 2);
    });
    context.restore();
    context.font = look.font;
    context.fillStyle = look.quiet;
    context.fillText("updates", 0, lanes + 13);
  }

  drawAxis(ink, look, { width, lanes, total, scale }) {
    const apart = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300].find((step) => step * scale > 78) ?? 600;
    ink.fillStyle = look.line;
    ink.fillRect(0, lanes, width, 1);
    ink.fillRect(0, total - 22, width, 1);
    ink.textAlign = "center";
    for (let tick = Math.ceil(this.drawnFrom / apart); (tick * apart - this.drawnFrom) * scale < width; tick++) {
      const x = Math.round((tick * apart - this.drawnFrom) * scale);
      ink.fillStyle = look.grid;
      ink.fillRect(x, 0, 1, total - 22);
      ink.fillStyle = look.quiet;
      ink.fillText(clockText(tick * apart, apart < 1), x, total - 9);
    }
  }

  drawLane(ink, look, lane, worker, y, height, scale, width) {
    const from = this.drawnFrom, to = from + width / scale;
    const x = (time) => (time - from) * scale;
    for (let at = since(lane.waits, from, "ended"); at < lane.waits.length && lane.waits[at].began < to; at++) {
      const { began, ended, others } = lane.waits[at];
      this.drawWait(ink, look, x(began), x(ended), y, height, others);
    }
    let drawnTo = -1;
    for (let at = since(lane.steps, from, "ended"); at < lane.steps.length && lane.steps[at].began < to; at++) {
      const { began, ended, staleness, outcome } = lane.steps[at];
      this.drawn.steps++;
      // Bars thinner than a pixel: one a pixel is enough.
      if (x(ended) < drawnTo + 1 && x(ended) - x(began) < 1) continue;
      drawnTo = x(ended);
      this.drawStep(ink, look, x(began), Math.max(1, x(ended) - x(began)), y, height, staleness, outcome);
    }
    this.drawUnfinished(ink, look, lane, worker, x, y, height, width);
  }

  drawStep(ink, look, x, width, y, height, staleness, outcome) {
    const age = ageOf(staleness, this.bounds), rejected = outcome === "rejected";
    ink.fillStyle = rejected ? look.card : look.ages[age];
    ink.fillRect(x, y, width, height);
    if (width > 4) {
      ink.strokeStyle = rejected ? look.bad : look.edge;
      ink.lineWidth = 1;
      ink.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
    if (rejected) {
      this.drawn.crosses++;
      const middle = x + width / 2, arm = Math.min(5, height / 3);
      ink.strokeStyle = look.bad;
      ink.lineWidth = 2;
      ink.beginPath();
      for (const sign of [-1, 1]) { ink.moveTo(middle - arm, y + height / 2 - sign * arm); ink.lineTo(middle + arm, y + height / 2 + sign * arm); }
      ink.stroke();
    } else if (width > 10 + 7 * String(staleness).length && height > 11) {
      ink.fillStyle = age < 4 ? "#1b2128" : "#fff";
      ink.fillText(staleness, x + width / 2, y + height / 2 + 0.5);
    }
  }

  drawWait(ink, look, x, end, y, height, others) {
    this.drawn.waits++;
    if (end - x < 1) return;
    look.hatch.setTransform(new DOMMatrix([1 / devicePixelRatio, 0, 0, 1 / devicePixelRatio, -(this.drawnFrom * this.box.clientWidth) % 8, 0]));
    ink.fillStyle = look.hatch;
    ink.fillRect(x, y + 2, end - x, height - 4);
    if (!others?.length || height < 16) return;
    const words = `for ${others.includes(this.slow) ? "◆ " : ""}${others[0]}${others.length > 1 ? ` +${others.length - 1}` : ""}`;
    const room = ink.measureText(words).width + 8;
    if (room > end - x - 4) return;
    ink.fillStyle = look.card;
    ink.fillRect((x + end - room) / 2, y + height / 2 - 8, room, 16);
    ink.fillStyle = others.includes(this.slow) ? look.slow : look.quiet;
    ink.fillText(words, (x + end) / 2, y + height / 2 + 0.5);
  }

  // What the worker does since its last step: it ends only with a later answer.
  drawUnfinished(ink, look, lane, worker, x, y, height, width) {
    const last = Math.max(lane.steps.at(-1)?.ended ?? 0, lane.waits.at(-1)?.ended ?? 0);
    if (!worker || !last || x(last) > width) return;
    if (worker.state !== "alive") {
      ink.textAlign = "left";
      ink.fillStyle = look.bad;
      ink.fillText(`✕ ${worker.state}`, Math.max(4, x(last) + 6), y + height / 2);
      ink.textAlign = "center";
    } else if (this.live && worker.waits_for?.length) this.drawWait(ink, look, x(last), width, y, height, worker.waits_for);
    else if (this.live) {
      ink.strokeStyle = look.hatched;
      ink.lineWidth = 1;
      ink.setLineDash([3, 3]);
      ink.strokeRect(x(last) + 1.5, y + 0.5, width, height - 1);
      ink.setLineDash([]);
    }
  }

  drawUpdates(ink, look, lanes, scale, width) {
    ink.fillStyle = look.text;
    let before = -1;
    for (let at = since(this.updates, this.drawnFrom, "ended"); at < this.updates.length; at++) {
      const x = Math.round((this.updates[at].ended - this.drawnFrom) * scale);
      if (x > width) break;
      this.drawn.updates += this.updates[at].updates;
      if (x === before) continue;
      before = x;
      ink.fillRect(x, lanes + 5, 1, 16);
    }
  }
}

function fitted(context, words, width) {
  if (context.measureText(words).width <= width) return words;
  while (words.length > 1 && context.measureText(`${words}…`).width > width) words = words.slice(0, -1);
  return `${words}…`;
}
