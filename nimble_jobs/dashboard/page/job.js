// One job: how far it is, why it failed, what it learned, what its schedule is.

import { at, get } from "./api.js";
import { Curves } from "./curves.js";
import { h, said, visible } from "./dom.js";
import { absolute, clock, duration, micros, plural, rate, significant, size, whole } from "./format.js";
import { Log } from "./log.js";
import { badge, facts, jobButtons, jobLink, jobState, message, moment, progress, section, sheet, table, timing } from "./parts.js";

const FINAL = ["succeeded", "failed", "cancelled", "quarantined"];
const HITS = { miss: "built for this job", stored: "found in the store", resident: "already on the device" };

export class Job {
  constructor({ parts }) {
    this.id = parts[0];
    this.title = "Job";
    this.events = [];
    this.log = new Log(this.id);
    this.curves = new Curves();
    this.timeline = null;
  }

  async load() {
    const { job, spec_yaml: spec, words } = await get(at("jobs", this.id));
    Object.assign(this, { job, specText: spec, bottleneck: words.stages.at(-1)?.[1], title: job.name });
    await Promise.all([this.loadEvents(), this.log.load(job.id), this.loadCurves(), this.loadSchedule()]);
  }

  async loadEvents() {
    for (;;) {
      const last = this.events.at(-1)?.seq ?? 0;
      const { events } = await get(`${at("jobs", this.id, "events")}?after=${last}`);
      const fresh = events.filter((event) => event.seq > last);
      this.events.push(...fresh);
      if (!fresh.length) return;
    }
  }

  async loadCurves() {
    if (this.job.kind === "finetune") this.curves.take(await get(at("jobs", this.id, "curves")));
  }

  /** The stored schedule, once; it may have been removed since. */
  async loadSchedule() {
    const { key, replay_us: measured } = this.job.schedule; // without a measurement none was stored
    if (key && measured && this.stored?.key !== key) this.stored = await get(at("schedules", key)).catch(() => null);
  }

  concerns(change) {
    return change.job === this.id || this.job?.after.includes(change.job);
  }

  onProgress(rows) {
    const row = rows.find((each) => each.id === this.id);
    if (!row) return false;
    Object.assign(this.job, row);
    this.log.load(this.id);
    this.loadCurves().then(() => this.curves.draw());
    return true;
  }

  shown() {
    this.log.shown();
    this.curves.draw();
  }

  left() {
    this.log.close();
    this.curves.close();
  }

  render(page) {
    const { job } = this;
    return [
      h("a", { class: "back", href: "#/queue" }, "← Queue"),
      h("div", { class: "head" }, h("h1", {}, said(job.name)), jobState(job), jobButtons(job, page.readOnly, { small: false })),
      job.error ? h("div", { class: "note", data: { tone: "bad" } }, message(job.error)) : null,
      job.waits ? h("div", { class: "note" }, message(job.waits)) : null,
      this.schedule().fallback,
      h("div", { class: "columns" }, h("div", {}, this.main()), h("div", {}, this.side())),
      candidates(this.stored?.candidates),
      this.timelineSheet(),
    ];
  }

  main() {
    const log = this.job.attempt ? this.log.render(FINAL.includes(this.job.state)) : null;
    return [this.running(), this.learned(), this.failures(), this.outputs(), log, this.history(), this.spec()];
  }

  side() {
    return [this.about(), this.devices(), this.timings(), this.schedule().sheet, this.attempts()];
  }

  running() {
    const { job } = this;
    const bad = job.records_bad ? plural(job.records_bad, `bad ${job.unit}`) : null;
    const took = job.state === "running" ? timing(job) : job.elapsed_s === null ? null : `took ${duration(job.elapsed_s)}`;
    const words = [job.records_per_s ? rate(job.records_per_s, `${job.unit}s`) : null, took, job.doing, bad].filter(Boolean);
    if (!job.attempt) return sheet("Progress", h("p", { class: "muted" }, "It has not started yet."));
    return sheet("Progress", progress(job), words.length ? h("p", { class: "muted" }, words.join(" · ")) : null);
  }

  learned() {
    return this.job.kind === "finetune" ? sheet("Training", this.curves.render(FINAL.includes(this.job.state))) : null;
  }

