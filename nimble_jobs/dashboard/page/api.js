// Requests to the server. Every refusal becomes an error in the server's own words.

const ANSWER_MS = 30_000; // a browser keeps few connections; questions that hang would leave none to reconnect with

let csrf = null;

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function useToken(token) {
  csrf = token;
}

async function answerOf(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", headers: { Accept: "application/json" }, signal: AbortSignal.timeout(ANSWER_MS), ...options });
  } catch {
    throw new Refused("the dashboard does not answer; start it again with: nimble-jobs dashboard", 0);
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  throw new Refused(body?.error?.message ?? `${path}: the server answered ${response.status}`, response.status);
}

export const get = (path) => answerOf(path, {});

export const post = (path, body = {}) =>
  answerOf(path, {
    method: "POST",
    headers: { Accept: "application/json", "Content-Type": "application/json", "X-CSRF-Token": csrf ?? "" },
    body: JSON.stringify(body),
  });

/** A path whose parts may hold any character. */
export const at = (...parts) => `/api/${parts.map(encodeURIComponent).join("/")}`;
