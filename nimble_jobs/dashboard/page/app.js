// The page: which view is shown, its data, the one stream that keeps it fresh, buttons and keys.

import { at, get, post, useToken } from "./api.js";
import { h, icon, morphChildren, visible } from "./dom.js";
import { Job } from "./job.js";
import { plural, whole } from "./format.js";
import { message, tick } from "./parts.js";
import { Queue } from "./queue.js";
import { Schedule, Store } from "./store.js";
import { Stream } from "./stream.js";
import { Timer, Timers } from "./timers.js";
import { Workers } from "./workers.js";

const VIEWS = { queue: [Queue], job: [Queue, Job], store: [Store, Schedule], timers: [Timers, Timer], workers: [Workers] };
const NAV = ["queue", "store", "timers", "workers"];
const QUIET_MS = 400; // changes that come together are shown together
const OVERVIEW_MS = 10_000; // some trouble, such as a stuck worker, comes without an event
const $ = (selector) => document.querySelector(selector);

class Page {
  overview = null;
  view = null;
  turn = 0;
  pending = null; // the timer of the next reading
  reading = Promise.resolve();
  queued = null; // the reading after that one

  get readOnly() {
    return Boolean(this.overview?.read_only);
  }

  async start() {
    addEventListener("hashchange", () => this.go());
    document.addEventListener("click", (event) => this.clicked(event));
    document.addEventListener("submit", (event) => event.preventDefault());
    document.addEventListener("input", (event) => this.edited(event));
    document.addEventListener("keydown", (event) => this.pressed(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view?.shown?.());
    this.shortcuts($("#shortcuts"));
    setInterval(() => tick(), 1000);
    setInterval(() => this.refresh(), OVERVIEW_MS);
    await this.refreshOverview();
    this.stream = new Stream({
      onChange: (change) => this.changed(change),
      onProgress: (news) => this.progressed(news),
      onState: (state) => this.connection(state),
      onHello: () => (this.view ? this.stir(true) : this.go()),
    });
    this.stream.seq = this.overview?.last_seq ?? null;
    this.stream.connect();
    if (this.turn === 0) await this.go();
    else this.show(); // the reader has gone somewhere meanwhile
  }

  // ---- what is shown

  async go() {
    const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
    const [name, ...parts] = path.split("/").map(decodeURIComponent);
    const made = VIEWS[name || "queue"]?.[parts[0] ? 1 : 0] ?? Queue;
    const moved = this.view !== null;
    const turn = ++this.turn;
    const route = location.hash;
    const seen = this.stream?.seq;
    $("#main").setAttribute("aria-busy", "true");
    const view = new made({ parts, query: new URLSearchParams(search) });
    try {
      await view.load();
    } catch (error) {
      if (turn === this.turn) this.fail(error);
      return;
    }
    if (turn !== this.turn) return; // the reader has gone on meanwhile
    const same = this.view?.constructor === made && made === Queue;
    this.view?.left?.();
    this.view = view;
    for (const link of $("#nav").children) {
      if (link.dataset.view === (name === "job" ? "queue" : name || "queue")) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (!same) $("#main").replaceChildren(); // nothing of the view before may stay: not its log, not its curves
    this.show();
    if (this.stream?.seq !== seen) this.stir(true); // something has changed since the view was read
    $("#main").removeAttribute("aria-busy");
    $("#main").dataset.route = route || "#/queue";
    if (moved && !same) {
      scrollTo(0, 0);
      $("#main").focus({ preventScroll: true });
      this.say(visible(view.title));
    }
  }

  show() {
    if (!this.view || !this.overview) return;
    document.title = `${visible(this.view.title)} · nimble-jobs`;
    morphChildren($("#main"), h("main", {}, this.view.render(this)));
    this.view.shown?.();
    tick();
  }

  /** The address leads nowhere, or the server refuses. */
  fail(error) {
    this.view?.left?.();
    this.view = null;
    $("#main").removeAttribute("aria-busy");
    morphChildren($("#main"), h("main", {}, h("div", { class: "note", role: "alert", data: { tone: "bad" } }, message(error.message)), h("a", { href: "#/queue" }, "Show the queue")));
  }

  async refreshOverview() {
    try {
      this.overview = await get("/api/overview");
    } catch (error) {
      if (!this.overview) this.fail(error);
      return;
    }
    useToken(this.overview.csrf);
    this.health();
    const notes = [`State folder ${visible(this.overview.home.path)}`, `nimble-jobs ${this.overview.version}`];
    if (this.readOnly) notes.unshift("Read-only: the dashboard was started with --read-only, so there are no buttons.");
    morphChildren($("#foot"), h("footer", {}, notes.map((text) => h("span", {}, text))));
  }

  /** One sentence on whether all is well; below it what is not, and what to do. */
  health() {
    const { well, alerts, counts } = this.overview;
    const worst = alerts.some((alert) => alert.level === "problem") ? "bad" : alerts.length ? "warn" : "good";
    const { running, queued } = counts;
    const runs = running ? `${plural(running, "job")} ${running === 1 ? "runs" : "run"}` : `${well ? "no" : "No"} job runs`;
    const waits = queued ? `${whole(queued)} ${queued === 1 ? "waits" : "wait"}` : "none waits";
    const problems = alerts.filter((alert) => alert.level === "problem").length;
    const start = well ? "All is well: " : `${plural(problems, "problem")}. `;
    const line = h("p", { data: { tone: worst } }, icon(worst === "good" ? "succeeded" : "quarantined"), h("span", {}, `${start}${runs}, ${waits}.`));
    const list = alerts.map((alert) => this.alert(alert));
    morphChildren($("#health"), h("section", {}, line, list.length ? h("ul", { class: "alerts" }, list) : null));
  }

  alert({ level, title, words, hint }) {
    const listed = ["failed", "quarantined"].includes(title);
    const about = listed ? h("a", { href: `#/queue?state=${title}` }, "Show them") : null;
    const next = hint || about ? h("div", { class: "muted" }, hint ? message(hint) : null, hint && about ? " · " : null, about) : null;
    return h("li", { data: { tone: level === "problem" ? "bad" : "warn" } }, h("strong", {}, visible(title)), h("div", {}, message(words), next));
  }

  // ---- what changes

  changed(change) {
    document.dispatchEvent(new CustomEvent("nimble:change", { detail: change }));
    this.stir(this.view?.concerns(change));
  }

  progressed({ jobs, counts }) {
    if (this.overview) this.overview.counts = counts;
    if (this.view?.onProgress?.(jobs)) this.show();
  }

  /** Read anew, soon: the overview, and the view if it is `stale`. */
  stir(stale) {
    this.stale = this.stale || Boolean(stale);
    this.pending ??= setTimeout(() => this.refresh(), QUIET_MS);
  }

  /** Read what is stale. Only one reading runs and only one waits, so an old answer never replaces a newer one. */
  refresh() {
    clearTimeout(this.pending);
    this.pending = null;
    this.queued ??= this.reading.then(() => {
      this.queued = null;
      this.reading = this.read();
      return this.reading;
    });
    return this.queued;
  }

  async read() {
    const view = this.stale ? this.view : null;
    this.stale = false;
    try {
      await Promise.all([this.refreshOverview(), view?.load()]);
      this.show();
    } catch (error) {
      if (error.status) this.toast(error.message);
      else this.stale = true; // a server that is away is said beside the menu; once it is back, all is read anew
    }
    if (this.stale && $("#connection").dataset.state === "live") this.stir();
  }

  connection(state) {
    const element = $("#connection");
    if (element.dataset.state === state) return;
    element.dataset.state = state;
    element.lastElementChild.textContent = state;
    if (state === "live" && this.stale) this.stir();
  }

  // ---- what the reader does

  clicked(event) {
    const target = event.target.closest("[data-action]");
    if (target?.tagName === "BUTTON") this.act(target.dataset, target);
  }

  act(data, target) {
    if (data.action === "theme") this.theme();
    else if (data.action === "help") $("#help").showModal();
    else if (data.action === "close") target.closest("dialog").close();
    else if (data.action === "pause-log") this.say(this.view.log.toggle()), this.show();
    else if (data.action === "job") this.order(at("jobs", data.id, data.verb), data.verb, data.name);
    else if (data.action === "timer") this.order(at("timers", data.name, data.verb), data.verb === "trigger" ? "run" : data.verb, data.name);
    else if (data.action === "worker") this.order(at("workers", data.id, data.verb), data.verb, `worker ${data.id}`);
  }

  async order(path, verb, name) {
    const sure = {
      cancel: ["Cancel the job", "Keep it", "A queued job ends at once, a running one after its current batch. What it has finished stays."],
      drain: ["Drain the worker", "Keep it", "It finishes its current job, takes no other one, and exits."],
    }[verb];
    if (sure && !(await this.confirm(`${verb[0].toUpperCase()}${verb.slice(1)} ${visible(name)}?`, ...sure))) return;
    try {
      const answer = await post(path);
      this.toast(answer.message ?? `${visible(name)}: ${verb} was ordered.`, "good");
      this.stale = true;
      await this.refresh();
    } catch (error) {
      this.toast(error.message);
    }
  }

  confirm(title, yes, no, text) {
    const dialog = $("#confirm");
    for (const [id, value] of Object.entries({ title, text, yes, no })) $(`#confirm-${id}`).textContent = value;
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
      $("#confirm-yes").onclick = () => dialog.close("yes");
      dialog.onclose = () => resolve(dialog.returnValue === "yes");
    });
  }