  failures() {
    const { bad_kinds: kinds, unit } = this.job;
    if (!kinds.length) return null;
    const title = unit === "request" ? "Requests" : "Records";
    const columns = [
      { title, number: true, cell: (kind) => whole(kind.count), label: title },
      { title: "What was wrong", wide: true, cell: (kind) => said(kind.reason) },
      { title: "The first one", wide: true, cell: (kind) => said(kind.first), label: "The first one" },
    ];
    return section(`Bad ${unit}s`, table(columns, kinds, { caption: `Bad ${unit}s by what was wrong`, key: (kind) => kind.reason }));
  }

  history() {
    const line = (event) =>
      h(
        "li",
        { data: { key: String(event.seq) } },
        h("time", { class: "muted", datetime: event.at, title: absolute(event.at) }, clock(event.at)),
        said(event.kind, "kind"),
        h("div", { class: "text" }, said(event.message)),
      );
    return section("Events", h("ol", { class: "events", tabindex: "0", "aria-label": "Events, the newest first" }, this.events.toReversed().map(line)));
  }

  // Attempts that went back to the queue have a number, but do not count as tries.
  tries() {
    const { job } = this;
    const back = (job.attempts ?? []).filter((each) => each.outcome === "requeued" && each.number > job.attempts_before).length;
    const total = `${job.attempt} of ${job.max_attempts + job.attempts_before + back}`;
    return back ? `${total}, ${back} of which went back to the queue` : total;
  }

  about() {
    const { job } = this;
    const spec = job.spec;
    return sheet(
      "About",
      facts([
        ["Id", h("span", { class: "mono" }, job.id)],
        ["Kind", `${job.kind} of ${spec.model.source}`],
        ["Input", spec.input.source],
        ["Batch size", plural(spec.input.batch_size, "record")],
        ["Submitted", moment(job.created_at)],
        ["Started", job.started_at ? moment(job.started_at) : null],
        ["Ended", job.finished_at ? moment(job.finished_at) : null],
        [FINAL.includes(job.state) ? "Took" : "So far", job.elapsed_s === null ? null : duration(job.elapsed_s)],
        ["Attempt", job.attempt ? this.tries() : null],
        ["Priority", job.priority ? String(job.priority) : null],
        ["Group", job.group],
        ["Waits for", job.after.length ? job.after.map((id) => [jobLink(id), " "]) : null],
        ["Timer", job.tick ? h("a", { href: `#/timers/${encodeURIComponent(job.tick.timer)}` }, said(job.tick.timer)) : null],
        ["Worker", job.worker],
      ]),
    );
  }

  devices() {
    const { members } = this.job;
    if (!members?.length) return null;
    const one = (each) => [
      said(each.device),
      h("span", {}, badge(each.works ? "running" : "left"), " ", [plural(each.records_done, each.unit), each.records_per_s ? rate(each.records_per_s, `${each.unit}s`) : null, each.leads ? "leads" : null, each.phase].filter(Boolean).join(", "), each.error ? h("span", { class: "clamp muted", title: visible(each.error) }, said(each.error)) : null),
    ];
    return sheet("Devices", facts(members.map(one)));
  }

  timings() {
    const { timings } = this.job;
    const spans = [["Load", timings.load_s], ["Build", timings.build_s], ["Run", timings.run_s]].filter(([, value]) => value !== undefined && value !== null);
    const stages = timings.stages ?? [];
    if (!spans.length && !stages.length) return null;
    const stage = (each) =>
      h(
        "li",
        { data: each.name === timings.bottleneck ? { busiest: "" } : {} },
        said(each.name),
        h("progress", { max: 1, value: Math.min(1, each.busy), "aria-label": `${each.name}: share of the time at work`, data: { tone: each.name === timings.bottleneck ? "" : "still" } }),
        h("span", { class: "number" }, `${Math.round(100 * each.busy)}%`),
      );
    return sheet(
      "Timings",
      facts([...spans.map(([name, value]) => [name, duration(value)]), ["Rate", timings.records_per_s ? rate(timings.records_per_s, `${this.job.unit}s`) : null], ["Steps", timings.steps_per_s ? rate(timings.steps_per_s, "steps") : null]]),
      stages.length ? h("h3", {}, "How busy each stage was") : null,
      stages.length ? h("ul", { class: "stages" }, stages.map(stage)) : null,
      this.bottleneck ? h("p", {}, "Bottleneck: ", said(this.bottleneck)) : null,
    );
  }

