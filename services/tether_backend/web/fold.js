/* The fold of `tether.fold`, for a browser: an execution's events, in order of ordinal, become its state.
 *
 *     fold(state at w, events after w) = fold(all events)
 *
 * `apply` answers "applied", "duplicate" or "hole"; after a hole whoever reads fetches what is missing, or calls `skipTo`
 * and the gap is part of the state, once. Items are values: one that changes is replaced. `touched` names the items that
 * changed since it was last emptied, each "added" or "changed": a page redraws those and no others.
 * A body that lies about its shape stops nobody: it is told as a gap `corrupt`. Lengths are Unicode code points.
 */

export const RAW_ITEMS_MAX = 200;

const OUTCOMES = ["completed", "failed", "cancelled", "stopped", "drained", "lost", "never_started"];
const GAP_REASONS = [
  "spool_evicted", "retention_gap", "durability_gap", "corrupt", "position_changed", "quarantined", "limit",
];
const PROOFS = ["pid_namespace", "cgroup", "subreaper_sweep", "keeper_gone", "never_spawned", "provider", "not_needed"];
const LEFT_OPEN = { running: "unknown", pending: "expired", streaming: "partial" };

class Lie extends Error {}

// --- shapes: what a body must be ---

const has = (value, name) => Object.hasOwn(value, name);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const rule = (test) => ({ test });
const STRING = rule((value) => typeof value === "string");
const INTEGER = rule(Number.isInteger);
const NUMBER = rule((value) => typeof value === "number");
const BOOLEAN = rule((value) => typeof value === "boolean");
const OBJECT = rule(isObject);
const ANY = rule(() => true);
const OBJECTS = rule((value) => Array.isArray(value) && value.every(isObject));
const oneOf = (...values) => rule((value) => values.includes(value));
const some = (of) => ({ ...of, nullable: true, fallback: () => null }); // it, or null, or left out
const or = (of, fallback) => ({ ...of, fallback: () => fallback }); // left out: the fallback
const shaped = (shape) => ({ test: isObject, shape });
const listOf = (shape) => ({ test: Array.isArray, each: shape, fallback: () => [] });

/** `body` as `shape` says, with its defaults; unknown fields are left out. Throws Lie. */
function typed(body, shape) {
  if (!isObject(body)) throw new Lie("the body is no object");
  const found = {};
  for (const [name, of] of Object.entries(shape)) {
    const value = has(body, name) ? body[name] : undefined;
    if (value === undefined) {
      if (of.fallback === undefined) throw new Lie(`${name} is missing`);
      found[name] = of.fallback();
    } else if (value === null && of.nullable) found[name] = null;
    else if (!of.test(value)) throw new Lie(`${name} is not what it should be`);
    else if (of.shape) found[name] = typed(value, of.shape);
    else found[name] = of.each ? value.map((one) => typed(one, of.each)) : value;
  }
  return found;
}

