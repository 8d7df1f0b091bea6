/* Sandboxes: what each is, what it goes on from, and draining, suspending and resuming it.
 *
 *     active ── Suspend…, Drain… (asked first) ──▶ draining: its phase is told ──▶ suspended ── Resume ──▶ active
 *
 * An operation's id is drawn here, so a request that is repeated has one effect; how it stands is asked until it is over.
 */

import { confirm, count, explain, facts, h, oneLine, plain, randomId, setText, time } from "/static/dom.js";
import { TableView, conversationLink, stateNode } from "/static/lists.js";

const LOOK_MS = 1000;
const LOOKS_MOST = 600; // then the list itself goes on telling the state
const PHASES = {
  turn: "Turns under way may finish.", leaving: "Its agents are asked to leave.", killing: "What is left is killed.",
  publishing: "The log gets its last events.", checkpoint: "What is needed to go on is kept.", releasing: "What it uses is released.",
};
const OUTCOMES = {
  completed: "had ended", graceful: "left in good order", forced: "was killed at the end of the grace",
  checkpoint_failed: "ended, and could not be kept",
};
const STORED = { volume: "on its volume", blobs: "in the blob store", both: "on its volume and in the blob store" };
const ASLEEP = new Set(["suspended", "resuming", "provisioning"]); // no collector is missed there

/** The state in words, with the kind that its colour follows. */
export function stateOf({ state, connected }) {
  if (state === "suspended") return ["suspended", "suspended: a message wakes it"];
  if (connected || ASLEEP.has(state)) return [state, state];
  return ["lost", `${state}, not connected`];
}

const size = (bytes) => (bytes < 1 << 20 ? `${count(Math.ceil(bytes / 1024))} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`);

/** What a checkpoint has, in one line. */
function checkpointWords({ checkpoint, files, size_bytes: bytes, include, stored, clean }) {
  const what = include === "workspace" ? "the whole workspace" : "sessions";
  return [checkpoint, `${count(files)} files, ${size(bytes)}`, what, STORED[stored] ?? stored, clean ? "clean" : "something was killed"].map(plain).join(" · ");
}

function endedWords({ outcome, interrupted = [], cut, detail }) {
  const parts = [OUTCOMES[outcome] ?? outcome];
  if (interrupted.length) parts.push(`cut: ${interrupted.map((name) => oneLine(name, 40)).join(", ")}`);
  if (cut) parts.push("its turn is not finished");
  if (detail) parts.push(oneLine(detail, 300));
  return parts.join("; ");
}

/** The result of a drain, for the line that a screen reader is told. */
function resultWords({ state, problem, unsaved, sandbox_state: now }) {
  const kept = unsaved ? ` Not kept: ${oneLine(unsaved, 300)}.` : "";
  if (state === "failed") return `It failed: ${problem ? explain(problem).filter(Boolean).join(" ") : "no reason was told"}${kept}`;
  return `It is ${now === "deleted" ? "deleted" : "suspended"}; a message wakes it.${kept}`;
}

/** The buttons of one sandbox, kept while its facts are drawn anew. */
class Actions {
  constructor(app, workspace, changed) {
    this.app = app;
    this.workspace = workspace;
    this.changed = changed;
    this.drain = null; // the operation that is followed
    const button = (text, act) => h("button", { type: "button", onclick: act }, text);
    this.suspendButton = button("Suspend…", () => this.ask("suspend"));
    this.drainButton = button("Drain…", () => this.ask("drain"));
    this.resumeButton = button("Resume", () => this.resume());
    this.status = h("p", { class: "note", role: "status" });
    this.node = h("div", { class: "actions" }, h("div", { class: "row" }, this.suspendButton, this.drainButton, this.resumeButton), this.status);
  }

  update({ state, drain }) {
    const busy = this.drain !== null;
    this.suspendButton.hidden = this.drainButton.hidden = state !== "active";
    this.resumeButton.hidden = state !== "suspended";
    for (const one of [this.suspendButton, this.drainButton, this.resumeButton]) one.disabled = busy;
    if (state === "draining" && drain && !busy) this.follow(drain.drain);
  }

  ask(verb) {
    const isDrain = verb === "drain";
    confirm({
      title: isDrain ? "Drain this sandbox?" : "Suspend this sandbox?",
      text: isDrain
        ? "A turn under way may finish within its share of the grace; then the agents leave, and what still waits for you is withdrawn. Their sessions are kept. A message wakes it again."
        : "It is put to sleep if nothing runs or waits there, and what it uses is released. Its agents' sessions are kept. A message wakes it again.",
      yes: isDrain ? "Drain it" : "Suspend it", no: "Leave it", act: () => this.begin(verb),
    });
  }

  async begin(verb) {
    this.drain = randomId("drn");
    this.update({ state: "active" });
    setText(this.status, verb === "drain" ? "Draining…" : "Suspending…");
    try {
      const view = await this.app.client[verb](this.workspace, { drainId: this.drain });
      this.changed();
      if (this.told(view)) await this.wait(view.drain);
    } catch (error) {
      setText(this.status, refusedWords(error));
    }
    this.over();
  }

