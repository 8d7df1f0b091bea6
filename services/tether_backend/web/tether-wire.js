/**
 * How `tether.js` talks: errors, back-off, and one connection to a conversation's stream, over `fetch` or a WebSocket.
 *
 * A connection says `heard()` for whatever comes, heartbeats too, and `frame({ name, data, id })` for each frame. It ends
 * by itself or by `close()`; `over` then resolves with the TetherError that ended it, or null, and never rejects. What it
 * still delivers after that is for its owner to ignore.
 */

const OPEN_MS = 15_000; // until the first frame of a connection
const BACKOFF_MIN_MS = 100;
const BACKOFF_MAX_MS = 10_000;
const ASKED_MAX_MS = 60_000; // what a server may ask us to wait
const FRAME_CHARS_MAX = 16 * 1024 * 1024; // a snapshot holds a page of history
export const AGAIN = new Set([0, 502, 503, 504]); // statuses (0: no answer) that say nothing of the effect
const CLOSE_NORMAL = 1000;

/** What went wrong, as the server's problem document says, or as no answer says it. */
export class TetherError extends Error {
  /** @param {{code: string, detail: string, title?: string, status?: number, retryable?: boolean,
   *   retry_after_s?: number, fields?: {field: string, remedy: string}[], context?: object}} problem */
  constructor(problem) {
    super(`${problem.code}: ${problem.detail}`);
    this.name = "TetherError";
    this.code = problem.code;
    this.detail = problem.detail;
    this.title = problem.title ?? "";
    this.status = problem.status ?? 0;
    this.retryable = problem.retryable ?? false;
    this.retryAfterS = problem.retry_after_s ?? null;
    this.fields = problem.fields ?? [];
    this.context = problem.context ?? {};
  }
}

const BY_STATUS = { 401: "UNAUTHENTICATED", 403: "FORBIDDEN", 404: "NOT_FOUND", 409: "REQUEST_CONFLICT" };

/** No answer, or none that says anything. */
export function unreachable(detail) {
  return new TetherError({ code: "RUNTIME_UNAVAILABLE", detail, status: 0, retryable: true });
}

/** Of an answer that is no success. @param {Response} response @returns {Promise<TetherError>} */
export async function errorOf(response) {
  try {
    const problem = await response.json();
    if (typeof problem.code === "string" && typeof problem.detail === "string") return new TetherError(problem);
  } catch {
    // a proxy's page: the status alone is known
  }
  const status = response.status;
  const code = BY_STATUS[status] ?? (status >= 500 ? "RUNTIME_UNAVAILABLE" : "INVALID");
  const detail = `the server answered ${status} without a problem document`;
  return new TetherError({ code, detail, status, retryable: AGAIN.has(status) });
}

