"use strict";
// The picture of who computes, who waits for whom, and how old each gradient was: a lane a worker, on a canvas.
// It is wider than what is seen, drawn once a change of data, and then only moved, by the browser itself.

const SPAN_SECONDS_MAX = 900;
const AHEAD_SECONDS = 3; // drawn beyond the right edge, for the time until the next data
const HEAD = 44; // height of times and updates above the lanes
const TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300];

// The largest staleness of each class but the last: 0, 1, 2, 4, 8, 16; more where many workers make gradients older.
function ageBounds(mean) {
  const top = 2 ** Math.max(4, Math.ceil(Math.log2(1.5 * mean)));
  return [0, top / 16, top / 8, top / 4, top / 2, top];
}
function ageOf(staleness, bounds) { return bounds.filter((bound) => bound < staleness).length; }

// The index of the first item that ends at or after the time.
function since(items, time) { return items.findLastIndex((item) => item.ended < time) + 1; }

class Timeline {
  constructor(box) {
    const [names, view] = box.children, [canvas] = view.children;
    Object.assign(this, { box, view, canvas, names, ink: canvas.getContext("2d"), pointer: null });
    Object.assign(this, { lanes: new Map(), updates: [], held: 0, workers: [], order: [], slow: "", bounds: [] });
    Object.assign(this, { span: 30, spanKnown: false, end: null, now: 0, heard: 0, live: true });
    new ResizeObserver(() => this.draw()).observe(view);
    box.addEventListener("scroll", () => this.draw());
    box.addEventListener("keydown", (event) => this.key(event));
    for (const kind of ["down", "move", "leave"]) {
      view.addEventListener(`pointer${kind}`, (event) => this.point(kind, event));
    }
    document.addEventListener("pointerdown", ({ target }) => view.contains(target) || this.tell(this.pointer = null));
  }

  // --- data ---

  lane(name) {
    if (!this.lanes.has(name)) this.lanes.set(name, { steps: [], waits: [] });
    return this.lanes.get(name);
  }

  add({ steps, waits, whole }) {
    if (whole) Object.assign(this, { lanes: new Map(), updates: [], held: 0 });
    this.held += steps.length + waits.length;
    for (const [, name, began, ended, staleness, outcome, reason, updates] of steps) {
      this.lane(name).steps.push({ began, ended, staleness, outcome, reason, updates });
      if (updates > 0) this.updates.push({ ended, updates });
    }
    for (const [, name, began, ended, others] of waits) this.lane(name).waits.push({ began, ended, others });
    this.updates.sort((a, b) => a.ended - b.ended);
    if (this.spanKnown || steps.length < 8) return;
    // As much time as leaves a usual step room for its number.
    const length = steps.reduce((sum, step) => sum + step[3] - step[2], 0) / steps.length;
    this.span = Math.min(120, Math.max(1.5, Math.max(4, this.view.clientWidth / 62) * length));
    this.spanKnown = true;
  }

  ends(lane) { return Math.max(lane.steps.at(-1)?.ended ?? 0, lane.waits.at(-1)?.ended ?? 0); }
  // When one that waits now began to. Between two waits is a step, which is not listed yet if a wait is the last thing.
  waitsSince(lane) {
    const lengths = lane.steps.slice(-9).map(({ began, ended }) => ended - began).sort((a, b) => a - b);
    const known = this.ends(lane), isStep = known === lane.steps.at(-1)?.ended;
    return known + (isStep ? 0 : lengths[lengths.length >> 1] ?? 0);
  }
  newest() { return [...this.lanes.values()].reduce((newest, lane) => Math.max(newest, this.ends(lane)), 0); }
  oldest() {
    const begins = [...this.lanes.values()].flatMap(({ steps, waits }) => [steps[0]?.began, waits[0]?.began]);
    return Math.min(this.now, ...begins.filter((began) => began != null));
  }

  set({ now, live, workers, slow, staleness: { mean } }) {
    Object.assign(this, { now, live, workers, slow, heard: performance.now(), bounds: ageBounds(mean) });
    if (live || this.end !== null) return this.draw();
    // A run that has ended is opened where all workers are at work, not at its end.
    this.stand(this.newest() - Math.min(30, (this.newest() - this.oldest()) / 2) + this.span / 2);
  }

  // --- the time that is seen ---

  get following() { return this.end === null; }
  // Behind the servers' time by what a step may take to become known, so that bars come in at the edge.
  get edge() {
    const passed = Math.min(AHEAD_SECONDS, (performance.now() - this.heard) / 1000);
    return this.now + passed - 1.7 - this.workers.length / 256;
  }
  get viewEnd() { return this.end ?? this.edge; }

