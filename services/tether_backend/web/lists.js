/* Lists: conversations, executions (sandboxes are a list of this kind, too). Asked anew every few seconds while somebody looks; what is open stays open. */

import { TOKEN, explain, facts, h, oneLine, plain, randomId, setText, time } from "/static/dom.js";

const POLL_MS = 5000;
const LATE_MS = 2500;
const BUSY_MS = 1000; // between looks while something has just changed: rows follow the log
const BUSY_FOR_MS = 4000;
const PAGE = 50;

/** Asks `load` now, every few seconds while the page is visible, and at once where `soon` says so. */
export class Poll {
  constructor(load, state) {
    this.load = load;
    this.state = state; // told ("live" | "waiting", {error})
    this.timer = null;
    this.running = false;
    this.over = false;
    this.busyUntil = 0;
    this.seen = () => document.visibilityState === "visible" && this.soon(0);
    document.addEventListener("visibilitychange", this.seen);
    this.soon(0);
  }

  /** Something has changed: look soon, and a few times more. */
  changed() {
    this.busyUntil = Date.now() + BUSY_FOR_MS;
    this.soon();
  }

  soon(ms = 250) {
    if (this.over || this.running) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), ms);
  }

  async run() {
    if (document.visibilityState === "hidden") return; // asked again when it is shown
    this.running = true;
    // A request in doubt is repeated for a while: what is shown is not said to be live meanwhile.
    const late = setTimeout(() => !this.over && this.state("connecting", {}), LATE_MS);
    try {
      await this.load();
      if (!this.over) this.state("live", {});
    } catch (error) {
      if (!this.over) this.state("waiting", { error });
    }
    clearTimeout(late);
    this.running = false;
    this.soon(Date.now() < this.busyUntil ? BUSY_MS : POLL_MS);
  }

  close() {
    this.over = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
  }
}

// --- conversations ---

const STATES = { waiting: "waiting for you", running: "running", ended: "ended", idle: "idle" };

function stateOf(one, last) {
  if (one.pending_interactions) return "waiting";
  if (one.active_execution) return "running";
  return last ? "ended" : "idle";
}

/** The list beside a conversation, or by itself on a narrow screen. `app`: `client`, `listState(state, detail)`. */
export class ConversationList {
  constructor(app) {
    this.app = app;
    this.rows = new Map();
    this.known = new Map(); // of further pages; the first is read anew each time
    this.next = null;
    this.current = null;
    this.filter = h("input", { type: "search", placeholder: "Find by id", "aria-label": "Find a conversation by id", autocomplete: "off", spellcheck: false });
    this.filter.addEventListener("input", () => this.draw());
    this.filter.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && TOKEN.test(this.filter.value.trim())) location.hash = `#/c/${this.filter.value.trim()}`;
    });
    const start = h("button", { type: "button", class: "primary", onclick: () => (location.hash = `#/c/${randomId("c").slice(0, 14)}`) }, "New conversation");
    this.list = h("ul", { class: "conversations" });
    this.note = h("p", { class: "empty" }, "Loading…");
    this.more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.loadMore() }, "Show more");
    this.node = h("nav", { class: "side", "aria-label": "Conversations" }, h("h2", { tabIndex: -1 }, "Conversations"), start, this.filter, this.list, this.note, this.more);
    this.poll = new Poll(() => this.load(), (state, detail) => this.app.listState(state, detail));
  }

  close() {
    this.poll.close();
  }

  changed() {
    this.poll.changed();
  }

  async load() {
    const [page, runs] = await Promise.all([
      this.app.client.conversations({ limit: PAGE }),
      this.app.client.executions({ limit: 4 * PAGE }),
    ]);
    this.last = new Map();
    for (const run of runs.executions) if (!this.last.has(run.conversation)) this.last.set(run.conversation, run);
    if (this.known.size <= PAGE) this.next = page.next_page ?? null;
    for (const one of page.conversations) this.known.set(one.conversation, one);
    this.draw();
  }

  async loadMore() {
    this.more.disabled = true;
    try {
      const page = await this.app.client.conversations({ limit: PAGE, page: this.next });
      this.next = page.next_page ?? null;
      for (const one of page.conversations) if (!this.known.has(one.conversation)) this.known.set(one.conversation, one);
      this.draw();
    } catch (error) {
      setText(this.more, explain(error).join(" "));
    }
    this.more.disabled = false;
  }

  select(id) {
    this.current = id;
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = [...this.known.values()]
      .filter((one) => one.conversation.toLowerCase().includes(wanted))
      .sort((one, other) => other.updated_at - one.updated_at);
    let at = this.list.firstChild;
    const kept = new Set();
    for (const one of shown) {
      let row = this.rows.get(one.conversation);
      if (row === undefined) this.rows.set(one.conversation, (row = new Row(one.conversation)));
      row.update(one, this.last?.get(one.conversation), this.current === one.conversation);
      kept.add(row.node);
      if (row.node === at) at = at.nextSibling;
      else this.list.insertBefore(row.node, at);
    }
    for (const node of [...this.list.children]) if (!kept.has(node)) node.remove();
    this.note.hidden = shown.length > 0;
    const open = TOKEN.test(this.filter.value.trim()) ? " Enter opens the conversation of this id." : "";
    setText(this.note, wanted ? `None of those loaded matches.${open}` : "No conversations yet.");
    this.more.hidden = this.next === null;
  }
}