  edited(event) {
    const form = event.target.closest('form[data-action="filter"]');
    if (!form) return;
    clearTimeout(this.typing);
    this.typing = setTimeout(() => location.replace(this.view.sought(form)), 250);
  }

  theme() {
    const theme = window.nextTheme();
    const words = { system: "as the system", light: "light", dark: "dark" }[theme];
    $("#theme").setAttribute("aria-label", `Colours: ${words}`);
    this.say(`Colours: ${words}.`);
    this.view?.shown?.();
  }

  /** Whether single keys are shortcuts: the reader may turn that off, and the page remembers it. */
  shortcuts(box) {
    try {
      box.checked = localStorage.shortcuts !== "off";
      box.addEventListener("change", () => (localStorage.shortcuts = box.checked ? "on" : "off"));
    } catch {
      box.checked = true; // storage is forbidden: the choice lasts as long as the page
    }
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!$("#shortcuts").checked) return;
    if (NAV[Number(event.key) - 1]) location.hash = `#/${NAV[Number(event.key) - 1]}`;
    else if (event.key === "?") $("#help").showModal();
    else if (event.key === "t") this.theme();
    else if (event.key === "/") this.search();
    else if (event.key === "j" || event.key === "k") this.step(event.key === "j" ? 1 : -1);
    else if (event.key === "p" && this.view?.log) document.querySelector('[data-action="pause-log"]')?.click();
    else return;
    event.preventDefault();
  }

  async search() {
    if (!$("#q")) {
      location.hash = "#/queue";
      await new Promise((resolve) => setTimeout(resolve, QUIET_MS));
    }
    $("#q")?.focus();
  }

  step(by) {
    const links = [...document.querySelectorAll("tr[data-open] td:first-child a")];
    const now = links.indexOf(document.activeElement.closest("tr")?.querySelector("td:first-child a"));
    links[Math.max(0, Math.min(links.length - 1, now + by))]?.focus();
  }

  // ---- what the reader is told

  say(text) {
    $("#said").textContent = text;
  }

  toast(text, tone = "bad") {
    const element = $("#toast");
    element.dataset.tone = tone;
    element.replaceChildren(message(text));
    element.hidden = false;
    clearTimeout(this.toasting);
    this.toasting = setTimeout(() => (element.hidden = true), tone === "bad" ? 12_000 : 4000);
  }
}

new Page().start();