  schedule() {
    const { schedule } = this.job;
    const fallback = schedule.fallback ? h("div", { class: "note", data: { tone: "warn" } }, "Ran in eager PyTorch: ", message(schedule.fallback)) : null;
    if (!schedule.key) return { fallback, sheet: null };
    const faster = schedule.replay_us && schedule.eager_us ? `${(schedule.eager_us / schedule.replay_us).toFixed(2)}×` : null;
    const pairs = [
      ["Schedule", this.stored ? h("a", { class: "mono", href: `#/store/${schedule.key}` }, schedule.key.slice(0, 12)) : "not stored"],
      ["Origin", this.stored ? (HITS[schedule.hit] ?? schedule.hit) : null],
      ["Missed", schedule.miss_reason],
      ["Runs", schedule.eager_is_faster ? "eager PyTorch, which is faster here" : schedule.runs],
      ["Replay", schedule.replay_us ? micros(schedule.replay_us) : null],
      ["Eager", schedule.eager_us ? micros(schedule.eager_us) : null],
      ["Speed-up", faster],
      ["Device", schedule.device],
      ["Streams", schedule.streams ? `${schedule.streams}, ${plural(schedule.syncs, "sync")}` : null],
      ["Memory", schedule.peak_bytes ? `${size(schedule.peak_bytes)} at the peak` : null],
      ["Error", schedule.error === undefined || schedule.error === null ? null : `${significant(schedule.error, 2)}, tolerance ${schedule.tolerance}`],
    ];
    return { fallback, sheet: sheet("Schedule", facts(pairs)) };
  }

  attempts() {
    const { attempts } = this.job;
    if (!attempts.length) return null;
    const one = (attempt) => [
      `${attempt.number}`,
      h("span", {}, badge(attempt.outcome ?? "running"), " ", h("span", { class: "muted" }, attempt.finished_at ? duration((Date.parse(attempt.finished_at) - Date.parse(attempt.started_at)) / 1000) : ""), attempt.error ? h("span", { class: "clamp muted", title: visible(attempt.error) }, said(attempt.error)) : null),
    ];
    return sheet("Attempts", facts(attempts.map(one)));
  }

  outputs() {
    const { outputs } = this.job;
    if (!outputs.path) return null;
    return sheet("Output", facts([["Folder", outputs.path], ["Files", outputs.files ? outputs.files.map((file) => [said(file), h("br")]) : null], ["Size", outputs.bytes ? size(outputs.bytes) : null]]));
  }

  spec() {
    return h("details", { class: "sheet", data: { key: "spec" } }, h("summary", {}, "Spec"), h("pre", { class: "spec", tabindex: "0", "aria-label": "Spec" }, visible(this.specText)));
  }

  timelineSheet() {
    if (!this.stored) return null;
    const path = at("jobs", this.id, "timeline.svg");
    return sheet("Timeline of a replay", h("a", { class: "drawing", href: path, target: "_blank", rel: "noopener" }, h("img", { class: "timeline", src: path, loading: "lazy", alt: "When each task of the schedule runs, a row for each stream. Opens alone in a new tab." })));
  }
}

/** The plans that were tried for a schedule. */
export function candidates(tried) {
  if (!tried?.length) return null;
  const columns = [
    { title: "Candidate", kind: "name", cell: (row) => [said(row.name), row.chosen ? h("span", { class: "sub" }, badge("succeeded", "chosen")) : null] },
    { title: "Replay", number: true, cell: (row) => micros(row.replay_us), label: "Replay" },
    { title: "Records", number: true, cell: (row) => rate(row.records_per_s), label: "Records" },
    { title: "Memory", number: true, cell: (row) => size(row.peak_bytes), label: "Memory" },
    { title: "Error", number: true, cell: (row) => (row.error === null || row.error === undefined ? "–" : significant(row.error, 2)), label: "Error" },
    { title: "Why", wide: true, cell: (row) => said(row.reason) },
  ];
  return section("Candidates", table(columns, tried, { caption: "Plans that were tried", key: (row) => row.name }));
}