class Row {
  constructor(id) {
    this.state = h("span", { class: "state" });
    this.badge = h("span", { class: "badge" });
    this.when = h("span", { class: "when" });
    this.link = h("a", { href: `#/c/${encodeURIComponent(id)}` }, h("span", { class: "id" }, id), this.badge, h("span", { class: "meta" }, this.state, this.when));
    this.node = h("li", {}, this.link);
  }

  update(one, last, isCurrent) {
    const state = stateOf(one, last);
    const outcome = state === "ended" && last.outcome && last.outcome !== "completed" ? `: ${last.outcome.replaceAll("_", " ")}` : "";
    setText(this.state, STATES[state] + outcome);
    this.state.dataset.state = outcome ? last.outcome : state;
    setText(this.badge, one.pending_interactions ? String(one.pending_interactions) : "");
    this.badge.hidden = !one.pending_interactions;
    this.badge.title = `${one.pending_interactions} waiting for you`;
    if (this.at !== one.updated_at) this.when.replaceChildren(time(one.updated_at));
    this.at = one.updated_at;
    if (isCurrent) this.link.setAttribute("aria-current", "page");
    else this.link.removeAttribute("aria-current");
  }
}

// --- tables ---

export class TableView {
  /** `title`, `load(page) → {rows, next}`, `cardOf(row) → {key, head, list}`: what is folded is made by `list()`. */
  constructor(app, { title, hint, load, cardOf }) {
    this.app = app;
    this.load = load;
    this.cardOf = cardOf;
    this.cards = new Map();
    this.title = h("h1", { tabIndex: -1 }, title);
    this.list = h("div", { class: "cards" });
    this.note = h("p", { class: "empty" }, "Loading…");
    this.more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.loadMore() }, "Show more");
    this.node = h("div", { class: "table" }, this.title, h("p", { class: "sub" }, hint), this.list, this.note, this.more);
    this.pages = 1;
    this.poll = new Poll(() => this.refresh(), (state, detail) => app.connection(state, detail));
    app.titled(title, 0);
  }

  close() {
    this.poll.close();
  }

  async refresh() {
    const rows = [];
    let next;
    for (let page = 0; page < this.pages; page += 1) {
      const part = await this.load(next);
      rows.push(...part.rows);
      next = part.next;
      if (!next) break;
    }
    this.more.hidden = !next;
    this.draw(rows);
  }

  loadMore() {
    this.pages += 1;
    this.poll.soon(0);
  }

  draw(rows) {
    const nodes = rows.map((row) => {
      const { key, head, list: make } = this.cardOf(row);
      const signature = JSON.stringify(row);
      const known = this.cards.get(key);
      if (known?.signature === signature) return known.node;
      const node = known?.node ?? h("details", { class: "card" }, h("summary"), h("div", { class: "body" }));
      const list = make();
      const focused = node.contains(document.activeElement) ? document.activeElement : null;
      node.firstChild.replaceChildren(...head);
      node.lastChild.replaceChildren(list);
      if (focused && node.contains(focused)) focused.focus({ preventScroll: true }); // what is kept was put in anew
      if (!known && list.more) node.addEventListener("toggle", () => node.open && this.cards.get(key).more?.(node.lastChild));
      this.cards.set(key, { node, signature, more: list.more });
      if (node.open) list.more?.(node.lastChild);
      return node;
    });
    const same = nodes.length === this.list.children.length && nodes.every((node, at) => node === this.list.children[at]);
    if (!same) this.list.replaceChildren(...nodes);
    this.note.hidden = nodes.length > 0;
    setText(this.note, "There are none.");
  }
}

