// The end of a job's log. It grows by itself, and stays where the reader is unless that is the end.

import { at, get } from "./api.js";
import { h, visible } from "./dom.js";
import { button } from "./parts.js";

const KEPT = 200_000; // characters; older ones leave the page, not the file

export class Log {
  constructor() {
    Object.assign(this, { text: "", offset: null, paused: false, busy: false, element: null });
  }

  async load(id) {
    if (this.busy || this.paused) return;
    this.busy = true;
    try {
      for (;;) {
        const chunk = await get(`${at("jobs", id, "log")}${this.offset === null ? "" : `?offset=${this.offset}`}`);
        const text = chunk.text ?? "";
        this.offset = chunk.offset;
        this.append(text);
        if (!text || chunk.end) return;
      }
    } finally {
      this.busy = false;
    }
  }

  append(text) {
    if (!text) return;
    const shown = visible(text);
    this.text = (this.text + shown).slice(-KEPT);
    if (!this.element) return;
    const atEnd = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 24;
    this.element.textContent = this.text;
    if (atEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  toggle() {
    this.paused = !this.paused;
    return this.paused ? "The log is paused." : "The log goes on.";
  }

  render(final) {
    const switching = final ? null : button("pause-log", this.paused ? "Go on" : "Pause", {}, { name: this.paused ? "Let the log go on" : "Pause the log" });
    return h(
      "section",
      { class: "sheet", "aria-label": "Log", data: { key: "log" } },
      h("div", { class: "title" }, h("h2", {}, "Log"), switching),
      h("pre", { class: "log", id: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log", dir: "auto", data: { keep: "", ...(final ? {} : { grows: "" }) } }, this.text),
    );
  }

  shown() {
    const element = document.querySelector("#log");
    if (!element || element === this.element) return;
    this.element = element;
    element.scrollTop = element.scrollHeight;
  }

  close() {
    this.element = null;
  }
}