  stand(end) {
    this.end = end;
    $("tl-pause").setAttribute("aria-pressed", !this.following);
    this.draw();
  }
  pause() { this.stand(this.following || !this.live ? this.viewEnd : null); }
  move(seconds) {
    const end = Math.max(this.viewEnd + seconds, this.oldest() + 0.3 * this.span);
    this.stand(this.live && end >= this.edge ? null : Math.min(end, this.newest() + 0.3 * this.span));
  }
  zoom(factor) {
    const span = Math.min(SPAN_SECONDS_MAX, Math.max(0.05, this.span * factor));
    if (!this.following) this.end += (span - this.span) / 2;
    Object.assign(this, { span, spanKnown: true });
    this.draw();
  }

  key(event) {
    const acts = {
      ArrowLeft: () => this.move(-0.1 * this.span), ArrowRight: () => this.move(0.1 * this.span),
      Home: () => this.move(-1e12), " ": () => this.pause(), "+": () => this.zoom(0.8), "-": () => this.zoom(1.25),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  point(kind, event) {
    const before = this.pointer;
    if (kind === "down") this.view.setPointerCapture(event.pointerId);
    if (kind === "move" && event.buttons && before) {
      this.move((before.clientX - event.clientX) / this.view.clientWidth * this.span);
    }
    // A finger is lifted to read what it has pointed at.
    if (kind !== "leave") this.pointer = event; else if (event.pointerType !== "touch") this.pointer = null;
    this.tell();
  }

  // Say what is under the pointer, also when that moves on.
  tell() {
    const tip = $("tip"), { pointer } = this, words = pointer ? this.wordsAt(pointer) : "";
    clearTimeout(this.telling);
    tip.hidden = !words;
    say(tip, words);
    if (!pointer) return;
    tip.style.left = `${Math.max(4, Math.min(pointer.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.bottom = `${innerHeight - pointer.clientY + 12}px`;
    this.telling = setTimeout(() => this.tell(), 100);
  }

  wordsAt({ clientX, clientY }) {
    const { left, top, bottom, width } = this.view.getBoundingClientRect();
    const time = this.viewEnd - this.span + (clientX - left) / width * this.span;
    const worker = this.order[Math.floor((clientY - top - HEAD + this.box.scrollTop) / this.height)];
    if (!worker || clientY < top + HEAD || clientY > bottom) return "";
    const { name, state, waits_for } = worker, lane = this.lane(name);
    const of = (items) => items.findLast(({ began, ended }) => began <= time && time <= ended);
    const step = of(lane.steps), wait = of(lane.waits), length = ({ began, ended }) => secondsText(ended - began);
    if (step) {
      const { staleness, outcome, reason, updates } = step;
      const verdict = [outcome, reason, updates && `updates made: ${updates}`].filter(Boolean).join(", ");
      return `${name}\nstep of ${length(step)}, staleness ${staleness}\n${verdict}`;
    }
    if (wait) return `${name}\nwaited ${length(wait)}${wait.others.length ? ` for ${namesText(wait.others)}` : ""}`;
    if (time < this.ends(lane)) return name;
    if (!waits_for.length || time < this.waitsSince(lane)) return `${name}\n${state}`;
    return `${name}\nwaits for ${namesText(waits_for)}`;
  }

  // --- drawing ---

  draw() {
    if (!this.now || !this.view.clientWidth) return;
    const { box, view, canvas, ink, workers, slow } = this, ratio = devicePixelRatio, count = workers.length;
    const room = Math.max(220, Math.min(440, innerHeight / 2)), height = this.height = count <= 12 ? 30 : 18;
    const lanes = Math.min(count * height, room), top = box.scrollTop;
    // In the order of names; where not all are seen at once, the worker of the sentence comes first.
    const first = ({ name }) => count * height > lanes && name === slow;
    this.order = [...workers].sort((a, b) => first(b) - first(a));
    box.style.height = `${HEAD + lanes}px`;
    box.style.setProperty("--lane", `${height}px`);
    const states = this.order.map(({ name, state }) => [name, state === "alive" ? "" : state]);
    once(this.names, JSON.stringify([states, slow]), () => [make("li", {}, "updates"),
      ...states.map(([name, state]) => make("li", {}, nameNode(name), " ", stateNode(state)))]);
    const width = view.clientWidth, scale = this.scale = width / this.span;
    const ahead = Math.min(width, AHEAD_SECONDS * scale), wide = this.wide = Math.ceil(width + ahead) + 2;
    // On whole pixels, so that nothing trembles from one drawing to the next.
    this.from = Math.floor((this.viewEnd - this.span) * scale) / scale;
    this.motion?.cancel();
    if (this.following && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      const transform = ["none", `translateX(${-ahead}px)`];
      this.motion = canvas.animate({ transform }, { duration: 1000 * ahead / scale, fill: "forwards" });
    }
    Object.assign(canvas, { width: Math.round(wide * ratio), height: Math.round((HEAD + lanes) * ratio) });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${HEAD + lanes}px` });
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    Object.assign(ink, { font: look().small, textAlign: "center", textBaseline: "middle" });
    this.drawTimes(lanes);
    this.drawUpdates();
    ink.beginPath();
    ink.rect(0, HEAD, wide, lanes);
    ink.clip();
    ink.font = height < 20 || width < 400 ? look().tiny : look().small;
    for (let at = Math.floor(top / height); at < Math.min(count, (top + lanes) / height); at++) {
      this.drawLane(this.order[at], HEAD + at * height - top + 2, height - 4);
    }
  }

