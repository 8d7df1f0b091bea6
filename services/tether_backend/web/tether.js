/**
 * Tether in a browser: requests, and a conversation's events across reconnects. An ES module without dependencies.
 *
 *     import { TetherClient } from "/static/tether.js";
 *     const client = new TetherClient({ token });
 *     const sub = client.follow("c1", { onHistory, onEvent, onState });
 *
 * `follow` has this course (states in capitals are told to `onState`):
 *
 *     LOADING ──history──▶ CONNECTING ──open──▶ REPLAYING ──live──▶ LIVE ──end──▶ ENDED
 *                              ▲                    │ cut, silence, damage, 5xx │
 *                              └──── back-off ── WAITING ◀──────────────────────┘
 *     401 → UNAUTHORIZED     another refusal → REFUSED     close() → CLOSED     (each of them final)
 *
 * Every connection has a number, `generation`. What an older one still delivers (a buffer that was read late, a tab that
 * was frozen) is ignored: only the newest connection moves the cursor and calls back. The cursor moves with each frame
 * and is where the next connection begins; what comes again is dropped by identity: (execution, ordinal..last), or id.
 */

import {
  AGAIN,
  Backoff,
  TetherError,
  errorOf,
  given,
  newId,
  overFetch,
  overWebSocket,
  sleep,
  unreachable,
} from "./tether-wire.js";

export { SseParser, TetherError } from "./tether-wire.js";

/** @typedef {{id: string, type: string, at: number, body: object, execution?: string, ordinal?: number, last?: number,
 *   generation?: number, replay: boolean}} TetherEvent  `id` only of a conversation's event */
/** @typedef {{conversation: string, cursor: string | null, messages: object[], responses: object[], failures: object[],
 *   executions: object[], items: object[], interactions: object[], gaps: object[], usage: object[],
 *   items_omitted?: number, before?: number}} History  `GET /v1/conversations/{c}` */
/** @typedef {"loading" | "connecting" | "replaying" | "live" | "waiting" | "unauthorized" | "refused" | "ended" |
 *   "closed"} State */
/** @typedef {{retryInMs?: number, error?: TetherError, generation: number}} StateDetail */
/**
 * @typedef {object} FollowOptions
 * @property {string} [cursor]  go on after it; without one the history is loaded first
 * @property {string} [until]   `response:{id}` or `idle`: then the subscription ends by itself
 * @property {"sse" | "ws"} [transport]  the client's unless given
 * @property {(history: History, why: "start" | "snapshot") => void} [onHistory]  replaces what was known, by identity
 * @property {(event: TetherEvent) => void} [onEvent]  each event once, in order
 * @property {() => void} [onLive]  a connection has told all that lay behind it; what follows is new
 * @property {(problem: TetherError) => void} [onProblem]  CURSOR_POSITION_CHANGED, RETENTION_GAP (a history follows), or
 *   an event that cannot be read
 * @property {(state: State, detail: StateDetail) => void} [onState]
 * @property {(end: object | null) => void} [onEnd]  what `until` asked for has come (null: it had come before)
 */

const HEARTBEAT_MS = 10_000; // unless the server tells another
const SILENT_HEARTBEATS = 2.5; // without any for so long, a connection is dead
const ANSWER_MS = 25_000; // the server's own waits (10 s at most), and what it does around them
const PATIENCE_MS = 10_000; // a request in doubt is repeated for so long
const SEND_PATIENCE_MS = 30_000;
const IDS_MAX = 4096; // conversation events remembered by id

/** One server's API. Calls reject with `TetherError`; a call in doubt is repeated under the same id, so it is done once. */
export class TetherClient {
  #baseUrl;
  #token;

  /** @param {{baseUrl?: string, token: string | (() => string | Promise<string>), transport?: "sse" | "ws",
   *   heartbeatMs?: number}} options  `baseUrl`: "" for the page's own server; `heartbeatMs`: unless the server tells */
  constructor({ baseUrl = "", token, transport = "sse", heartbeatMs = HEARTBEAT_MS }) {
    if (token === undefined || token === null) throw new TypeError("token: must be a string or a function giving one");
    if (transport !== "sse" && transport !== "ws") throw new TypeError('transport: must be "sse" or "ws"');
    this.#baseUrl = baseUrl.replace(/\/+$/, "");
    this.#token = token;
    this.transport = transport;
    this.heartbeatMs = heartbeatMs;
  }

