/* One conversation as the page has it: pages of history and the events after them, as one ordered list of entries.
 *
 *     entries   message | response | failure | notice, in order of their place in the log; live ones at the end
 *     runs      one per execution: a fold, how many of its items were left out before those it has
 *     outbox    messages sent from here that the log does not tell yet
 *
 * Everything has an identity (request, response, execution and ordinal, id of an event), so a page of history, a replay
 * and a snapshot may overlap as they like. What changed is collected and taken by whoever draws: `take()`.
 */

import { ConversationFold, ExecutionFold } from "/static/fold.js";

const LIVE = 2 ** 52; // places of what came by the stream: after all that history has placed
const WAITING_MAX = 20_000; // events that are kept while an execution's earlier items are fetched

const SPEAKING = new Set(["text.delta", "text.completed", "reasoning.delta", "reasoning.completed", "tool.started"]);

/** One execution. */
export class Run {
  constructor(id) {
    this.id = id;
    this.fold = new ExecutionFold();
    this.view = null; // the execution's facts as the API told them last
    this.omitted = 0; // items before the first one here, to be had by `items`
    this.asks = new Map(); // interactions that wait, of the items that were left out: by key
    this.waiting = null; // events that came before what they follow
    this.speaks = false; // since its last word about the model's request it has said or done something
  }

  get outcome() {
    return this.fold.head.response_outcome ?? this.fold.head.outcome;
  }

  get ended() {
    return this.fold.head.outcome !== null;
  }

  get pending() {
    const own = this.fold.pending > 0 ? [...this.fold.items.values()] : [];
    return [...this.asks.values(), ...own].filter((item) => item.kind === "interaction" && item.state === "pending");
  }
}

function baseOf(view, response, items, usage) {
  const turns = Object.fromEntries(usage.map(({ execution: _, ...turn }) => [turn.turn, turn]));
  const total = { turns: usage.length, cost_usd: null };
  for (const name of ["input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"]) {
    total[name] = usage.reduce((sum, turn) => sum + (turn[name] ?? 0), 0);
  }
  for (const { cost_usd: cost } of usage) if (cost !== undefined) total.cost_usd = (total.cost_usd ?? 0) + cost;
  const responded = response?.outcome && response.outcome !== "superseded" ? response.outcome : null;
  return {
    applied: view.applied, phase: view.state, outcome: view.outcome ?? null,
    response_outcome: responded ?? view.outcome ?? null,
    error: view.error ?? null, agent: view.agent ?? response?.agent ?? null, native_session: view.native_session ?? null,
    model: view.model ?? null, started_at: view.started_at ?? null, ended_at: view.ended_at ?? null,
    response_ended_at: response?.ended_at ?? null, proof: view.proof ?? null, exit: view.exit ?? null,
    partial: view.partial ?? false, usage: total, usage_by_turn: turns, items: items.map((one) => one.state),
  };
}

export class Conversation {
  constructor(id) {
    this.id = id;
    this.workspace = null;
    this.before = null; // asks for the page before the oldest that is here
    this.entries = [];
    this.byKey = new Map();
    this.runs = new Map();
    this.outbox = new Map();
    this.notes = new ConversationFold();
    this.live = 0;
    this.loaded = false;
    this.dirty = { structure: true, runs: new Set(), rebuilt: new Set() };
    this.needs = () => {}; // told of an execution whose earlier items must be fetched
  }

  /** What changed since the last call: `structure` (entries), `runs` (their heads and touched items), `rebuilt`. */
  take() {
    const { dirty } = this;
    this.dirty = { structure: false, runs: new Set(), rebuilt: new Set() };
    return dirty;
  }

  get active() {
    let found = null;
    for (const entry of this.entries) {
      if (entry.type !== "response" || entry.state !== "created") continue;
      const run = this.runs.get(entry.execution);
      if (run && !run.ended) found = run;
    }
    return found;
  }

  get pending() {
    return [...this.runs.values()].flatMap((run) => run.pending.map((item) => ({ run, item })));
  }

  run(id) {
    let run = this.runs.get(id);
    if (run === undefined) this.runs.set(id, (run = new Run(id)));
    return run;
  }

  // --- entries ---