const BLOB = { digest: STRING, bytes: INTEGER, kind: or(oneOf("artifact", "checkpoint"), "artifact") };
const CHOICES = rule((value) => Array.isArray(value) && value.every((one) => one === "fresh" || one === "history"));
const ERROR = { code: STRING, detail: or(STRING, ""), choices: some(CHOICES) };
const PROOF = { method: oneOf(...PROOFS), at: INTEGER, detail: some(STRING) };
const QUESTION = {
  id: STRING, question: STRING, header: some(STRING), options: or(OBJECTS, []), multiple: or(BOOLEAN, false),
};
const SHAPES = {
  started: {
    boot: STRING, instance: STRING, process: INTEGER, target: OBJECT, agent: STRING, request: STRING,
    adapter_version: STRING, resumed_from: some(STRING), key_source: some(STRING),
  },
  bound: {
    native_session: STRING, resumable: or(BOOLEAN, false), cli_version: some(STRING), model: some(STRING),
    cwd: some(STRING),
  },
  recovered: {
    from: some(STRING), process: INTEGER, why: oneOf("not_found", "chosen", "cut"), source: oneOf("native", "export"),
    rows: or(INTEGER, 0), partial: or(BOOLEAN, false), detail: some(STRING),
  },
  completed: {
    segment: STRING, text: STRING, partial: or(BOOLEAN, false), parent: some(STRING), blob: some(shaped(BLOB)),
    chars: some(INTEGER), redacted: some(INTEGER),
  },
  toolStarted: {
    tool: STRING, name: STRING, input: some(ANY), parent: some(STRING), blob: some(shaped(BLOB)),
    redacted: some(INTEGER),
  },
  toolCompleted: {
    tool: STRING, status: oneOf("ok", "error", "interrupted"), output: some(ANY), blob: some(shaped(BLOB)),
    detail: some(STRING), redacted: some(INTEGER),
  },
  requested: {
    interaction: STRING, kind: oneOf("approval", "question"), name: or(STRING, ""), input: some(ANY),
    tool: some(STRING), description: some(STRING), questions: listOf(QUESTION), options: or(OBJECTS, []),
    offered: some(OBJECT), blob: some(shaped(BLOB)), redacted: some(INTEGER),
  },
  resolved: {
    interaction: STRING, outcome: oneOf("answered", "denied", "expired", "cancelled"), control: some(STRING),
    detail: some(STRING), redacted: some(INTEGER),
  },
  receipt: {
    control: STRING, verb: STRING, status: oneOf("accepted", "delivered", "settled", "rejected", "unknown"),
    reason: some(STRING), detail: some(STRING), interaction: some(STRING), redacted: some(INTEGER),
  },
  usage: {
    turn: STRING, input_tokens: or(INTEGER, 0), output_tokens: or(INTEGER, 0), cache_read_tokens: or(INTEGER, 0),
    cache_write_tokens: or(INTEGER, 0), cost_usd: some(NUMBER), model: some(STRING),
  },
  background: { id: STRING, state: oneOf("started", "completed"), description: some(STRING) },
  responseEnded: { outcome: oneOf(...OUTCOMES), error: some(shaped(ERROR)) },
  executionEnded: {
    outcome: oneOf(...OUTCOMES), proof: some(shaped(PROOF)), exit: some(INTEGER),
    tail: or(oneOf("complete", "unknown"), "complete"), error: some(shaped(ERROR)),
  },
  gap: { from: some(INTEGER), to: some(INTEGER), reason: oneOf(...GAP_REASONS), detail: some(STRING) },
  raw: {
    stream: oneOf("stdout", "stderr"), preview: STRING, bytes: INTEGER, why: STRING, blob: some(shaped(BLOB)),
    redacted: some(INTEGER),
  },
  admitted: {
    request: STRING, prompt_sequence: INTEGER, content: OBJECTS, into: some(STRING), into_execution: some(STRING),
    author: some(STRING),
  },
  created: {
    request: STRING, response: STRING, response_generation: INTEGER, execution: STRING,
    execution_generation: INTEGER, agent: STRING,
  },
  failed: {
    request: STRING, response: some(STRING), code: STRING, detail: or(STRING, ""), retryable: or(BOOLEAN, false),
  },
  superseded: { request: STRING, response: STRING, by: STRING },
};

/** `value[name] = one` for a name from outside: `__proto__` is a name like any other. */
const own = (value, name, one) =>
  Object.defineProperty(value, name, { value: one, enumerable: true, writable: true, configurable: true });
const withoutNulls = (value) => Object.fromEntries(Object.entries(value).filter(([, one]) => one !== null));

// --- text ---

/** The length of a text in code points. */
export function points(text) {
  let count = text.length;
  for (let at = 0; at < text.length; at += 1) {
    const unit = text.charCodeAt(at);
    if (unit >= 0xd800 && unit <= 0xdbff && (text.charCodeAt(at + 1) & 0xfc00) === 0xdc00) {
      count -= 1;
      at += 1;
    }
  }
  return count;
}

/** The text without its first `count` code points. */
function after(text, count) {
  let at = 0;
  for (let left = count; left > 0 && at < text.length; left -= 1) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return text.slice(at);
}

