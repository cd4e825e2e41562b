// Training curves, drawn by uPlot: one chart for each figure, with the held-out data's beside the training's.

import { h } from "./dom.js";
import { significant } from "./format.js";

const HEIGHT = 180;
const FEW = 50; // points that are marked, as one alone would be no line
const SHOWN = ["loss", "accuracy", "lr"];
const TITLES = { loss: "Loss", accuracy: "Accuracy", lr: "Learning rate" };

function colour(name) {
  const probe = h("span", {});
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

export class Curves {
  constructor() {
    this.steps = [];
    this.charts = new Map();
    this.scheme = null;
    this.resized = new ResizeObserver(() => this.fit());
  }

  /** `points`: one object a step, with `step` and figures; held-out ones begin with `val_`. */
  take(answer) {
    this.points = answer.points ?? [];
  }

  figures() {
    const names = new Set(this.points.flatMap((point) => Object.keys(point)));
    return SHOWN.filter((name) => names.has(name));
  }

  column(name) {
    return this.points.map((point) => (Number.isFinite(point[name]) ? point[name] : null));
  }

  latest(name) {
    return this.column(name).findLast((value) => value !== null) ?? null;
  }

  render(final) {
    const figures = this.figures();
    if (!figures.length) return h("p", { class: "muted" }, final ? "There are none: no epoch of it ended." : "The first figures appear after the first steps.");
    return h("div", { class: "charts" }, figures.map((name) => this.figure(name)));
  }

  figure(name) {
    const held = this.latest(`val_${name}`);
    const now = this.latest(name);
    const label = `${TITLES[name]}: ${significant(now)}${held === null ? "" : `, held-out ${significant(held)}`}, at step ${this.latest("step")}`;
    return h(
      "figure",
      { data: { key: name } },
      h("h3", {}, TITLES[name]),
      h("div", { class: "chart", role: "img", "aria-label": label, data: { keep: "", figure: name } }),
      h("figcaption", { class: "legend" }, h("span", {}, h("i"), `training ${significant(now)}`), held === null ? null : h("span", { class: "held" }, h("i"), `held-out ${significant(held)}`)),
    );
  }

  draw() {
    const scheme = colour("--ink");
    if (scheme !== this.scheme) this.close();
    this.scheme = scheme;
    for (const element of document.querySelectorAll("[data-figure]")) {
      const name = element.dataset.figure;
      const data = [this.column("step"), this.column(name), this.column(`val_${name}`)];
      const chart = this.charts.get(name);
      if (chart && chart.root.parentNode === element) chart.setData(data);
      else this.charts.set(name, this.made(element, data));
    }
  }

  made(element, data) {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const line = (stroke, more) => ({ stroke, width: 1.5, spanGaps: true, points: { show: false }, ...more });
    this.resized.observe(element);
    const options = {
      width: Math.max(element.clientWidth, 160),
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false } },
      axes: [{ ...axis, space: 36, size: 26 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((value) => significant(value)) }],
      series: [{}, line(colour("--line-a"), { points: { show: this.points.length < FEW, size: 4 } }), line(colour("--line-b"), { dash: [5, 3], points: { show: true, size: 5 } })],
    };
    return new uPlot(options, data, element);
  }

  fit() {
    for (const chart of this.charts.values()) {
      const width = chart.root.parentNode?.clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }

  close() {
    this.resized.disconnect();
    for (const chart of this.charts.values()) chart.destroy();
    this.charts.clear();
  }
}