  put(entry) {
    const known = this.byKey.get(entry.key);
    if (known === undefined) {
      this.byKey.set(entry.key, entry);
      this.entries.push(entry);
    } else Object.assign(known, entry, { place: Math.min(known.place, entry.place) });
    this.dirty.structure = true;
    return known ?? entry;
  }

  nextPlace() {
    this.live += 1;
    return LIVE + this.live;
  }

  /** Something that happened to the stream or the conversation, told where it happened. */
  notice(id, fields) {
    if (this.byKey.has(`notice/${id}`)) return;
    this.put({ type: "notice", key: `notice/${id}`, place: this.nextPlace(), follows: this.entries.at(-1)?.key, ...fields });
  }

  sort() {
    for (const entry of this.entries) {
      // A notice stays behind what it followed, also where that has got its place by now.
      const before = entry.type === "notice" ? this.byKey.get(entry.follows) : undefined;
      if (before !== undefined) entry.place = before.place + 0.25;
    }
    this.entries.sort((one, other) => one.place - other.place);
    this.dirty.structure = true;
  }

  // --- history ---

  /** The newest page: the first, or one that a snapshot brought. */
  applyHistory(history) {
    this.loaded = true;
    this.workspace = history.workspace ?? this.workspace;
    const oldest = this.entries.some((entry) => entry.place < LIVE);
    if (!oldest) this.before = history.before ?? null;
    this.applyPage(history);
  }

  /** A page before the oldest. */
  applyOlder(history) {
    this.before = history.before ?? null;
    this.applyPage(history);
  }

  applyPage(history) {
    for (const one of history.messages) {
      this.outbox.delete(one.request);
      this.put({ type: "message", key: `message/${one.request}`, ...one });
    }
    for (const one of history.failures) {
      this.put({ type: "failure", key: `failure/${one.response ?? `${one.request}/failed`}`, ...one });
    }
    const responses = new Map();
    for (const one of history.responses) {
      responses.set(one.execution, one);
      const state = one.outcome === "superseded" ? "superseded" : "created";
      this.put({ type: "response", key: `response/${one.response}`, ...one, state });
    }
    const items = Map.groupBy(history.items, (one) => one.execution);
    const usage = Map.groupBy(history.usage, (one) => one.execution);
    for (const view of history.executions) {
      const id = view.execution;
      if (!responses.has(id)) {
        const place = view.started_at ? 0 : -1; // its response's entry is gone: before all others
        this.put({ type: "response", key: `execution/${id}`, execution: id, at: view.started_at, place, state: "created" });
      }
      this.applyRun(view, responses.get(id), items.get(id) ?? [], usage.get(id) ?? []);
    }
    for (const one of history.interactions) this.applyAsk(one);
    this.sort();
  }

  applyRun(view, response, items, usage) {
    const run = this.run(view.execution);
    run.view = view;
    this.dirty.runs.add(run.id);
    if (run.fold.applied > view.applied) return;
    // As far as what is here: only a repair of it says more.
    const repaired = run.fold.head.partial && !view.partial;
    if (run.fold.applied === view.applied && run.fold.items.size > 0 && !repaired) return;
    const first = items[0]?.position ?? view.items ?? 0;
    const fold = new ExecutionFold(baseOf(view, response, items, usage));
    const old = run.fold;
    const had = run.omitted;
    run.fold = fold;
    run.omitted = first;
    run.asks.clear();
    // Earlier items that are here stay, where the new ones follow on them.
    if (old.items.size > 0 && had < first && had + old.items.size >= first) {
      const kept = old.keys().slice(0, first - had).map((key) => old.item(key));
      fold.prepend(kept.filter((item) => !item.id.startsWith("skip-")));
      run.omitted = had;
    }
    this.dirty.rebuilt.add(run.id);
    this.flush(run);
  }

  applyAsk(one) {
    const run = this.runs.get(one.execution);
    const key = `interaction/${one.interaction}`;
    if (one.state !== "pending" || run === undefined || run.fold.items.has(key) || run.asks.has(key)) return;
    const { execution: _, interaction, ...fields } = one;
    run.asks.set(key, { kind: "interaction", id: interaction, questions: [], input: null, ...fields });
    run.fold.pending += 1;
    this.dirty.rebuilt.add(run.id);
  }

  /** Earlier items of an execution, those right before the first one that is here. */
  applyEarlier(run, items) {
    if (items.length === 0) return;
    for (const one of items) {
      if (run.asks.delete(one.item)) run.fold.pending -= 1;
    }
    run.fold.prepend(items.map((one) => one.state));
    run.omitted = items[0].position;
    this.dirty.rebuilt.add(run.id);
  }