/** A text that grows by deltas; a merged delta may overlap what is there already. */
export class GrowingText {
  constructor(text = "") {
    this.pieces = text ? [text] : [];
    this.length = points(text);
  }

  add(body) {
    const { text, offset } = body;
    if (typeof text !== "string" || !Number.isInteger(offset)) throw new Lie("a delta has a text and an offset");
    const fresh = offset < this.length ? after(text, this.length - offset) : text;
    if (!fresh) return;
    this.pieces.push(fresh);
    this.length += points(fresh);
  }

  value() {
    if (this.pieces.length > 1) this.pieces = [this.pieces.join("")];
    return this.pieces.length ? this.pieces[0] : "";
  }
}

// --- items ---

const DEFAULTS = {
  text: { redacted: 0, state: "streaming", text: "", parent: null, blob: null },
  tool: {
    state: "running", name: "", input: null, progress: "", output: null, parent: null, detail: null, blob: null,
    redacted: 0,
  },
  interaction: {
    state: "pending", asks: "approval", name: "", input: null, tool: null, description: null, questions: [],
    options: [], offered: null, control: null, redacted: 0,
  },
  session: { rows: 0, partial: false, from_session: null, detail: null },
  raw: { redacted: 0 },
  gap: { from_ordinal: null, to_ordinal: null, detail: null },
};
DEFAULTS.reasoning = DEFAULTS.text;

/** An item with all its fields, from one whose nulls and defaults were left out. */
export function itemOf(kind, id, fields = {}) {
  if (typeof id !== "string") throw new Lie("an id must be a text");
  return { kind, id, ...DEFAULTS[kind], ...fields };
}

const keyOf = (item) => `${item.kind}/${item.id}`;

const withText = (item, text) => ({ ...item, [item.kind === "tool" ? "progress" : "text"]: text });

/** An execution's state before any event. */
export function emptyState() {
  return {
    applied: 0, phase: "starting", outcome: null, response_outcome: null, error: null, agent: null, request: null,
    target: null, native_session: null, resumable: false, model: null, cli_version: null, started_at: null,
    response_ended_at: null, ended_at: null, proof: null, exit: null, tail: "complete", items: [],
    usage: {
      turns: 0, input_tokens: 0, output_tokens: 0, cache_read_tokens: 0, cache_write_tokens: 0, cost_usd: null,
    },
    usage_by_turn: {}, turns_completed: 0, model_request: null, background: [], receipts: {}, raw_omitted: 0,
    partial: false,
  };
}

export class ExecutionFold {
  /** `state`: as `freeze` gives it, whole or in part. */
  constructor(state = {}) {
    const blank = emptyState();
    const { items = [], ...head } = structuredClone({ ...blank, ...state });
    this.head = { ...head, usage: { ...blank.usage, ...head.usage } };
    this.touched = new Map();
    this.growing = new Map();
    this.items = new Map();
    this.rawCount = 0;
    this.pending = 0;
    for (const item of items) {
      this.items.set(keyOf(item), itemOf(item.kind, item.id, item));
      if (item.kind === "raw") this.rawCount += 1;
      if (item.kind === "interaction" && item.state === "pending") this.pending += 1;
    }
  }

  get applied() {
    return this.head.applied;
  }

  /** Apply the next event `{ordinal, last?, at, type, body}`. */
  apply(event) {
    const end = event.last ?? event.ordinal;
    if (end <= this.head.applied) return "duplicate";
    if (event.ordinal > this.head.applied + 1) return "hole";
    const handler = Object.hasOwn(HANDLERS, event.type) ? HANDLERS[event.type] : null;
    if (handler !== null) {
      try {
        handler.call(this, event.body, event);
      } catch (error) {
        if (!(error instanceof Lie || error instanceof TypeError)) throw error;
        this.gap(String(event.ordinal), "corrupt", event.ordinal, end, `${event.type} has a bad body`);
      }
    }
    this.head.applied = end;
    return "applied";
  }

