// The queue: what runs, what waits and why, what failed.

import { get } from "./api.js";
import { h, visible } from "./dom.js";
import { plural, whole } from "./format.js";
import { command, empty, jobButtons, jobLink, jobState, message, moment, pages, progress, speed, stateIcon, table, timing } from "./parts.js";

const LIMIT = 50;
const KINDS = ["score", "finetune"];
const STATES = ["running", "queued", "succeeded", "failed", "cancelled", "quarantined"];

function address(filters, changes) {
  const wanted = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...filters, before: "", ...changes })) if (value) wanted.set(name, value);
  return `#/queue${wanted.size ? `?${wanted}` : ""}`;
}

export class Queue {
  title = "Queue";

  constructor({ query }) {
    this.filters = Object.fromEntries(["state", "kind", "q", "before"].map((name) => [name, query.get(name) ?? ""]));
    this.data = null;
  }

  async load() {
    const wanted = new URLSearchParams({ limit: LIMIT });
    for (const [name, value] of Object.entries(this.filters)) if (value) wanted.set(name, value);
    this.data = await get(`/api/jobs?${wanted}`);
  }

  concerns() {
    return true;
  }

  /** A running job's figures between two events. */
  onProgress(rows) {
    let known = false;
    for (const row of rows) {
      const job = this.data?.jobs.find((each) => each.id === row.id);
      if (job) known = Boolean(Object.assign(job, row));
    }
    return known;
  }

  render(page) {
    const { jobs } = this.data;
    return [h("h1", { class: "unseen" }, "Queue"), this.bar(page.overview.counts), h("section", { class: "sheet", "aria-label": "Jobs" }, jobs.length ? this.table(jobs, page) : this.nothing(), this.pages(jobs))];
  }

  pages(jobs) {
    return pages(plural(jobs.length, "job"), this.filters.before, this.data.next, (before) => address(this.filters, { before }));
  }

  bar(counts) {
    const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
    const chip = (state, word, count) =>
      h(
        "a",
        { href: address(this.filters, { state }), "aria-current": this.filters.state === state ? "true" : null, data: { key: `chip-${state}` } },
        state ? stateIcon(state) : null,
        word,
        h("b", {}, whole(count)),
      );
    const shown = STATES.filter((state) => counts[state] || state === "running" || state === "queued" || state === this.filters.state);
    return h(
      "div",
      { class: "filters" },
      h("div", { class: "states", role: "group", "aria-label": "States" }, chip("", "All", all), shown.map((state) => chip(state, state, counts[state] ?? 0))),
      h(
        "form",
        { class: "search", role: "search", data: { action: "filter" } },
        h("label", { class: "unseen", for: "q" }, "Search names and errors"),
        h("input", { type: "search", id: "q", name: "q", placeholder: "Search names and errors", value: this.filters.q, autocomplete: "off", data: { action: "filter" } }),
        h("label", { class: "unseen", for: "kind" }, "Kind"),
        h(
          "select",
          { id: "kind", name: "kind", data: { action: "filter" } },
          ["", ...KINDS].map((kind) => h("option", { value: kind, selected: kind === this.filters.kind }, kind || "all kinds")),
        ),
      ),
    );
  }

  /** Where the search form leads. */
  sought(form) {
    return address(this.filters, { q: form.elements.q.value.trim(), kind: form.elements.kind.value });
  }

  table(jobs, page) {
    const columns = [
      { title: "Name", kind: "name", cell: (job) => [jobLink(job.id, job.name), h("span", { class: "sub whole" }, h("span", { class: "mono" }, job.id), ` · ${job.kind}`)] },
      { title: "State", cell: (job) => jobState(job) },
      { title: "Records", wide: true, cell: (job) => progress(job) },
      { title: "Rate", number: true, cell: speed, label: "Rate" },
      { title: "Time", number: true, cell: timing, label: "Time" },
      { title: "When", cell: (job) => moment(job.finished_at ?? job.started_at ?? job.created_at) },
      { title: "Note", kind: (job) => `note-cell${job.error ? " bad" : ""}`, cell: note },
      ...(page.readOnly ? [] : [{ title: "", kind: "actions", cell: (job) => jobButtons(job, false) }]),
    ];
    return table(columns, jobs, { caption: "Jobs, the newest first", key: (job) => job.id, open: (job) => `#/job/${encodeURIComponent(job.id)}` });
  }

  nothing() {
    const { state, kind, q, before } = this.filters;
    if (state || kind || q || before) return empty("No job matches.", h("a", { href: "#/queue" }, "Show all jobs"));
    return empty("No jobs yet.", "Submit one with: ", command("nimble-jobs submit SPEC"));
  }
}

function note(job) {
  const text = job.error ?? job.waits;
  return text ? h("span", { class: "clamp", title: visible(text) }, message(text)) : null;
}
