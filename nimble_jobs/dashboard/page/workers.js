// Workers and the GPUs of this machine.

import { get } from "./api.js";
import { h, said, visible } from "./dom.js";
import { duration, few, percent, rate, size } from "./format.js";
import { badge, button, command, empty, facts, jobLink, message, progress, sheet, timing } from "./parts.js";

const STATUS = { ready: "idle", busy: "running", pause: "paused", drain: "draining" };

export class Workers {
  title = "Workers";

  async load() {
    this.data = await get("/api/workers");
  }

  concerns() {
    return true;
  }

  onProgress(rows) {
    let known = false;
    for (const row of rows) {
      const worker = this.data?.workers.find((each) => each.job === row.id);
      if (worker) {
        worker.running = { ...worker.running, ...row };
        worker.progress_s = 0;
        known = true;
      }
    }
    return known;
  }

  render(page) {
    const { workers, gpus = [] } = this.data;
    const nothing = empty("No worker is running.", "Queued jobs wait until one does. Start one with: ", command("nimble-jobs worker start --detach"));
    return [
      h("div", { class: "head" }, h("h1", {}, "Workers")),
      workers.length ? h("div", { class: "cards" }, workers.map((row) => this.worker(row, page.readOnly))) : h("section", { class: "sheet" }, nothing),
      h("h2", { class: "large" }, "GPUs"),
      gpus.length ? h("div", { class: "cards" }, gpus.map((gpu) => this.gpu(gpu))) : h("section", { class: "sheet" }, empty("No GPU was found on this machine.", "Jobs run on the CPU. To see what was looked for: ", command("nimble-jobs doctor"))),
    ];
  }

  buttons(row) {
    const one = (verb, label, tone = "") => button("worker", label, { verb, id: row.id }, { name: `${label} worker ${row.id}`, tone });
    const paused = ["paused", "draining"].includes(row.status);
    return h("div", { class: "buttons" }, paused ? one("resume", "Resume") : one("pause", "Pause"), row.status === "draining" ? null : one("drain", "Drain", "danger"));
  }

  worker(row, readOnly) {
    const state = row.job ? "running" : row.status;
    const word = row.job && row.status === "ready" ? "running" : row.status === "ready" ? "idle" : row.status;
    return h(
      "section",
      { class: "sheet", "aria-label": `Worker ${visible(row.id)}`, data: { key: row.id } },
      h("div", { class: "title" }, h("h2", {}, said(row.id)), badge(word === "running" ? "running" : STATUS[row.status] ?? state, word), readOnly ? null : this.buttons(row)),
      h(
        "div",
        { class: "body" },
        row.health_words ? h("div", { class: "note", data: { tone: "warn" } }, message(row.health_words)) : null,
        Object.entries(row.failing ?? {}).map(([duty, reason]) => h("div", { class: "note", data: { tone: "warn" } }, said(`${duty} failed and will be retried: ${reason}`))),
        this.job(row),
        facts([
          ["Device", row.device],
          ["Up", h("span", {}, `${duration(row.up_s)}, process ${row.pid}${row.host ? ` on ${visible(row.host)}` : ""}`)],
          ["Last progress", row.progress_s === null ? null : row.progress_s < 1 ? "now" : `${duration(row.progress_s)} ago`],
          ["On its device", row.resident_bytes ? size(row.resident_bytes) : null],
          ["Memory", row.host_memory_bytes ? `${size(row.host_memory_bytes)} of the host` : null],
          ["Residents", row.residents.length ? row.residents.map((key) => [h("a", { class: "mono", href: `#/store/${key}` }, few(key)), " "]) : "none"],
        ]),
      ),
    );
  }

  job(row) {
    if (!row.job) return h("p", { class: "muted" }, "It runs no job now.");
    const job = row.running;
    if (!job) return h("p", {}, "Runs ", jobLink(row.job));
    return h("div", { class: "running" }, h("p", {}, jobLink(job.id, job.name), h("span", { class: "muted" }, ` · ${[job.doing ?? job.phase, job.records_per_s ? rate(job.records_per_s, "records") : null, timing(job)].filter((word) => word && word !== "–").join(" · ")}`)), progress(job));
  }

  gpu(gpu) {
    return sheet(
      `GPU ${gpu.index}: ${gpu.name}`,
      meter("Memory", gpu.memory_used_bytes, gpu.memory_total_bytes),
      facts([["Busy", gpu.utilisation === null || gpu.utilisation === undefined ? null : percent(gpu.utilisation)], ["Temperature", gpu.temperature_c ? `${gpu.temperature_c} °C` : null], ["Power", gpu.power_w ? `${Math.round(gpu.power_w)} W` : null]]),
    );
  }
}

function meter(label, used, total) {
  const bar = h("progress", { max: total || 1, value: used, "aria-label": label, data: { tone: "" } });
  return h("div", { class: "bar" }, h("span", {}, h("b", {}, label), total ? `${size(used)} of ${size(total)}` : size(used)), bar);
}