  /** Give up the ordinals before `ordinal`: the state says so and goes on from there. */
  skipTo(ordinal, reason) {
    const first = this.head.applied + 1;
    if (ordinal <= first) return;
    this.gap(`skip-${first}`, reason, first, ordinal - 1, null);
    this.head.applied = ordinal - 1;
  }

  /** The state as of `applied`; the fold can go on. */
  freeze() {
    return structuredClone({ ...this.head, items: [...this.items.keys()].map((key) => this.item(key)) });
  }

  keys() {
    return [...this.items.keys()];
  }

  item(key) {
    const item = this.items.get(key);
    const text = this.growing.get(key);
    return item === undefined || text === undefined ? item : withText(item, text.value());
  }

  /** Put items before all others, as a page of earlier ones is loaded; one that is known by now keeps what it became. */
  prepend(items) {
    const whole = new Map();
    for (const one of items) {
      const known = this.items.get(keyOf(one));
      const item = itemOf(one.kind, one.id, one);
      const told = known && withoutNulls(known);
      whole.set(keyOf(one), told ? { ...item, ...told, name: known.name || item.name } : item);
      if (!known && one.kind === "interaction" && one.state === "pending") this.pending += 1;
    }
    for (const [key, item] of this.items) if (!whole.has(key)) whole.set(key, item);
    this.items = whole;
  }

  put(key, item) {
    if (this.touched.get(key) !== "added") this.touched.set(key, this.items.has(key) ? "changed" : "added");
    this.items.set(key, item);
  }

  gap(key, reason, first, last, detail) {
    this.head.partial = true;
    const fields = { reason, from_ordinal: first, to_ordinal: last, detail };
    this.put(`gap/${key}`, itemOf("gap", key, fields));
  }

  delta(kind, body) {
    if (!has(body, "segment")) throw new Lie("segment is missing");
    const key = `${kind}/${body.segment}`;
    const item = this.items.get(key) ?? itemOf(kind, body.segment, { parent: parentOf(body) });
    if (item.state === "streaming") this.grow(key, item, item.text, body);
  }

  grow(key, item, soFar, body) {
    const growing = this.growing.get(key) ?? new GrowingText(soFar);
    growing.add(body);
    this.growing.set(key, growing);
    const more = Number.isInteger(body.redacted) ? body.redacted : 0;
    this.put(key, more ? { ...item, redacted: item.redacted + more } : item);
  }

  completed(kind, body) {
    const told = typed(body, SHAPES.completed);
    const key = `${kind}/${told.segment}`;
    const growing = this.growing.get(key);
    const item = this.items.get(key);
    this.growing.delete(key);
    const soFar = growing?.value() ?? item?.text ?? "";
    // A preview never replaces the whole text that the deltas (or an earlier completion) gave already.
    const keeps = told.blob !== null && told.chars !== null && points(soFar) === told.chars;
    this.put(key, {
      ...itemOf(kind, told.segment),
      state: told.partial ? "partial" : "completed",
      text: keeps ? soFar : told.text,
      blob: keeps ? (item?.blob ?? null) : told.blob,
      redacted: keeps ? (item?.redacted ?? 0) : (told.redacted ?? 0),
      parent: item ? item.parent : told.parent,
    });
  }

  redactedIn(key) {
    return this.items.get(key)?.redacted ?? 0;
  }

  tool(id, changes) {
    const key = `tool/${id}`;
    this.put(key, { ...(this.items.get(key) ?? itemOf("tool", id)), ...changes });
  }

  phaseFromInteractions() {
    if (this.head.phase === "running" || this.head.phase === "waiting") {
      this.head.phase = this.pending > 0 ? "waiting" : "running";
    }
  }
}

function parentOf(body) {
  const parent = body.parent ?? null;
  if (parent !== null && typeof parent !== "string") throw new Lie("parent must be a text");
  return parent;
}