  /** The address of a path of the API. @returns {URL} */
  url(path, query = {}) {
    const found = new URL(this.#baseUrl + path, globalThis.location?.href);
    for (const [name, value] of Object.entries(given(query))) found.searchParams.set(name, String(value));
    return found;
  }

  /** `fetch` with the token; rejects with TetherError where no answer came. */
  async fetch(url, { headers = {}, ...init } = {}) {
    const token = typeof this.#token === "function" ? await this.#token() : this.#token;
    try {
      return await fetch(url, {
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
        ...init,
        headers: { ...headers, Authorization: `Bearer ${token}` },
      });
    } catch (error) {
      if (init.signal?.aborted && init.signal.reason?.name !== "TimeoutError") throw error;
      throw unreachable(`${new URL(url).origin} does not answer (${error.message})`);
    }
  }

  async #ask(method, path, { query, body, headers = {}, patienceMs = PATIENCE_MS } = {}) {
    const deadline = Date.now() + patienceMs;
    const backoff = new Backoff();
    const init = { method, headers };
    if (body !== undefined) {
      init.body = JSON.stringify(body);
      init.headers = { ...headers, "Content-Type": "application/json" };
    }
    for (;;) {
      let failure;
      try {
        const response = await this.fetch(this.url(path, query), { ...init, signal: AbortSignal.timeout(ANSWER_MS) });
        if (response.ok) return await response.json();
        failure = await errorOf(response);
      } catch (error) {
        failure = error instanceof TetherError ? error : unreachable(`the answer broke off (${error.message})`);
      }
      const wait = backoff.next(failure.retryAfterS);
      if (!AGAIN.has(failure.status) || !failure.retryable || Date.now() + wait > deadline) throw failure;
      await sleep(wait);
    }
  }

  /** Newest first. `page`: the `next_page` of the page before. */
  conversations({ page, limit } = {}) {
    return this.#ask("GET", "/v1/conversations", { query: { page, limit } });
  }

  /** One page of a conversation, the newest unless `before` (of the page behind it) is given. @returns {Promise<History>} */
  history(conversation, { before, limit } = {}) {
    return this.#ask("GET", `/v1/conversations/${encodeURIComponent(conversation)}`, { query: { before, limit } });
  }

  /** The whole conversation as one document: `json` or `markdown`. @returns {Promise<Blob>} whole, or rejected */
  async exportConversation(conversation, format = "json") {
    const response = await this.fetch(this.url(`/v1/conversations/${encodeURIComponent(conversation)}/export`, { format }));
    if (!response.ok) throw await errorOf(response);
    try {
      return await response.blob();
    } catch (error) {
      throw unreachable(`the export broke off (${error.message})`);
    }
  }

  /** Delete a conversation for good. Answered at once; `deletion` tells how it stands. `force`: stop what runs first. */
  deleteConversation(conversation, { force, deletionId } = {}) {
    const query = given({ deletion_id: deletionId ?? newId("del"), force });
    return this.#ask("DELETE", `/v1/conversations/${encodeURIComponent(conversation)}`, { query });
  }

  deletion(conversation) {
    return this.#ask("GET", `/v1/conversations/${encodeURIComponent(conversation)}/deletion`);
  }

  /** An execution's items in order; `after`: that of the page before. */
  items(execution, { after, limit } = {}) {
    return this.#ask("GET", `/v1/executions/${encodeURIComponent(execution)}/items`, { query: { after, limit } });
  }

  /** A user's message. Repeated under the same `requestId` (made here unless given) it is still one message.
   * @param {string} conversation
   * @param {{content: string | {type: "text", text: string}[], requestId?: string, agent?: string | object,
   *   workspace?: string, mode?: string, resume?: "fresh" | "history", continuation?: "wait" | "continue",
   *   patienceMs?: number}} message  `resume`: what becomes of the agent's session after RESUME_FAILED */
  send(conversation, { content, requestId, agent, workspace, mode, resume, continuation, patienceMs = SEND_PATIENCE_MS }) {
    const body = given({
      request_id: requestId ?? newId("req"),
      content: typeof content === "string" ? [{ type: "text", text: content }] : content,
      agent: typeof agent === "string" ? { kind: agent } : agent,
      workspace,
      mode,
      resume,
      continuation,
    });
    return this.#ask("POST", `/v1/conversations/${encodeURIComponent(conversation)}/messages`, { body, patienceMs });
  }