  x(time) { return (time - this.from) * this.scale; }

  drawTimes(lanes) {
    const { ink } = this, apart = TICKS.find((seconds) => seconds * this.scale > 78) ?? 600;
    for (let tick = Math.ceil(this.from / apart); this.x(tick * apart) < this.wide; tick++) {
      const x = Math.round(this.x(tick * apart));
      ink.fillStyle = look().grid;
      ink.fillRect(x, 18, 1, HEAD + lanes);
      ink.fillStyle = look().quiet;
      ink.fillText(clockText(tick * apart, apart < 1), x, 9);
    }
  }

  drawUpdates() {
    const { ink, updates } = this;
    ink.fillStyle = look().text;
    for (let at = since(updates, this.from), before = -1; at < updates.length; at++) {
      const x = Math.round(this.x(updates[at].ended));
      if (x > this.wide) break;
      if (x !== before) ink.fillRect(x, 24, 1, 16);
      before = x;
    }
  }

  drawLane({ name, state, waits_for }, y, height) {
    const { ink, wide } = this, { steps, waits } = this.lane(name), until = this.from + wide / this.scale;
    for (let at = since(waits, this.from); waits[at]?.began < until; at++) {
      this.drawWait(this.x(waits[at].began), this.x(waits[at].ended), y, height, waits[at].others);
    }
    let drawnTo = -1;
    for (let at = since(steps, this.from); steps[at]?.began < until; at++) {
      const { began, ended, staleness, outcome } = steps[at], from = this.x(began), to = this.x(ended);
      // Of bars thinner than a pixel one a pixel is enough.
      if (to < drawnTo + 1 && to - from < 1) continue;
      drawnTo = to;
      this.drawStep(from, Math.max(1, to - from), y, height, staleness, outcome === "rejected");
    }
    // What the worker does since its last step: it ends only with a later answer.
    const last = this.x(this.ends({ steps, waits }));
    if (!this.live || state !== "alive" || !(steps.length || waits.length) || last > wide) return;
    const end = waits_for.length ? this.x(this.waitsSince({ steps, waits })) : wide + 9;
    this.drawWait(end, wide, y, height, waits_for);
    if (end < last + 4) return;
    Object.assign(ink, { strokeStyle: look().hatch, lineWidth: 1 });
    ink.setLineDash([3, 3]);
    ink.strokeRect(last + 1.5, y + 0.5, end - last - 3, height - 1);
    ink.setLineDash([]);
  }

  drawStep(x, width, y, height, staleness, rejected) {
    const { ink } = this, { card, bad, edge, ages } = look(), age = ageOf(staleness, this.bounds);
    const middle = x + width / 2, centre = y + height / 2, arm = Math.min(5, height / 3);
    Object.assign(ink, { fillStyle: rejected ? card : ages[age], strokeStyle: rejected ? bad : edge, lineWidth: 1 });
    ink.fillRect(x, y, width, height);
    if (width > 4) ink.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    if (rejected) {
      ink.lineWidth = 2;
      const cross = `M${middle - arm} ${centre - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}`;
      ink.stroke(new Path2D(cross));
    } else if (width > 10 + 7 * String(staleness).length && height > 11) {
      ink.fillStyle = age < 4 ? "#1b2128" : "#fff";
      ink.fillText(staleness, middle, centre + 0.5);
    }
  }

  drawWait(x, end, y, height, others) {
    const { ink } = this, { hatched, card, slow: mark, quiet } = look();
    if (end - x < 1) return;
    hatched.setTransform(new DOMMatrix().translate(-(this.from * this.scale) % 8, 0).scale(1 / devicePixelRatio));
    ink.fillStyle = hatched;
    ink.fillRect(x, y + 2, end - x, height - 4);
    const slow = others.includes(this.slow), whom = slow ? `◆ ${this.slow}` : others[0];
    const choices = [`for ${whom}${others.length > 1 ? ` +${others.length - 1}` : ""}`, whom, slow ? "◆" : ""];
    // The end of a wait that goes on is out of sight: its words stand near what is seen of its begin.
    const from = Math.max(0, x), middle = from + Math.min(90, (end - from) / 2);
    const words = whom && choices.find((each) => ink.measureText(each).width < end - from - 10);
    if (!words) return;
    const room = ink.measureText(words).width + 6;
    ink.fillStyle = card;
    ink.fillRect(middle - room / 2, y + 3, room, height - 6);
    ink.fillStyle = slow ? mark : quiet;
    ink.fillText(words, middle, y + height / 2 + 0.5);
  }
}
