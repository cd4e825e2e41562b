// The store: which schedules there are, what they save, and why they were missed.

import { at, get } from "./api.js";
import { h, said, visible } from "./dom.js";
import { duration, few, micros, percent, plural, shape, size, whole } from "./format.js";
import { candidates } from "./job.js";
import { badge, command, empty, facts, message, moment, pages, section, sheet, table, tile } from "./parts.js";

export function scheduleState(row) {
  return row.state === "ready" && row.resident.length ? badge("resident") : badge(row.state);
}

function speedup(row) {
  if (row.runs === "eager") return "eager is faster";
  return row.speedup ? `${row.speedup.toFixed(2)}×` : "–";
}

export class Store {
  title = "Store";

  constructor({ query }) {
    this.before = query.get("before") ?? "";
  }

  async load() {
    this.data = await get("/api/store");
    if (this.before) Object.assign(this.data, await get(`/api/schedules?before=${encodeURIComponent(this.before)}`));
  }

  concerns(change) {
    return ["schedule", "succeeded", "failed", "quarantined", "cache"].includes(change.kind);
  }

  render() {
    const { schedules, stats } = this.data;
    const nothing = empty("No schedules yet.", "The first job of a model builds one, or: ", command("nimble-jobs cache build SPEC"));
    const turn = pages(plural(schedules.length, "schedule"), this.before, this.data.next, (before) => `#/store${before && `?before=${before}`}`);
    return [h("h1", {}, "Store"), this.tiles(stats), schedules.length ? this.devices(schedules) : h("section", { class: "sheet" }, nothing), turn, this.misses(stats)];
  }

  tiles(stats) {
    const hits = stats.uses.resident + stats.uses.stored;
    const share = stats.uses.total ? `${percent(hits / stats.uses.total)} of ${plural(stats.uses.total, "use")}` : "no uses yet";
    return h("div", { class: "tiles" }, tile(whole(stats.schedules), "schedules"), tile(size(stats.bytes), "on disk"), tile(whole(hits), `hits, ${share}`), tile(duration(stats.saved_s), "of building saved by hits"));
  }

  devices(schedules) {
    const devices = [...new Set(schedules.map((row) => row.device))];
    return devices.map((device) => this.device(device, schedules.filter((row) => row.device === device)));
  }

  device(device, rows) {
    const columns = [
      { title: "Model", kind: "name", cell: (row) => [h("a", { href: `#/store/${row.key}` }, said(row.model)), h("span", { class: "sub" }, said(shape(row.input)), ` · ${row.dtype} · ${row.mode}`)] },
      { title: "State", cell: (row) => scheduleState(row) },
      { title: "Replay", number: true, cell: (row) => micros(row.replay_us), label: "Replay" },
      { title: "Eager", number: true, cell: (row) => micros(row.eager_us), label: "Eager" },
      { title: "Speed-up", number: true, cell: speedup, label: "Speed-up" },
      { title: "Streams", number: true, cell: (row) => whole(row.streams), label: "Streams" },
      { title: "Size", number: true, cell: (row) => size(row.bytes), label: "Size" },
      { title: "Hits", number: true, cell: (row) => whole(row.hits), label: "Hits" },
      { title: "Used", cell: (row) => moment(row.last_used_at), label: "Used" },
      { title: "Note", kind: (row) => `note-cell${row.state === "quarantined" ? " bad" : ""}`, cell: (row) => (row.reason ? h("span", { class: "clamp", title: visible(row.reason) }, message(row.reason.replace(`schedule ${row.key}: `, ""))) : null) },
    ];
    return section(device, table(columns, rows, { caption: `Schedules for ${visible(device)}`, key: (row) => row.key, open: (row) => `#/store/${row.key}` }));
  }

  misses(stats) {
    const reasons = Object.entries(stats.misses);
    const recent = this.data.recent_misses ?? [];
    if (!reasons.length && !recent.length) return null;
    const columns = [
      { title: "Misses", number: true, cell: ([, count]) => whole(count), label: "Misses" },
      { title: "Why", wide: true, cell: ([reason]) => said(reason) },
    ];
    return section("Why schedules were missed", table(columns, reasons, { caption: "Misses by reason", key: ([reason]) => reason }), this.recent(recent));
  }

  recent(rows) {
    if (!rows.length) return null;
    const columns = [
      { title: "When", cell: (row) => moment(row.at) },
      { title: "Job", cell: (row) => h("a", { href: `#/job/${row.job}` }, said(row.name ?? row.job)) },
      { title: "Why", wide: true, cell: (row) => said(row.reason) },
    ];
    return [h("h2", { class: "next" }, "The last misses"), table(columns, rows, { caption: "The last misses", key: (row) => row.job })];
  }
}

export class Schedule {
  constructor({ parts }) {
    this.key = parts[0];
    this.title = `Schedule ${few(this.key)}`;
  }

  async load() {
    this.data = await get(at("schedules", this.key));
  }

  concerns(change) {
    return change.data?.key === this.key;
  }

  render() {
    const row = this.data;
    const { graph, check, memory } = row;
    const about = [
      ["Key", h("span", { class: "mono" }, few(row.key))],
      ["Input", row.input],
      ["Mode", `${row.mode}, ${row.dtype}`],
      ["Device", row.device],
      ["Replay", micros(row.replay_us)],
      ["Eager", micros(row.eager_us)],
      ["Speed-up", speedup(row)],
      ["Hits", `${whole(row.hits)}, ${whole(row.resident_hits)} of them resident`],
      ["Last used", moment(row.last_used_at)],
      ["Built", h("span", {}, moment(row.created_at), `, in ${duration(row.build_s)}`)],
      ["Size", size(row.bytes)],
      ["Error", check ? `${check.error === null ? "not finite" : Number(check.error.toPrecision(2))}, tolerance ${check.tolerance}` : null],
    ];
    const shape = graph
      ? [
          ["Tasks", whole(graph.tasks)],
          ["Width", whole(graph.width)],
          ["Streams", whole(row.streams)],
          ["Syncs", `${whole(graph.syncs_needed ?? row.syncs)} needed, ${whole(graph.syncs_used ?? row.syncs)} used`],
          ["Critical path", micros(graph.critical_path_us)],
          ["All work", micros(graph.total_work_us)],
          ["Memory", memory ? `${size(memory.peak_bytes)} at the peak` : null],
        ]
      : null;
    return [
      h("a", { class: "back", href: "#/store" }, "← Store"),
      h("div", { class: "head" }, h("h1", {}, said(row.model)), scheduleState(row)),
      row.reason ? h("div", { class: "note", data: { tone: "bad" } }, message(row.reason)) : null,
      h("div", { class: "columns" }, h("div", {}, sheet("About", facts(about))), h("div", {}, shape ? sheet("Graph", facts(shape)) : null)),
      candidates(row.candidates),
      h("details", { class: "sheet", data: { key: "parts" } }, h("summary", {}, "Key: what the schedule depends on"), h("div", { class: "body" }, facts(Object.entries(row.key_parts ?? {}).map(([name, value]) => [visible(name), typeof value === "string" ? value : JSON.stringify(value)])))),
    ];
  }
}