  /** Of a drain that somebody else began. */
  async follow(drain) {
    this.drain = drain;
    await this.wait(drain);
    this.over();
  }

  /** Until it is over. What cannot be told for a while is asked again. */
  async wait(drain) {
    for (let looks = 0; looks < LOOKS_MOST && this.node.isConnected; looks += 1) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      try {
        if (!this.told(await this.app.client.drainStatus(this.workspace, drain))) return;
      } catch (error) {
        setText(this.status, explain(error).filter(Boolean).join(" "));
        if (!error.retryable) return;
      }
    }
  }

  /** Whether it goes on. */
  told(view) {
    const goesOn = view.state === "running";
    setText(this.status, goesOn ? PHASES[view.phase] ?? "It drains." : resultWords(view));
    return goesOn;
  }

  over() {
    this.drain = null;
    for (const one of [this.suspendButton, this.drainButton, this.resumeButton]) one.disabled = false;
    this.changed();
  }

  async resume() {
    this.resumeButton.disabled = true;
    setText(this.status, "Waking…");
    try {
      const { woken } = await this.app.client.resume(this.workspace);
      setText(this.status, woken ? "It wakes." : "It was awake, or somebody else wakes it.");
    } catch (error) {
      setText(this.status, refusedWords(error));
    }
    this.resumeButton.disabled = false;
    this.changed();
  }
}

function refusedWords(error) {
  const who = error.code === "SESSION_BUSY" && Array.isArray(error.context?.executions) ? error.context.executions : [];
  if (who.length === 0) return explain(error).filter(Boolean).join(" ");
  const names = who.map(({ conversation, state }) => `${oneLine(conversation ?? "?", 64)} (${oneLine(state ?? "?", 20)})`);
  return `It is not idle: ${names.join(", ")}. Wait for its end, or drain it.`;
}

function sandboxFacts(row) {
  const drained = row.drained;
  const last = drained && [drained.drain, drained.state, drained.problem && `${drained.problem.code}: ${drained.problem.detail}`].filter(Boolean).map((one) => oneLine(one, 300)).join(" · ");
  return facts([
    ["sandbox", row.sandbox], ["workspace", row.workspace], ["state", stateOf(row)[1]], ["provider", row.provider],
    ["collector", row.connected ? "connected" : ASLEEP.has(row.state) ? "none: it sleeps" : "not connected: nothing is known of what runs in it"],
    ["boot", row.boot], ["version", row.version], ["capabilities", row.capabilities?.join(", ")], ["agents", row.agents?.join(", ")],
    ["idle since", row.idle_since && time(row.idle_since)],
    ["drains", row.drain && [row.drain.drain, row.drain.purpose, row.drain.reason].filter(Boolean).map((one) => oneLine(one, 260)).join(" · ")],
    ["checkpoint", row.checkpoint && checkpointWords(row.checkpoint)], ["kept", row.checkpoint && time(row.checkpoint.created_at)],
    ["last drain", last], ["changed", row.updated_at && time(row.updated_at)],
  ]);
}

function runNode(one) {
  return h("section", { class: "block" }, h("h3", {}, "Runs ", h("span", { class: "id" }, one.target?.execution ?? "?")), facts([
    ["conversation", one.target?.conversation && conversationLink(one.target.conversation)], ["state", one.state],
    ["generation", one.target?.execution_generation], ["process generation", one.target?.process_generation],
    ["native session", one.target?.native_session], ["waiting for you", one.pending_interactions || null], ["last event", one.last_ordinal],
    ["started", one.started_at && time(one.started_at)],
  ]));
}

function drainedNode(one) {
  return h("section", { class: "block" }, h("h3", {}, "Was drained ", h("span", { class: "id" }, one.target?.execution ?? "?")), facts([
    ["conversation", one.target?.conversation && conversationLink(one.target.conversation)], ["outcome", endedWords(one)],
    ["session can be resumed", one.resumable ? "yes" : "not known"], ["last event", one.last_ordinal],
  ]));
}

export function sandboxesView(app) {
  const actions = new Map();
  const actionsOf = (row) => {
    let found = actions.get(row.workspace);
    if (found === undefined) actions.set(row.workspace, (found = new Actions(app, row.workspace, () => view.poll.changed())));
    found.update(row);
    return found.node;
  };
  const cardOf = (row) => ({
    key: `${row.workspace}/${row.sandbox}`,
    head: [h("span", { class: "id" }, row.workspace), stateNode(...stateOf(row)), h("span", { class: "meta" }, plain(row.provider), " ", time(row.updated_at))],
    list: () => h("div", {}, actionsOf(row), sandboxFacts(row), ...(row.executions ?? []).map(runNode),
      ...(row.state === "suspended" ? row.drained?.executions ?? [] : []).map(drainedNode),
      row.executions_omitted ? h("p", { class: "note" }, `${row.executions_omitted} more are not listed.`) : null),
  });
  const view = new TableView(app, {
    title: "Sandboxes", hint: "Where agents run, one per workspace.", cardOf,
    load: async () => ({ rows: (await app.client.sandboxes()).sandboxes, next: null }),
  });
  return view;
}