  /** Answer what waits for a human. Of two answers one wins; the other is told INTERACTION_SETTLED.
   * @param {{decision: "allow" | "deny", text?: string, input?: object, answers?: Record<string, string[]>,
   *   execution?: string, controlId?: string}} answer */
  answer(conversation, interaction, { decision, text, input, answers, execution, controlId }) {
    const body = given({ decision, text, input, answers, execution, control_id: controlId });
    const path = `/v1/conversations/${encodeURIComponent(conversation)}/interactions/${encodeURIComponent(interaction)}`;
    return this.#ask("POST", path, { body });
  }

  /** End the turn. `status` "unknown": no reply in time; `control` tells later. */
  interrupt(execution, { controlId } = {}) {
    return this.#verb(execution, "interrupt", controlId);
  }

  /** End the process; its proof is the event `execution.ended`. */
  stop(execution, { controlId } = {}) {
    return this.#verb(execution, "stop", controlId);
  }

  #verb(execution, verb, controlId) {
    const headers = { "Idempotency-Key": controlId ?? newId("ctl") };
    return this.#ask("POST", `/v1/executions/${encodeURIComponent(execution)}/${verb}`, { headers });
  }

  /** What became of a control. */
  control(id, execution) {
    return this.#ask("GET", `/v1/controls/${encodeURIComponent(id)}`, { query: { execution } });
  }

  /** Newest first. `state`: `active`, or one phase. */
  executions({ conversation, state, page, limit } = {}) {
    return this.#ask("GET", "/v1/executions", { query: { conversation, state, page, limit } });
  }

  execution(id) {
    return this.#ask("GET", `/v1/executions/${encodeURIComponent(id)}`);
  }

  sandboxes() {
    return this.#ask("GET", "/v1/sandboxes");
  }

  sandbox(workspace) {
    return this.#ask("GET", `/v1/sandboxes/${encodeURIComponent(workspace)}`);
  }

  /** Begin or join a drain. `state` "running": ask `drainStatus` under the `drain` of the answer until it is over.
   * @param {{drainId?: string, graceS?: number, reason?: string, store?: string, include?: string}} [options] */
  drain(workspace, options = {}) {
    return this.#drains(workspace, "/drain", drainBody(options));
  }

  /** A drain of a sandbox in which nothing runs or waits, unless `force`. */
  suspend(workspace, { force, ...options } = {}) {
    return this.#drains(workspace, "/suspend", { ...drainBody(options), ...given({ force }) });
  }

  /** Drained first. `checkpoint` false: nothing of it is kept. */
  deleteSandbox(workspace, { checkpoint, ...options } = {}) {
    const path = `/v1/sandboxes/${encodeURIComponent(workspace)}`;
    return this.#ask("DELETE", path, { query: { ...drainBody(options), ...given({ checkpoint }) } });
  }

  #drains(workspace, verb, body) {
    return this.#ask("POST", `/v1/sandboxes/${encodeURIComponent(workspace)}${verb}`, { body });
  }

  drainStatus(workspace, drainId) {
    return this.#ask("GET", `/v1/sandboxes/${encodeURIComponent(workspace)}/drains/${encodeURIComponent(drainId)}`);
  }

  /** Wake a suspended sandbox; a message does so by itself. */
  resume(workspace) {
    return this.#ask("POST", `/v1/sandboxes/${encodeURIComponent(workspace)}/resume`);
  }

  /** A short-lived permit to open this conversation's streams, for what cannot send headers (EventSource, WebSocket).
   * @returns {Promise<{ticket: string, expires_at: number}>} */
  ticket(conversation) {
    // Not repeated here: whoever connects waits and tries as a whole.
    return this.#ask("POST", `/v1/conversations/${encodeURIComponent(conversation)}/tickets`, { patienceMs: 0 });
  }

  /** The conversation's events, until `close()` or an end. @param {FollowOptions} [options] @returns {Subscription} */
  follow(conversation, options = {}) {
    return new Subscription(this, conversation, options);
  }
}