/** By type of event; `this` is the fold. */
const HANDLERS = {
  "execution.started"(body, event) {
    const { agent, request, target } = typed(body, SHAPES.started);
    const { head } = this;
    // Told again where the execution goes on in another process: the target is another, the beginning is not.
    if (head.phase === "starting") head.phase = "running";
    head.started_at ??= event.at;
    Object.assign(head, { agent, request, target });
  },
  "session.bound"(body) {
    const told = typed(body, SHAPES.bound);
    const { head } = this;
    head.native_session = told.native_session;
    head.resumable = head.resumable || told.resumable;
    head.model = told.model || head.model;
    head.cli_version = told.cli_version || head.cli_version;
  },
  "session.recovered"(body, event) {
    const { from, ...told } = typed(body, SHAPES.recovered);
    const id = String(event.ordinal);
    this.put(`session/${id}`, itemOf("session", id, { ...told, from_session: from }));
  },
  "text.delta"(body) {
    this.delta("text", body);
  },
  "reasoning.delta"(body) {
    this.delta("reasoning", body);
  },
  "text.completed"(body) {
    this.completed("text", body);
  },
  "reasoning.completed"(body) {
    this.completed("reasoning", body);
  },
  "text.discarded"(body) {
    if (!has(body, "segment")) throw new Lie("segment is missing");
    for (const kind of ["text", "reasoning"]) {
      const key = `${kind}/${body.segment}`;
      const item = this.items.get(key);
      if (item?.state === "streaming") {
        this.growing.delete(key);
        this.put(key, { ...item, state: "discarded", text: "" });
      }
    }
  },
  "tool.started"(body) {
    const { tool, name, input, parent, redacted } = typed(body, SHAPES.toolStarted);
    this.tool(tool, { name, input, parent, redacted: this.redactedIn(`tool/${tool}`) + (redacted ?? 0) });
  },
  "tool.progress"(body) {
    if (!has(body, "tool")) throw new Lie("tool is missing");
    const key = `tool/${body.tool}`;
    const item = this.items.get(key) ?? itemOf("tool", body.tool);
    this.grow(key, item, item.progress, body);
  },
  "tool.completed"(body) {
    const { tool, status, output, detail, blob, redacted } = typed(body, SHAPES.toolCompleted);
    const count = this.redactedIn(`tool/${tool}`) + (redacted ?? 0);
    const growing = this.growing.get(`tool/${tool}`);
    this.growing.delete(`tool/${tool}`);
    const progress = growing && { progress: growing.value() };
    this.tool(tool, { state: status, output, detail, blob, redacted: count, ...progress });
  },
  "interaction.requested"(body) {
    const { interaction, kind, blob: _, ...told } = typed(body, SHAPES.requested);
    const key = `interaction/${interaction}`;
    if (!this.items.has(key)) {
      const asked = { asks: kind, ...told, redacted: told.redacted ?? 0 };
      this.put(key, itemOf("interaction", interaction, asked));
      this.pending += 1;
    }
    this.phaseFromInteractions();
  },
  "interaction.resolved"(body) {
    const { interaction, outcome, control } = typed(body, SHAPES.resolved);
    const key = `interaction/${interaction}`;
    const item = this.items.get(key);
    if (item?.state === "pending") {
      this.put(key, { ...item, state: outcome, control });
      this.pending -= 1;
    }
    this.phaseFromInteractions();
  },
  "control.receipt"(body) {
    const told = typed(body, SHAPES.receipt);
    own(this.head.receipts, told.control, withoutNulls(told));
  },
  "model.request"(body, event) {
    this.head.model_request = { ...body, at: event.at };
  },
  usage(body) {
    const told = typed(body, SHAPES.usage);
    const { usage: total, usage_by_turn: turns } = this.head;
    if (has(turns, told.turn)) return;
    own(turns, told.turn, withoutNulls(told));
    total.turns += 1;
    for (const name of ["input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"]) {
      total[name] += told[name];
    }
    if (told.cost_usd !== null) total.cost_usd = (total.cost_usd ?? 0) + told.cost_usd;
  },
  background(body) {
    const { id, state } = typed(body, SHAPES.background);
    const open = this.head.background;
    if (state === "started" && !open.includes(id)) open.push(id);
    else if (state === "completed" && open.includes(id)) open.splice(open.indexOf(id), 1);
  },
  "turn.completed"() {
    this.head.turns_completed += 1;
  },
  "response.ended"(body, event) {
    const { outcome, error } = typed(body, SHAPES.responseEnded);
    if (this.head.response_outcome !== null) return;
    Object.assign(this.head, { response_outcome: outcome, response_ended_at: event.at, error, phase: "exiting" });
  },
  "execution.ended"(body, event) {
    const { outcome, proof, exit, tail, error } = typed(body, SHAPES.executionEnded);
    const { head } = this;
    Object.assign(head, { phase: "ended", outcome, ended_at: event.at, exit, tail });
    head.proof = proof === null ? null : withoutNulls(proof);
    head.partial = head.partial || tail === "unknown";
    head.error = head.error ?? error;
    for (const [key, item] of this.items) {
      const left = LEFT_OPEN[item.state];
      if (left === undefined) continue;
      const whole = this.item(key);
      this.growing.delete(key);
      this.put(key, { ...whole, state: left });
    }
    this.pending = 0;
  },
  gap(body, event) {
    const { from, to, reason, detail } = typed(body, SHAPES.gap);
    this.gap(String(event.ordinal), reason, from, to, detail);
  },
  raw(body, event) {
    if (this.rawCount >= RAW_ITEMS_MAX) {
      this.head.raw_omitted += 1;
      return;
    }
    this.rawCount += 1;
    const { redacted, blob: _, ...told } = typed(body, SHAPES.raw);
    const id = String(event.ordinal);
    this.put(`raw/${id}`, itemOf("raw", id, { ...told, redacted: redacted ?? 0 }));
  },
};

