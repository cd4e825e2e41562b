// Pieces that several views share: states, times, tables, bars, buttons, empty views.

import { h, icon, said, visible } from "./dom.js";
import { absolute, duration, few, percent, plural, rate, relative, whole } from "./format.js";

// icon and tone of each state; the word always stands beside them
const STATES = {
  running: ["running", "accent"],
  queued: ["queued", ""],
  held: ["held", "warn"],
  waiting: ["queued", ""],
  succeeded: ["succeeded", "good"],
  submitted: ["succeeded", "good"],
  ready: ["succeeded", "good"],
  resident: ["succeeded", "good"],
  active: ["running", "good"],
  failed: ["failed", "bad"],
  error: ["failed", "bad"],
  missed: ["failed", "bad"],
  lost: ["failed", "bad"],
  damaged: ["quarantined", "bad"],
  quarantined: ["quarantined", "bad"],
  cancelled: ["cancelled", ""],
  skipped: ["cancelled", "warn"],
  stale: ["queued", "warn"],
  paused: ["held", "warn"],
  draining: ["held", "warn"],
  starting: ["queued", ""],
  idle: ["empty", ""],
  empty: ["empty", ""],
};

export const stateIcon = (state) => icon(STATES[state]?.[0] ?? "empty");

export function badge(state, word = state) {
  return h("span", { class: "badge", data: { tone: STATES[state]?.[1] ?? "" } }, stateIcon(state), word);
}

/** The state that a reader should see: a held job is queued, and a running one may still prepare. */
export function jobState(job) {
  if (job.held && job.state === "queued") return badge("held");
  if (job.cancel_requested && job.state === "running") return badge("running", "cancelling");
  if (job.state === "running" && job.phase && job.phase !== "run") return badge("running", job.phase);
  return badge(job.state);
}

/** A moment as its distance from now, with the date and time in its title. */
export function moment(iso) {
  if (!iso) return h("span", { class: "muted" }, "–");
  return h("time", { datetime: iso, title: absolute(iso), data: { relative: "" } }, relative(iso));
}

/** Bring all distances up to date. */
export function tick(root = document) {
  for (const element of root.querySelectorAll("time[data-relative]")) {
    const text = relative(element.dateTime);
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Records done, and of how many: with a bar as long as some are left. */
export function progress(job) {
  const { records_done: done, records_total: total, unit = "record" } = job;
  if (total === 0) return h("span", { class: "muted" }, `no ${unit}s`);
  if (total === null || total === undefined) return done ? plural(done, unit) : "–";
  if (done === total && job.state === "succeeded") return plural(total, unit);
  const counts = `${whole(done)} of ${whole(total)}`;
  const label = `${visible(job.name)}: ${counts} ${unit}s`;
  const tone = { failed: "bad", quarantined: "bad", running: "" }[job.state] ?? "still";
  const bar = h("progress", { max: total, value: done, "aria-label": label, data: { tone } });
  return h("div", { class: "bar" }, h("span", {}, h("b", {}, percent(done / total)), counts), bar);
}

export function remaining(job) {
  return job.state === "running" ? (job.remaining_s ?? null) : null;
}

/** How long it took; while it runs, how long it will still take. */
export function timing(job) {
  const left = remaining(job);
  if (left !== null) return `${duration(left)} left`;
  return job.elapsed_s === null ? "–" : duration(job.elapsed_s);
}

export const speed = (job) => (job.state === "queued" ? "–" : rate(job.records_per_s));

export function button(action, label, data = {}, { name = null, tone = "", small = true, disabled = false } = {}) {
  const className = [small && "small", tone].filter(Boolean).join(" ");
  return h("button", { type: "button", class: className, disabled, "aria-label": name, data: { action, ...data } }, label);
}

/** The buttons of a job: only what its state allows. */
export function jobButtons(job, readOnly, { small = true } = {}) {
  if (readOnly) return null;
  const about = visible(job.name);
  const one = (verb, label, tone = "") =>
    button("job", label, { verb, id: job.id, name: job.name }, { name: `${label} ${about}`, tone, small });
  const found = [];
  if (job.state === "queued") found.push(job.held ? one("release", "Release") : one("hold", "Hold"));
  if (job.state === "queued" || (job.state === "running" && !job.cancel_requested)) found.push(one("cancel", "Cancel"));
  if (["failed", "cancelled", "quarantined"].includes(job.state)) found.push(one("retry", "Retry"));
  return found.length ? h("div", { class: "buttons" }, found) : null;
}

/** A table. Each column: {title, cell(row), number, wide, label, kind}; `label` names the value on a narrow screen. */
export function table(columns, rows, { caption, key, open = null }) {
  const head = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.title || h("span", { class: "unseen" }, "Actions")),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      { role: "row", data: { key: key(row), ...(open ? { open: open(row) } : {}) } },
      columns.map((column) => {
        const value = column.cell(row);
        const classes = [column.number && "number", column.wide && "wide", typeof column.kind === "function" ? column.kind(row) : column.kind];
        const dull = value === null || value === "–";
        return h(
          "td",
          { role: "cell", class: classes.filter(Boolean).join(" ") || null, data: { ...(column.label ? { label: column.label } : {}), ...(dull ? { dull: "" } : {}) } },
          value,
        );
      }),
    ),
  );
  return h(
    "table",
    { role: "table" },
    h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, body),
  );
}

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "string" ? said(value) : value)]));
}

/** A part of a view, below its title. Tables reach from edge to edge; for anything else there is `sheet`. */
export function section(title, ...body) {
  return h("section", { class: "sheet", "aria-label": visible(title), data: { key: title } }, h("h2", {}, said(title)), body);
}

export const sheet = (title, ...body) => section(title, h("div", { class: "body" }, body));

export function tile(value, label) {
  return h("div", { class: "sheet tile" }, h("b", {}, value), h("span", {}, label));
}

/** Links to the newest rows and to those that follow; `to(before)` is the address of a page. */
export function pages(count, before, next, to) {
  if (!next && !before) return null;
  const newest = before ? h("a", { href: to("") }, "First page") : null;
  const older = next ? h("a", { href: to(next) }, "Next page") : null;
  return h("div", { class: "pages" }, count, h("div", { class: "buttons" }, newest, older));
}

/** What to do where there is nothing to show: the very command. */
export function empty(what, ...next) {
  return h("div", { class: "empty" }, h("strong", {}, what), h("p", {}, next));
}

export const command = (text) => h("code", {}, visible(text));

/** A message of the server, its commands as commands: text behind `with: ` or between backquotes. */
export function message(text) {
  const parts = visible(text).split(/(`[^`]+`|(?<=: )nimble-jobs [^;,]+|^nimble-jobs \w+ [A-Z]+\b)/);
  return h("bdi", {}, parts.map((part, index) => (index % 2 ? command(part.replaceAll("`", "")) : part)));
}

export const jobLink = (id, name = null) =>
  h("a", { href: `#/job/${encodeURIComponent(id)}` }, name === null ? h("span", { class: "mono" }, few(id)) : said(name));
