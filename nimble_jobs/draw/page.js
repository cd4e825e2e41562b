
"use strict";
(() => {
  const svg = document.getElementById("chart");
  const find = (id) => document.getElementById(id);
  const left = +svg.dataset.left, right = +svg.dataset.right, whole = +svg.dataset.span || 1;
  const measured = svg.dataset.measured === "1", tall = svg.viewBox.baseVal.height;
  const axis = svg.querySelector(".axis");
  const tasks = new Map(), rows = new Map();
  for (const g of svg.querySelectorAll(".task")) {
    const title = g.querySelector("title"), rects = g.querySelectorAll("rect");
    const task = { g, rects, text: g.querySelector("text"), start: +g.dataset.start, length: +g.dataset.length,
      name: g.dataset.name, about: title.textContent, y: +rects[0].getAttribute("y"), syncs: [] };
    title.remove();  // the browser's own tooltip would cover ours
    tasks.set(g, task);
    if (!rows.has(task.y)) rows.set(task.y, []);
    rows.get(task.y).push(task);
  }
  const byIndex = new Map([...tasks.values()].map((t) => [t.g.dataset.task, t]));
  const syncs = [...svg.querySelectorAll(".sync")].map((path) => {
    const sync = { path, before: byIndex.get(path.dataset.before), after: byIndex.get(path.dataset.after) };
    sync.before.syncs.push(sync);
    sync.after.syncs.push(sync);
    return sync;
  });
  const middle = +(syncs[0]?.path.getAttribute("d").match(/^M\S+ ([\d.]+)/)?.[1] ?? 0) - (syncs[0]?.before.y ?? 0);
  const letter = +svg.dataset.letter;
  let from = 0, span = whole, width = 1200, picked = null, asked = false;

  const x = (us) => left + (us - from) / span * (width - left - right);
  const time = (us, step) => {
    if (!measured) return `${+us.toPrecision(6)}`;
    const [size, unit] = whole >= 1e6 ? [1e6, "s"] : whole >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    return `${(us / size).toFixed(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)))} ${unit}`;
  };
  const fit = (name, pixels) => {
    const room = Math.floor((pixels - 7) / letter);
    return room < 3 ? "" : name.length <= room ? name : `${name.slice(0, room - 1)}…`;
  };

  function drawAxis() {
    const rough = span / Math.max(3, width / 120), size = 10 ** Math.floor(Math.log10(rough));
    const step = size * [1, 2, 5, 10].find((m) => size * m >= rough * 0.999);
    axis.replaceChildren();
    for (let i = Math.ceil(from / step); i * step <= from + span * 1.000001; i++) {
      const at = x(i * step);
      const line = axis.appendChild(document.createElementNS(svg.namespaceURI, "path"));
      line.setAttribute("d", `M${at} 24V${tall - 6}`);
      const text = axis.appendChild(document.createElementNS(svg.namespaceURI, "text"));
      text.setAttribute("x", at);
      text.setAttribute("y", 18);
      text.textContent = time(i * step, step);
    }
    find("range").textContent = `${time(from, span / 100)} to ${time(from + span, span / 100)} of ${time(whole, whole / 100)}`;
  }

  function draw() {
    asked = false;
    for (const task of tasks.values()) {
      const pixels = task.length / span * (width - left - right), at = x(task.start);
      const seen = at < width && at + pixels >= left - 1;
      task.g.style.display = seen ? "" : "none";
      if (!seen) continue;
      const shown = Math.max(0.4, pixels - Math.min(1, pixels / 5));
      for (const rect of task.rects) {
        rect.setAttribute("x", at);
        rect.setAttribute("width", shown);
      }
      const inner = Math.max(at, left);  // a bar that begins outside keeps its name in sight
      task.text.setAttribute("x", inner + 4);
      task.text.textContent = fit(task.name, at + shown - inner);
    }
    for (const { path, before, after } of syncs) {
      const x1 = x(before.start + before.length), x2 = x(after.start);
      const bend = Math.max(6, Math.min(40, (x2 - x1) / 2)), y1 = before.y + middle, y2 = after.y + middle;
      path.setAttribute("d", `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`);
    }
    drawAxis();
  }

  function ask() {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  }

  function look(newFrom, newSpan) {
    span = Math.min(whole, Math.max(newSpan, whole / 1e5));
    from = Math.min(Math.max(0, newFrom), whole - span);
    ask();
  }

  function middleOfView() {
    const at = picked ? x(picked.start + picked.length / 2) : 0;
    return at > left && at < width - right ? at : (left + width - right) / 2;
  }

  function zoom(factor, pixel = middleOfView()) {
    const share = (pixel - left) / (width - left - right);
    look(from + share * span - share * Math.min(whole, span * factor), span * factor);
  }

  function resize() {
    width = Math.max(360, svg.clientWidth);
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    svg.setAttribute("height", tall);
    for (const stripe of svg.querySelectorAll(".row rect")) stripe.setAttribute("width", width);
    svg.querySelector("#plot rect").setAttribute("width", width - left - right + 12);
    ask();
  }

  function pick(task) {
    if (picked) {
      picked.g.classList.remove("picked");
      for (const { path } of picked.syncs) path.classList.remove("near");
    }
    picked = task;
    find("picked").hidden = !task;
    find("picked").textContent = task ? task.about : "";
    if (!task) return;
    task.g.classList.add("picked");
    for (const { path } of task.syncs) path.classList.add("near");
    const end = task.start + task.length;
    if (end < from || task.start > from + span) look((task.start + end - span) / 2, span);
  }

  function step(key) {
    if (!picked) return pick(rows.values().next().value?.[0] ?? null);
    const row = rows.get(picked.y), at = row.indexOf(picked);
    if (key === "ArrowLeft" || key === "ArrowRight") return pick(row[at + (key === "ArrowLeft" ? -1 : 1)] ?? picked);
    const ys = [...rows.keys()].sort((a, b) => a - b), next = rows.get(ys[ys.indexOf(picked.y) + (key === "ArrowUp" ? -1 : 1)]);
    if (!next) return;
    const away = (t) => Math.max(t.start - picked.start, picked.start - t.start - t.length, 0);
    pick(next.reduce((best, t) => away(t) < away(best) ? t : best));
  }

  svg.addEventListener("wheel", (event) => {
    const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 200);
    if (!event.shiftKey && factor > 1 && span === whole) return;  // nothing left to zoom out of: let the page scroll
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      look(from + (event.deltaX || event.deltaY) / (width - left - right) * span, span);
    } else {
      zoom(factor, Math.max(left, event.clientX - svg.getBoundingClientRect().left));
    }
  }, { passive: false });

  let grip = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button === 0) grip = { at: event.clientX, from, moved: false };
  });
  window.addEventListener("pointermove", (event) => {
    const task = event.target instanceof Element ? tasks.get(event.target.closest(".task")) : null;
    const tip = find("tip");
    tip.hidden = !task || !!grip?.moved;
    if (!tip.hidden) {
      tip.textContent = task.about;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      const below = event.clientY + 18;
      tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
    }
    if (!grip) return;
    if (Math.abs(event.clientX - grip.at) > 4) grip.moved = true;
    if (grip.moved) {
      svg.classList.add("moving");
      look(grip.from - (event.clientX - grip.at) / (width - left - right) * span, span);
    }
  });
  window.addEventListener("pointerup", (event) => {
    if (grip && !grip.moved) pick(tasks.get(event.target.closest(".task")) ?? null);
    grip = null;
    svg.classList.remove("moving");
  });
  window.addEventListener("pointercancel", () => {
    grip = null;
    svg.classList.remove("moving");
  });
  svg.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) step(event.key);
    else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "0") look(0, whole);
    else if (event.key === "Escape") pick(null);
    else return;
    event.preventDefault();
  });
  find("in").addEventListener("click", () => zoom(0.6));
  find("out").addEventListener("click", () => zoom(1 / 0.6));
  find("all").addEventListener("click", () => look(0, whole));
  find("arrows").addEventListener("change", (event) => svg.classList.toggle("quiet", !event.target.checked));
  find("path").addEventListener("change", (event) => svg.classList.toggle("dim", event.target.checked));

  svg.classList.add("live");
  svg.classList.toggle("quiet", !find("arrows").checked);
  svg.tabIndex = 0;
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", find("name").textContent);
  svg.removeAttribute("aria-labelledby");
  svg.setAttribute("aria-describedby", "about");
  find("name").remove();
  svg.setAttribute("aria-roledescription", "timeline");
  document.querySelector(".tools").hidden = false;
  document.querySelector(".hint").hidden = false;
  new ResizeObserver(resize).observe(svg);
  resize();
})();
