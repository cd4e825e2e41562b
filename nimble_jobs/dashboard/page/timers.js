// Timers: when they fire, what came of their ticks.

import { at, get } from "./api.js";
import { h, said, visible } from "./dom.js";
import { absolute, duration, plural } from "./format.js";
import { badge, button, command, empty, facts, jobLink, message, moment, pages, section, sheet, stateIcon, table } from "./parts.js";

const state = (tick) => tick.state ?? tick.outcome;
const page = (name) => `#/timers/${encodeURIComponent(name)}`;

function buttons(row, readOnly) {
  if (readOnly) return null;
  const one = (verb, label) => button("timer", label, { verb, name: row.name }, { name: `${label} ${visible(row.name)}` });
  return h("div", { class: "buttons" }, row.state === "paused" ? one("resume", "Resume") : one("pause", "Pause"), one("trigger", "Run now"));
}

function next(row) {
  if (!row.next_at) return h("span", { class: "muted" }, row.state === "paused" ? "paused" : "never");
  if (row.late_s > 60) return h("span", { class: "badge", data: { tone: "bad" } }, stateIcon("quarantined"), `late by ${duration(row.late_s)}`);
  return [moment(row.next_at), h("span", { class: "sub" }, row.next_local)];
}

/** The last ticks as a row of shapes, the oldest first. */
function strip(ticks) {
  const one = (tick) => {
    const text = `${tick.local}: ${tick.kind}, ${state(tick)}${tick.reason ? `: ${tick.reason}` : ""}`;
    const shape = h("span", { class: "badge", data: { tone: toneOf(tick) } }, stateIcon(state(tick)));
    const inside = [shape, h("span", { class: "unseen" }, visible(text))];
    return tick.job ? h("a", { href: `#/job/${tick.job}`, title: visible(text) }, inside) : h("span", { title: visible(text) }, inside);
  };
  return h("div", { class: "ticks" }, ticks.toReversed().map(one));
}

function toneOf(tick) {
  if (["failed", "error", "missed", "quarantined"].includes(state(tick))) return "bad";
  if (["skipped"].includes(state(tick))) return "warn";
  return tick.outcome === "empty" ? "" : state(tick) === "succeeded" ? "good" : "accent";
}

export class Timers {
  title = "Timers";

  constructor({ query }) {
    this.before = query.get("before") ?? "";
  }

  async load() {
    this.data = await get(`/api/timers?before=${encodeURIComponent(this.before)}`);
  }

  concerns() {
    return true;
  }

  render(page) {
    const { timers } = this.data;
    const nothing = empty("No timers yet.", "Keep a spec with a cron section as a timer: ", command("nimble-jobs cron add SPEC"));
    return [h("h1", {}, "Timers"), h("section", { class: "sheet", "aria-label": "Timers" }, timers.length ? this.table(timers, page.readOnly) : nothing), this.pages(timers)];
  }

  pages(timers) {
    return pages(plural(timers.length, "timer"), this.before, this.data.next, (name) => `#/timers${name && `?before=${encodeURIComponent(name)}`}`);
  }

  table(timers, readOnly) {
    const columns = [
      { title: "Name", kind: "name", cell: (row) => [h("a", { href: page(row.name) }, said(row.name)), h("span", { class: "sub" }, said(row.words))] },
      { title: "State", cell: (row) => badge(row.state) },
      { title: "Next tick", label: "Next", cell: next },
      { title: "Last tick", label: "Last", cell: (row) => (row.last_tick ? [badge(row.last_state ?? row.last_outcome), h("span", { class: "sub" }, moment(row.last_tick))] : "–") },
      { title: "Past ticks", wide: true, cell: (row) => (row.ticks?.length ? strip(row.ticks) : "–") },
      { title: "Note", kind: "note-cell", cell: (row) => (row.last_reason || row.last_error ? h("span", { class: "clamp", title: visible(row.last_reason ?? row.last_error) }, message(row.last_reason ?? row.last_error)) : null) },
      ...(readOnly ? [] : [{ title: "", kind: "actions", cell: (row) => buttons(row, false) }]),
    ];
    return table(columns, timers, { caption: "Timers", key: (row) => row.name, open: (row) => page(row.name) });
  }
}

export class Timer {
  constructor({ parts }) {
    this.name = parts[0];
    this.title = this.name;
  }

  async load() {
    this.data = await get(at("timers", this.name));
  }

  concerns() {
    return true;
  }

  render(view) {
    const row = this.data;
    return [
      h("a", { class: "back", href: "#/timers" }, "← Timers"),
      h("div", { class: "head" }, h("h1", {}, said(row.name)), badge(row.state), buttons(row, view.readOnly)),
      h("div", { class: "columns" }, h("div", {}, this.past(row)), h("div", {}, this.coming(row), this.about(row))),
    ];
  }

  past(row) {
    if (!row.ticks.length) return section("Past ticks", empty("It has not fired yet.", "Run it now with: ", command(`nimble-jobs cron trigger ${row.name}`)));
    const columns = [
      { title: "Tick", kind: "name", cell: (tick) => [h("span", { title: absolute(tick.tick) }, tick.local), h("span", { class: "sub" }, tick.kind)] },
      { title: "Outcome", cell: (tick) => [badge(tick.outcome), tick.count > 1 ? h("span", { class: "sub" }, `with the next ${plural(tick.count - 1, "tick")}`) : null] },
      { title: "Job", cell: (tick) => (tick.job ? [jobLink(tick.job), h("span", { class: "sub" }, tick.state ? badge(tick.state) : null)] : "–") },
      { title: "Why", kind: "note-cell", cell: (tick) => (tick.reason || tick.error ? message(tick.reason ?? tick.error) : null) },
    ];
    return section("Past ticks", table(columns, row.ticks, { caption: "Past ticks, the newest first", key: (tick) => tick.tick }));
  }

  coming(row) {
    if (!row.next.length) return sheet("Next ticks", h("p", { class: "muted" }, row.state === "paused" ? "The timer is paused." : "There is none."));
    return sheet("Next ticks", facts(row.next.map((due) => [due.local, moment(due.at)])));
  }

  about(row) {
    return sheet(
      "About",
      facts([
        ["When", row.words],
        ["Expression", row.expression],
        ["Time zone", row.timezone],
        ["Overlap", row.overlap],
        ["Catch-up", row.catch_up],
        ["Since", moment(row.since)],
        ["File", row.file],
        ["Input", row.spec?.input?.source],
        ["Output", row.spec?.output?.path],
      ]),
    );
  }
}