  /** What an execution was before the events that wait: all its items, or null where nobody has it. */
  applyBase(run, found) {
    if (found !== null && found.applied > run.fold.applied) {
      const head = { applied: found.applied, phase: "running", items: found.items.map((one) => one.state) };
      run.fold = new ExecutionFold({ ...head, ...(found.view && baseOf(found.view, null, found.items, [])), ...head });
      run.omitted = found.items[0]?.position ?? 0;
    }
    this.flush(run);
    this.dirty.rebuilt.add(run.id);
  }

  // --- events ---

  applyEvent(event) {
    if (event.execution === undefined) this.applyNote(event);
    else this.applyNumbered(this.run(event.execution), event);
  }

  applyNumbered(run, event) {
    if (run.waiting !== null) {
      if (run.waiting.length < WAITING_MAX) run.waiting.push(event);
      return;
    }
    this.resolveAsk(run, event);
    if (event.type === "model.request") run.speaks = false;
    else if (SPEAKING.has(event.type)) run.speaks = true;
    if (run.fold.apply(event) === "hole") {
      if (run.fold.applied === 0) {
        // Of an execution that began before the page that is here.
        run.waiting = [event];
        this.needs(run);
        return;
      }
      run.fold.skipTo(event.ordinal, "retention_gap");
      run.fold.apply(event);
    }
    this.dirty.runs.add(run.id);
  }

  resolveAsk(run, { type, body }) {
    if (type === "execution.ended") {
      run.asks.clear();
      this.dirty.rebuilt.add(run.id);
    }
    const key = `interaction/${body?.interaction}`;
    if (type !== "interaction.resolved" || !run.asks.has(key)) return;
    run.asks.delete(key);
    run.fold.pending -= 1;
    this.dirty.rebuilt.add(run.id);
  }

  flush(run) {
    const { waiting } = run;
    run.waiting = null;
    for (const event of waiting ?? []) {
      if (run.fold.apply(event) !== "hole") continue;
      run.fold.skipTo(event.ordinal, "retention_gap");
      run.fold.apply(event);
    }
  }

  /** A conversation-level event, through the fold that says what it is. */
  applyNote(event) {
    const told = this.notes.recoveries.length;
    if (this.notes.apply(event) === "duplicate") return;
    const { body, at, id } = event;
    const corrupt = this.notes.recoveries.slice(told).find((one) => one.corrupt !== undefined);
    if (corrupt) {
      this.notice(id, { kind: "recovery", at, body: corrupt });
      return;
    }
    const place = this.nextPlace();
    if (event.type === "prompt.admitted" && this.notes.messages.has(body.request)) {
      this.outbox.delete(body.request);
      if (!this.byKey.has(`message/${body.request}`)) {
        this.put({ type: "message", key: `message/${body.request}`, place, ...this.notes.messages.get(body.request) });
      }
      this.dirty.structure = true;
    } else if (event.type === "response.created" && this.notes.responses.has(body.response)) {
      if (!this.byKey.has(`response/${body.response}`)) {
        const { state, ...made } = this.notes.responses.get(body.response);
        this.put({ type: "response", key: `response/${body.response}`, place, state: "created", ...made });
      }
      this.dirty.runs.add(this.run(body.execution).id);
    } else if (event.type === "response.failed") this.applyFailure(body, at, place);
    else if (event.type === "response.superseded") {
      const known = this.byKey.get(`response/${body.response}`);
      if (known) this.put({ ...known, state: "superseded", superseded_by: body.by });
    } else if (event.type === "recovery") this.notice(id, { kind: "recovery", at, body });
    this.dirty.structure = true;
  }

  applyFailure(body, at, place) {
    this.outbox.delete(body.request);
    const known = this.byKey.get(`response/${body.response}`);
    const error = { code: String(body.code), detail: String(body.detail ?? ""), retryable: Boolean(body.retryable) };
    if (known) this.put({ ...known, state: "failed", error });
    else {
      const key = `failure/${body.response ?? `${body.request}/failed`}`;
      this.put({ type: "failure", key, place: this.byKey.get(key)?.place ?? place, at, request: body.request, ...error });
    }
  }
}