/** With an id in any case: a request in doubt is repeated, and joins. */
function drainBody({ drainId, graceS, reason, store, include }) {
  return given({ drain_id: drainId ?? newId("drn"), grace_s: graceS, reason, store, include });
}

/** What the reader has, by identity. */
class Known {
  #applied = new Map();
  #ids = new Set();
  #requests = new Set();
  #responses = new Map(); // → outcome, null while it is under way

  clear() {
    for (const each of [this.#applied, this.#ids, this.#requests, this.#responses]) each.clear();
  }

  /** @param {History} history */
  learn(history) {
    for (const { execution, applied } of history.executions) {
      this.#applied.set(execution, Math.max(applied, this.#applied.get(execution) ?? 0));
    }
    for (const { request } of history.messages) this.#requests.add(request);
    for (const { response, outcome } of history.responses) this.#responses.set(response, outcome ?? null);
  }

  /** False where the reader has it already. @param {TetherEvent} event */
  add(event) {
    if (event.execution !== undefined) {
      const last = event.last ?? event.ordinal;
      if (last <= (this.#applied.get(event.execution) ?? 0)) return false;
      this.#applied.set(event.execution, last);
      return true;
    }
    if (this.#ids.has(event.id)) return false;
    this.#ids.add(event.id);
    if (this.#ids.size > IDS_MAX) this.#ids.delete(this.#ids.values().next().value);
    return !this.#inHistory(event);
  }

  #inHistory({ type, body }) {
    switch (type) {
      case "prompt.admitted":
        return this.#requests.has(body.request);
      case "response.created":
        return this.#responses.has(body.response);
      case "response.superseded":
        return this.#responses.get(body.response) === "superseded";
      default:
        return false;
    }
  }
}

/** A subscription: see the module. `cursor` and `generation` may be read at any time. */
export class Subscription {
  /** @type {string | null} the last id: where the next connection begins */
  cursor;
  /** the number of the newest connection */
  generation = 0;
  /** @type {State} */
  state = "loading";

  #client;
  #conversation;
  #options;
  #known = new Known();
  #backoff = new Backoff();
  #connection = null; // { close() } of the newest generation
  #wake = null; // ends the wait of a back-off
  #heardMs = 0;
  #heartbeatMs;
  #watch;
  #wasLive = false;
  #over = false;
  #listeners = [];

  constructor(client, conversation, options) {
    this.#client = client;
    this.#conversation = conversation;
    this.#options = options;
    this.#heartbeatMs = client.heartbeatMs;
    this.cursor = options.cursor ?? null;
    for (const [target, names] of [
      [globalThis.document, ["visibilitychange", "resume"]],
      [globalThis, ["pageshow", "online"]],
    ]) {
      for (const name of names) this.#listen(target, name);
    }
    this.#setWatch();
    queueMicrotask(() => this.#run().catch((error) => this.#fail(error)));
  }

  /** Final; no callback comes after `onState("closed")`, which comes before this returns. */
  close() {
    this.#finish("closed");
  }

  // --- course ---

  async #run() {
    if (this.cursor === null) {
      this.#tell("loading");
      if (!(await this.#load())) return;
    }
    while (!this.#over) {
      const generation = ++this.generation;
      this.#heardMs = Date.now();
      this.#tell("connecting");
      const failure = await this.#connect(generation);
      if (this.#over) return;
      this.generation++; // nothing that this connection still delivers counts
      if (this.#refused(failure)) return;
      await this.#pause(failure);
    }
  }

  /** The first page. A conversation that does not exist yet is an empty one. */
  async #load() {
    while (!this.#over) {
      try {
        const history = await this.#client.history(this.#conversation);
        if (this.#over) return false;
        this.#take(history, "start");
        this.cursor = history.cursor;
        this.#backoff.reset();
        return true;
      } catch (error) {
        const failure = error instanceof TetherError ? error : unreachable(String(error));
        if (this.#over) return false;
        if (failure.code === "NOT_FOUND") {
          this.#take(emptyHistory(this.#conversation), "start");
          return true;
        }
        if (this.#refused(failure)) return false;
        await this.#pause(failure);
      }
    }
    return false;
  }

  #take(history, why) {
    this.#known.learn(history);
    this.#call("onHistory", history, why);
  }

  /** One connection, until it is over. @returns {Promise<TetherError | null>} why, null for no fault */
  async #connect(generation) {
    const open = (this.#options.transport ?? this.#client.transport) === "ws" ? overWebSocket : overFetch;
    const connection = open(this.#client, this.#conversation, this.cursor, this.#options.until, {
      heard: () => {
        if (generation === this.generation) this.#heardMs = Date.now();
      },
      frame: (frame) => {
        if (generation === this.generation && !this.#over) this.#frame(frame);
      },
    });
    this.#connection = connection;
    const failure = await connection.over;
    this.#connection = null;
    return failure;
  }

  /** A failure that trying again would not mend. */
  #refused(failure) {
    if (failure === null || failure.retryable || AGAIN.has(failure.status) || failure.status >= 500) return false;
    this.#finish(failure.status === 401 ? "unauthorized" : "refused", { error: failure });
    return true;
  }

  async #pause(failure) {
    const retryInMs = this.#backoff.next(failure?.retryAfterS);
    this.#tell("waiting", given({ retryInMs, error: failure }));
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, retryInMs);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.#wake = null;
  }

  #fail(error) {
    this.#finish("refused", { error: error instanceof TetherError ? error : unreachable(String(error)) });
    throw error;
  }

  #finish(state, detail) {
    if (this.#over) return;
    this.#tell(state, detail);
    this.#over = true;
    this.generation++;
    clearInterval(this.#watch);
    for (const [target, name, listener] of this.#listeners) target.removeEventListener(name, listener);
    this.#connection?.close();
    this.#wake?.();
  }

  // --- frames ---

  #frame({ name, data, id }) {
    switch (name) {
      case "open":
        if (data.heartbeat_s) {
          this.#heartbeatMs = data.heartbeat_s * 1000;
          this.#setWatch();
        }
        this.#tell("replaying");
        break;
      case "message":
        this.#event(data);
        break;
      case "live":
        this.#wasLive = true;
        this.#tell("live");
        this.#call("onLive");
        break;
      case "problem":
        if (data.code === "CURSOR_POSITION_CHANGED") {
          this.#known.clear();
          this.#wasLive = false;
        }
        this.#call("onProblem", new TetherError(data));
        break;
      case "snapshot":
        this.#take(data.history, "snapshot");
        break;
      case "end":
        this.#call("onEnd", data);
        break;
      default:
        break; // a heartbeat, or a newer server's frame
    }
    if (name !== "open") this.#backoff.reset();
    if (id) this.cursor = id;
    if (name === "end") this.#finish("ended");
  }

  #event(event) {
    // What a later connection replays was stored meanwhile: to the reader it is new.
    if (this.#known.add(event)) this.#call("onEvent", this.#wasLive ? { ...event, replay: false } : event);
  }

  // --- liveness ---

  #setWatch() {
    clearInterval(this.#watch);
    this.#watch = setInterval(() => this.#check(), this.#heartbeatMs / 2);
  }

  /** A connection that has not even had a heartbeat is dead, whatever its socket says: a tab that was suspended, a
   * network that changed. */
  #check() {
    if (this.#over || this.#connection === null) return;
    if (Date.now() - this.#heardMs > SILENT_HEARTBEATS * this.#heartbeatMs) this.#connection.close();
  }

  #listen(target, name) {
    if (typeof target?.addEventListener !== "function") return;
    const listener = () => {
      if (globalThis.document?.visibilityState === "hidden" && name === "visibilitychange") return;
      this.#check();
      this.#wake?.(); // a wait that began while nobody looked, or without a network
    };
    target.addEventListener(name, listener);
    this.#listeners.push([target, name, listener]);
  }

  // --- callbacks ---

  #tell(state, detail = {}) {
    if (this.#over) return;
    this.state = state;
    this.#call("onState", state, { ...detail, generation: this.generation });
  }

  #call(name, ...values) {
    if (!this.#over) report(() => this.#options[name]?.(...values));
  }
}

/** A callback's exception is the page's: it is reported as uncaught, and the stream goes on. */
function report(call) {
  try {
    call();
  } catch (error) {
    if (typeof globalThis.reportError === "function") globalThis.reportError(error);
    else queueMicrotask(() => { throw error; });
  }
}

/** @returns {History} */
function emptyHistory(conversation) {
  return { conversation, cursor: null, messages: [], responses: [], failures: [], executions: [], items: [],
    interactions: [], gaps: [], usage: [] };
}