export const conversationLink = (id) => h("a", { href: `#/c/${encodeURIComponent(id)}` }, id);
export const stateNode = (state, text = state) => h("span", { class: "state", dataset: { state } }, text);

export function executionsView(app) {
  const cardOf = (row) => {
    const state = row.outcome ?? (row.pending_interactions ? "waiting" : row.state);
    const list = () => {
      const made = h("div", {}, executionFacts(row));
      made.more = (into) => moreFacts(app.client, row, into);
      return made;
    };
    return {
      key: row.execution, list,
      head: [h("span", { class: "id" }, row.execution), stateNode(state, row.outcome?.replaceAll("_", " ") ?? (row.pending_interactions ? "waiting for you" : row.state)),
        h("span", { class: "meta" }, plain(row.agent ?? ""), " ", time(row.started_at))],
    };
  };
  return new TableView(app, {
    title: "Executions", hint: "Each run of an agent's CLI, the newest first.", cardOf,
    load: async (page) => {
      const found = await app.client.executions({ limit: PAGE, page });
      return { rows: found.executions, next: found.next_page };
    },
  });
}

function executionFacts(row) {
  const proof = row.proof && [row.proof.method, row.proof.detail].filter(Boolean).join(": ");
  const error = row.error && `${row.error.code}${row.error.detail ? `: ${row.error.detail}` : ""}`;
  return facts([
    ["conversation", conversationLink(row.conversation)], ["workspace", row.workspace], ["response", row.response],
    ["generation", row.generation], ["agent", row.agent], ["model", row.model], ["native session", row.native_session],
    ["started", row.started_at && time(row.started_at)], ["ended", row.ended_at && time(row.ended_at)],
    ["outcome", row.outcome], ["exit code", row.exit],
    ["proof of its end", proof ?? (row.outcome ? "none" : "it has not ended")], ["error", error && oneLine(error, 600)],
    ["items", row.items], ["waiting for you", row.pending_interactions || null],
    ["whole", row.partial ? "no, parts are missing" : "yes"], ["events applied", row.applied],
  ]);
}

/** What only the owner record and the snapshot know; asked when somebody opens it. */
async function moreFacts(client, row, into) {
  const extra = h("div", { class: "extra" }, h("p", { class: "note" }, "Asking for its target and session…"));
  into.querySelector(".extra")?.remove();
  into.append(extra);
  const [view, found] = await Promise.allSettled([client.execution(row.execution), snapshotOf(client, row.execution)]);
  const state = found.value?.snapshot?.state ?? {};
  const target = view.value?.target ?? state.target ?? null;
  const why = found.status === "rejected" ? explain(found.reason)[0] : "";
  extra.replaceChildren(facts([
    ["CLI version", state.cli_version ?? (why ? `not known: ${why}` : null)],
    ["session can be resumed", state.resumable === undefined ? null : state.resumable ? "yes" : "no"],
    ["facts come from", found.value && { collector: "its sandbox, live", log: "the log", projection: "the database: the log is no longer whole" }[found.value.source]],
    ["owns its conversation", view.value ? (view.value.target ? "yes" : "no") : null],
  ]));
  if (target !== null) {
    extra.append(h("h3", {}, "Target"), facts(Object.entries(target).map(([name, value]) => [name.replaceAll("_", " "), value === "" ? null : String(value)])));
  }
}

async function snapshotOf(client, execution) {
  const answer = await client.fetch(client.url(`/v1/executions/${encodeURIComponent(execution)}/snapshot`));
  const value = await answer.json();
  if (!answer.ok) throw value;
  return value;
}