/** A new id: `crypto.randomUUID` is missing where a page is not served over HTTPS or from loopback. */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `${prefix}_${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export class Backoff {
  failures = 0;

  /** Milliseconds to wait: doubling, bounded, with jitter; never less than the server asked for. */
  next(askedS) {
    const base = Math.min(BACKOFF_MIN_MS * 2 ** this.failures, BACKOFF_MAX_MS);
    this.failures = Math.min(this.failures + 1, 16);
    const wait = base * (0.5 + Math.random() / 2);
    return askedS ? Math.max(wait, Math.min(askedS * 1000, ASKED_MAX_MS) * (1 + Math.random() / 4)) : wait;
  }

  reset() {
    this.failures = 0;
  }
}

export function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Only what has a value. */
export function given(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined && value !== null));
}

function streamPath(conversation, end) {
  return `/v1/conversations/${encodeURIComponent(conversation)}/${end}`;
}

// --- connections: `over` settles once one is; `close` makes it so ---

/** Server-sent events over `fetch`: it sends the token as a header and sees heartbeats and statuses, which EventSource
 * does not. */
export function overFetch(client, conversation, cursor, until, { heard, frame }) {
  const abort = new AbortController();
  const late = setTimeout(() => abort.abort(), OPEN_MS);
  const run = async () => {
    try {
      const headers = given({ Accept: "text/event-stream", "Last-Event-ID": cursor });
      const response = await client.fetch(client.url(streamPath(conversation, "events"), { until }), {
        headers,
        signal: abort.signal,
      });
      clearTimeout(late);
      heard();
      if (response.status === 204) {
        frame({ name: "end", data: null, id: null });
        return null;
      }
      if (!response.ok) return await errorOf(response);
      if (!(response.headers.get("Content-Type") ?? "").startsWith("text/event-stream")) {
        return new TetherError({ code: "RUNTIME_UNAVAILABLE", detail: "no event stream is served there", status: 500 });
      }
      const parser = new SseParser(frame);
      const reader = response.body.getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return null;
        heard();
        parser.feed(value);
        if (abort.signal.aborted) return null;
      }
    } catch (error) {
      if (abort.signal.aborted) return unreachable("the connection was silent");
      return error instanceof TetherError ? error : unreachable(`the stream broke off (${error.message})`);
    } finally {
      clearTimeout(late);
    }
  };
  const closed = new Promise((resolve) => abort.signal.addEventListener("abort", resolve));
  const ran = run();
  const over = Promise.race([ran, closed.then(() => unreachable("the connection was silent"))]);
  ran.finally(() => abort.abort()); // releases a stream that is left early
  return { over, close: () => abort.abort() };
}

/** Why a handshake was refused, or null: a WebSocket does not say; the event stream's answer to the same question does. */
async function refusalOf(client, conversation, cursor, until) {
  const abort = new AbortController();
  try {
    const response = await client.fetch(client.url(streamPath(conversation, "events"), { until }), {
      headers: given({ Accept: "text/event-stream", "Last-Event-ID": cursor }),
      signal: abort.signal,
    });
    return response.ok ? null : await errorOf(response);
  } catch (error) {
    return error instanceof TetherError ? error : unreachable(String(error));
  } finally {
    abort.abort();
  }
}

/** One text message per frame. A WebSocket sends no header, so it is opened by a ticket, a new one each time. */
export function overWebSocket(client, conversation, cursor, until, { heard, frame }) {
  let socket = null;
  let closed = false;
  let settle;
  const over = new Promise((resolve) => (settle = resolve));
  const close = (why = unreachable("the connection was silent")) => {
    closed = true;
    clearTimeout(late);
    if (socket !== null) {
      socket.onopen = socket.onmessage = socket.onclose = socket.onerror = null;
      socket.close();
    }
    settle(why);
  };
  const late = setTimeout(close, OPEN_MS);
  const run = async () => {
    const { ticket } = await client.ticket(conversation);
    if (closed) return;
    heard();
    const url = client.url(streamPath(conversation, "ws"), { ticket, cursor, until });
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    socket = new WebSocket(url);
    let opened = false;
    socket.onopen = () => {
      opened = true;
      clearTimeout(late);
    };
    socket.onmessage = ({ data }) => {
      heard();
      let parsed;
      try {
        parsed = JSON.parse(data);
      } catch {
        close(unreachable("a frame that is no JSON"));
        return;
      }
      frame({ name: parsed.frame, data: parsed.data, id: parsed.id });
    };
    socket.onclose = async ({ code, reason }) => {
      const refusal = opened ? null : await refusalOf(client, conversation, cursor, until);
      if (refusal !== null) close(refusal);
      else close(code === CLOSE_NORMAL ? null : unreachable(`the connection was closed (${code}${reason && ` ${reason}`})`));
    };
  };
  run().catch((error) => close(error instanceof TetherError ? error : unreachable(String(error))));
  return { over, close: () => close() };
}

/** Bytes in, frames out, as the standard has it; chunks may cut anywhere. */
export class SseParser {
  #decoder = new TextDecoder("utf-8", { fatal: true });
  #pieces = []; // of the line that is not complete
  #afterCr = "";
  #name = "";
  #data = [];
  #id = null;
  #size = 0; // characters since the last frame
  #frame;

  /** @param {(frame: {name: string, data: any, id: string | null}) => void} frame  a heartbeat is a frame `hb` */
  constructor(frame) {
    this.#frame = frame;
  }

  /** Throws where it is no event stream (any more). @param {Uint8Array} chunk */
  feed(chunk) {
    let text = this.#afterCr + this.#decoder.decode(chunk, { stream: true });
    this.#afterCr = text.endsWith("\r") ? "\r" : ""; // a newline may follow it
    if (this.#afterCr) text = text.slice(0, -1);
    let start = 0;
    for (const end of text.matchAll(/\r\n|\n|\r/g)) {
      this.#pieces.push(text.slice(start, end.index));
      const line = this.#pieces.join("");
      this.#pieces = [];
      start = end.index + end[0].length;
      this.#line(line);
    }
    const rest = text.slice(start);
    this.#size += rest.length;
    if (rest) this.#pieces.push(rest);
    if (this.#size > FRAME_CHARS_MAX) throw new RangeError("a frame is too long");
  }

  #line(line) {
    if (line === "") {
      this.#dispatch();
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) {
      if (line.slice(1).trim() === "hb") this.#frame({ name: "hb", data: {}, id: null });
      return;
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
    else if (field === "id" && !value.includes("\0")) this.#id = value;
  }

  #dispatch() {
    const [name, data, id] = [this.#name || "message", this.#data, this.#id];
    [this.#name, this.#data, this.#id, this.#size] = ["", [], null, 0];
    if (data.length > 0) this.#frame({ name, data: JSON.parse(data.join("\n")), id });
  }
}
