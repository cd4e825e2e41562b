// The one stream of changes. It says when it is broken, and goes on after the last event that it has seen.

const RETRY_MS = 1000;
const SILENT_MS = 40_000; // the server says something every 15 s, so the way to it is dead, as when a tunnel hangs

export class Stream {
  /** `onChange`: an event of the store; `onProgress`: rows of running jobs; `onState`: live or reconnecting;
   * `onHello`: the stream goes on after a break. */
  constructor(handlers) {
    Object.assign(this, handlers, { seq: null, source: null, begun: false });
  }

  connect() {
    this.source?.close();
    const source = new EventSource(this.seq === null ? "/api/stream" : `/api/stream?after=${this.seq}`);
    this.source = source;
    this.heard();
    source.addEventListener("error", () => {
      this.onState("reconnecting");
      // A browser tries again by itself, unless the answer was no stream: then it is for us to do.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => source === this.source && this.connect(), RETRY_MS);
    });
    for (const name of ["hello", "reset", "event", "progress", "beat"]) source.addEventListener(name, () => this.heard());
    for (const name of ["hello", "reset"]) source.addEventListener(name, (message) => this.begin(message, name));
    source.addEventListener("event", (message) => this.take(message));
    source.addEventListener("progress", (message) => this.onProgress(JSON.parse(message.data)));
  }

  /** Begin to wait for the next sign of life. */
  heard() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => {
      this.onState("reconnecting");
      this.connect();
    }, SILENT_MS);
  }

  begin(message, name) {
    if (this.seq === null || name === "reset") this.seq = JSON.parse(message.data).last_seq;
    this.onState("live");
    if (this.begun) this.onHello();
    this.begun = true;
  }

  take(message) {
    const change = JSON.parse(message.data);
    if (change.seq <= this.seq) return; // sent again after a reconnection
    this.seq = change.seq;
    this.onChange(change);
  }
}