const responseOf = (fields) => ({
  execution: null, agent: null, state: "created", superseded_by: null, error: null, ...fields,
});

/** The conversation-level events, each identified by `id`, in order of the log. */
export class ConversationFold {
  constructor() {
    this.seen = new Set();
    this.messages = new Map();
    this.responses = new Map();
    this.receipts = new Map();
    this.recoveries = [];
  }

  /** "applied" or "duplicate": these events form no chain. */
  apply(event) {
    if (this.seen.has(event.id)) return "duplicate";
    this.seen.add(event.id);
    try {
      this.take(event);
    } catch (error) {
      if (!(error instanceof Lie || error instanceof TypeError)) throw error;
      this.recoveries.push({ corrupt: event.type, id: event.id, at: event.at });
    }
    return "applied";
  }

  take({ type, body, at }) {
    if (type === "prompt.admitted") {
      const { request, prompt_sequence, content, into, author } = typed(body, SHAPES.admitted);
      this.messages.set(request, { request, content, at, prompt_sequence, into, response: null, author });
    } else if (type === "response.created") {
      const { response, request, execution, agent } = typed(body, SHAPES.created);
      this.responses.set(response, responseOf({ response, request, execution, agent, at }));
      const message = this.messages.get(request);
      if (message) message.response = response;
    } else if (type === "response.failed") this.failed(typed(body, SHAPES.failed), at);
    else if (type === "response.superseded") {
      const { response, by } = typed(body, SHAPES.superseded);
      const known = this.responses.get(response);
      if (known) Object.assign(known, { state: "superseded", superseded_by: by });
    } else if (type === "control.receipt") this.receipts.set(String(body.control ?? "None"), { ...body });
    else if (type === "recovery") this.recoveries.push({ ...body, at });
  }

  failed({ request, response, code, detail, retryable }, at) {
    const error = { code, detail, retryable };
    const id = response ?? `${request}/failed`;
    const known = this.responses.get(id);
    if (known) Object.assign(known, { state: "failed", error });
    else this.responses.set(id, responseOf({ response: id, request, at, state: "failed", error }));
  }

  freeze() {
    return structuredClone({
      messages: [...this.messages.values()],
      responses: [...this.responses.values()],
      receipts: Object.fromEntries(this.receipts),
      recoveries: this.recoveries,
    });
  }
}
