/* A conversation on the page: follows it, draws what changed once per frame, keeps the reader's place, takes messages.
 *
 * The reader who is at the end stays at the end; one who reads above is left alone and told that there is more below.
 * A hidden page draws nothing (frames do not come) and catches up at once when it is shown.
 */

import { receiptWords } from "/static/asks.js";
import { Composer } from "/static/composer.js";
import { confirm, explain, facts, h, oneLine, plain, randomId, readJson, remedyOf, resumeChoices, setText, time, words } from "/static/dom.js";
import { Poll } from "/static/lists.js";
import { Conversation } from "/static/model.js";
import { ResponseView, SHOWN_MOST, drawChoices } from "/static/response.js";

const NEAR_END = 60; // pixels: the reader counts as being at the end
const EARLIER = 200; // items of one request
const SLEEP = {
  suspended: "Its sandbox sleeps; a message wakes it.", resuming: "Its sandbox wakes.",
  draining: "Its sandbox is being put to sleep; a message wakes it again.",
};
const BASE_PAGES = 20; // of 1000 items, where an execution's beginning has to be fetched

export class ConversationView {
  /** `app`: `client`, `announcer`, `connection(state, detail)`, `changed()`, `signedOut()`. */
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.model = new Conversation(id);
    this.model.needs = (run) => this.fetchBase(run);
    this.views = new Map();
    this.frame = null;
    this.atEnd = true;
    this.isLive = false;
    this.build();
    this.restoreOutbox();
    this.sub = app.client.follow(id, {
      onHistory: (history) => this.change(() => this.model.applyHistory(history)),
      onEvent: (event) => this.event(event),
      onLive: () => {
        this.isLive = true;
      },
      onProblem: (problem) => this.change(() => this.problem(problem)),
      onState: (state, detail) => this.connection(state, detail),
    });
    this.sandbox = null;
    this.poll = new Poll(() => this.loadSandbox(), () => {}); // what fails here is told by the stream, too
  }

  close() {
    this.poll.close();
    this.sub.close();
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
  }

  build() {
    this.title = h("h1", { tabIndex: -1 }, this.id);
    this.detail = h("p", { class: "sub" });
    this.sleep = h("p", { class: "sub", role: "status" });
    this.older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.loadOlder() }, "Show earlier messages");
    this.list = h("div", { class: "entries" });
    this.waitingList = h("div", { class: "entries outbox" });
    this.empty = h("p", { class: "empty" }, "Loading…");
    this.log = h("div", { class: "log", tabIndex: 0, role: "region", "aria-label": "Messages" }, h("div", { class: "column" }, this.older, this.empty, this.list, this.waitingList));
    this.log.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.below = h("button", { type: "button", class: "below", hidden: true, onclick: () => this.toEnd() }, "New text below ↓");
    this.bar = this.buildBar();
    this.composer = new Composer(this);
    this.node = h("div", { class: "conversation" },
      h("header", { class: "head" }, h("a", { class: "back", href: "#/" }, "← All"), this.title, this.detail, this.sleep, this.buildKeeping()),
      this.log, h("div", { class: "foot" }, this.below, h("div", { class: "inner" }, this.bar.node, this.composer.node)));
    this.observer = new ResizeObserver(() => this.atEnd && this.toEnd());
    this.observer.observe(this.log);
  }

  // --- export, delete ---

  buildKeeping() {
    this.keeping = h("span", { class: "sub", role: "status" });
    const button = (text, act) => h("button", { type: "button", class: "quiet", onclick: act }, text);
    return h("details", { class: "keeping" }, h("summary", {}, "Export, delete"),
      h("div", { class: "row" }, button("Export as Markdown", () => this.keep("markdown", "md")), button("Export as JSON", () => this.keep("json", "json")),
        button("Delete…", () => this.confirmDelete())), this.keeping);
  }

  async keep(format, suffix) {
    setText(this.keeping, "Exporting…");
    try {
      const url = URL.createObjectURL(await this.app.client.exportConversation(this.id, format));
      h("a", { href: url, download: `${this.id}.${suffix}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      setText(this.keeping, "Exported.");
    } catch (error) {
      setText(this.keeping, explain(error).filter(Boolean).join(" "));
    }
  }

  confirmDelete() {
    const busy = this.model.active !== null;
    confirm({
      title: "Delete this conversation?",
      text: `It is deleted for good, wherever it is stored; nothing brings it back. Export it first to keep a copy. The files of its workspace stay.${busy ? " The agent is at work: it is stopped first." : ""}`,
      yes: "Delete it", no: "Keep it", act: () => this.delete(busy),
    });
  }

  async delete(force) {
    setText(this.keeping, "Deleting…");
    try {
      await this.app.client.deleteConversation(this.id, { force: force || undefined });
      this.app.changed();
      location.hash = "#/";
    } catch (error) {
      setText(this.keeping, explain(error).filter(Boolean).join(" "));
    }
  }

  // --- the stream ---

  connection(state, detail) {
    if (state === "unauthorized") this.app.signedOut("The token is no longer accepted.");
    else this.app.connection(state, detail);
    if (state !== "refused" || !detail.error) return;
    this.change(() => this.model.notice(`refused/${this.sub.generation}`, { kind: "problem", at: Date.now(), error: detail.error }));
  }

  problem(problem) {
    const { execution, first, last } = problem.context;
    const id = `${problem.code}/${execution ?? ""}/${first ?? this.sub.generation}/${last ?? ""}`;
    this.model.notice(id, { kind: "problem", at: Date.now(), error: problem });
  }

  event(event) {
    this.change(() => this.model.applyEvent(event));
    if (!event.replay && this.isLive) this.announce(event);
    if (["execution.ended", "response.created"].includes(event.type)) this.poll.changed();
    if (["interaction.requested", "interaction.resolved", "response.ended", "execution.ended", "response.created"].includes(event.type)) this.app.changed();
  }

  announce({ type, body }) {
    const { announcer } = this.app;
    if (type === "text.completed" && !body.parent) announcer.say(words(body.text).slice(0, 400));
    else if (type === "interaction.requested") {
      const before = body.offered ? ". You answered this before" : "";
      announcer.say((body.kind === "approval" ? `Approval needed: ${oneLine(body.name ?? "", 60)}` : "The agent asks a question") + before);
    } else if (type === "response.ended") announcer.say(`Response ${oneLine(body.outcome ?? "ended", 30)}`);
    else if (type === "response.failed") announcer.say(`Failed: ${oneLine(body.detail ?? body.code ?? "", 200)}`);
    else if (type === "session.recovered") announcer.say("The agent has a new session with the conversation's history");
    else if (type === "gap") announcer.say("Some events are missing");
  }

  change(make) {
    make();
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  /** Whether its sandbox sleeps: looked for while nothing runs here. Reading wakes nothing. */
  async loadSandbox() {
    const { workspace, active } = this.model;
    let state = null;
    if (workspace && active === null) {
      try {
        ({ state } = await this.app.client.sandbox(workspace));
      } catch (error) {
        if (error.status !== 404) throw error;
      }
    }
    setText(this.sleep, SLEEP[state] ?? "");
  }

  async fetchBase(run) {
    let found = null;
    try {
      const view = await this.app.client.execution(run.id);
      const items = [];
      let after;
      for (let page = 0; page < BASE_PAGES; page += 1) {
        const part = await this.app.client.items(run.id, { after, limit: 1000 });
        items.push(...part.items);
        found = { view, items, applied: part.applied };
        after = part.after;
        if (after === undefined || after === null) break;
      }
    } catch {
      found = null; // it is not to be had: the events go on behind a gap that says so
    }
    this.change(() => this.model.applyBase(run, found));
  }

  async earlier(run) {
    const after = Math.max(-1, run.omitted - EARLIER - 1);
    const { items } = await this.app.client.items(run.id, { after, limit: Math.min(EARLIER, run.omitted) });
    this.model.applyEarlier(run, items.filter((one) => one.position < run.omitted));
    this.model.dirty.rebuilt.delete(run.id);
  }

  async loadOlder() {
    this.older.disabled = true;
    try {
      const page = await this.app.client.history(this.id, { before: this.model.before });
      this.keepPlace(() => {
        this.model.applyOlder(page);
        this.draw();
      });
      if (this.older.hidden) this.log.focus({ preventScroll: true });
    } catch (error) {
      setText(this.older, `${explain(error).join(" ")} Try again`);
    }
    this.older.disabled = false;
  }

  // --- drawing ---

  draw() {
    const dirty = this.model.take();
    if (dirty.structure) this.drawEntries();
    for (const id of dirty.rebuilt) this.viewOf(id)?.rebuild();
    for (const id of new Set([...dirty.runs, ...dirty.rebuilt])) this.viewOf(id)?.sync();
    if (dirty.structure) for (const view of this.views.values()) view.updateHead?.();
    this.older.hidden = this.model.before === null;
    this.drawHead();
    if (this.atEnd) {
      this.trim();
      this.toEnd();
    } else this.below.hidden = false;
  }

  viewOf(execution) {
    return [...this.views.values()].find((view) => view.run?.id === execution);
  }

  drawEntries() {
    let at = this.list.firstChild;
    for (const entry of this.model.entries) {
      let view = this.views.get(entry.key);
      if (view === undefined) this.views.set(entry.key, (view = this.make(entry)));
      view.entry = entry;
      if (view.node === at) at = at.nextSibling;
      else this.list.insertBefore(view.node, at);
    }
    this.drawOutbox();
    const { loaded, entries } = this.model;
    this.empty.hidden = entries.length > 0 || this.model.outbox.size > 0;
    if (loaded) setText(this.empty, "Nothing here yet. Write the first message below.");
  }

  make(entry) {
    if (entry.type === "response") {
      return new ResponseView(entry, this.model.run(entry.execution), {
        client: this.app.client, conversation: this.id, earlier: (run) => this.earlier(run),
        keepPlace: (work) => this.keepPlace(work), leave: (node) => this.focusAfter(node),
        isNewest: (one) => this.isNewest(one), resend: (one, choice) => this.resend(one, choice),
      });
    }
    if (entry.type === "failure") return new FailureView(entry, this);
    const makers = { message: messageNode, notice: noticeNode };
    return { node: makers[entry.type](entry), entry };
  }

  /** Whether nothing was said after what this entry answers. */
  isNewest({ request }) {
    return this.model.outbox.size === 0 && this.model.entries.findLast((one) => one.type === "message")?.request === request;
  }

  /** The content of a request whose session was lost, as a new request that says what becomes of the session. */
  resend({ request, agent }, resume) {
    const message = this.model.byKey.get(`message/${request}`);
    if (message === undefined) return;
    const content = message.content.map((part) => part.text ?? "").join("\n\n");
    const named = agent ?? this.model.entries.findLast((one) => one.type === "response" && one.agent)?.agent;
    this.send({ requestId: randomId("req"), content, parts: message.content, agent: named, mode: "auto", resume });
    this.composer.text.focus();
  }

  drawHead() {
    const { model } = this;
    const pending = model.pending.length;
    const waiting = pending ? `${pending} waiting for you` : "";
    setText(this.detail, [model.workspace && `workspace ${plain(model.workspace)}`, waiting].filter(Boolean).join(" · "));
    this.app.titled(this.id, pending);
    this.bar.update();
    this.composer.update();
  }

  trim() {
    let drawn = 0;
    const views = [...this.views.values()].filter((view) => view.trim);
    for (const view of views) drawn += view.drawn;
    for (const view of views) {
      if (drawn <= SHOWN_MOST) return;
      const keep = Math.max(20, view.drawn - (drawn - SHOWN_MOST / 2));
      const before = view.drawn;
      view.trim(keep);
      drawn -= before - view.drawn;
    }
  }

  // --- the reader's place ---

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    this.atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    if (this.atEnd) this.below.hidden = true;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
    this.atEnd = true;
    this.below.hidden = true;
  }

  /** Change what lies above: what the reader looks at stays where it is. */
  keepPlace(work) {
    const { log } = this;
    const top = log.getBoundingClientRect().top;
    const seen = [...log.querySelectorAll(".item, .message, .notice")].find((node) => node.getBoundingClientRect().bottom > top);
    const before = seen?.getBoundingClientRect().top;
    this.atEnd = false;
    work();
    if (seen?.isConnected) log.scrollTop += seen.getBoundingClientRect().top - before;
    this.scrolled();
  }

  /** Where focus goes when what had it is gone: to what waits next, else to the composer. */
  focusAfter(node) {
    const next = [...this.log.querySelectorAll('.ask[data-state="pending"] h4')].find((one) => !node.contains(one));
    (next ?? this.composer.text).focus();
  }

  // --- messages on their way ---

  get outboxKey() {
    return `tether.outbox.${this.id}`;
  }

  restoreOutbox() {
    for (const one of readJson(this.outboxKey, [])) {
      const state = one.state === "failed" ? "failed" : "unknown";
      this.model.outbox.set(one.requestId, { ...one, state, words: one.words || "Whether this was taken is not known." });
    }
  }

  saveOutbox() {
    const kept = [...this.model.outbox.values()];
    if (kept.length) sessionStorage.setItem(this.outboxKey, JSON.stringify(kept));
    else sessionStorage.removeItem(this.outboxKey);
  }

  /** Send, or send again under the same id: it is one message however often it is sent. */
  async send(message) {
    const { requestId } = message;
    this.change(() => {
      this.model.outbox.set(requestId, { ...message, state: "sending", words: "Sending…" });
      this.model.dirty.structure = true;
    });
    this.atEnd = true;
    let told;
    try {
      const { content, parts, agent, workspace, mode, resume } = message;
      const { status } = await this.app.client.send(this.id, { content: parts ?? content, requestId, agent, workspace, mode, resume });
      told = status === "pending"
        ? { state: "pending", words: "Accepted and kept. It waits for its turn." }
        : { state: "accepted", words: status === "interjected" ? "Handed to the running response." : "Accepted." };
    } catch (error) {
      if (error.status === 401) this.app.signedOut("The token is no longer accepted.");
      const [what, remedy] = explain(error);
      const inDoubt = !error.status || error.status >= 500;
      const next = inDoubt ? "Whether it was taken is not known; sent again it still counts once." : remedy;
      told = { state: inDoubt || error.retryable ? "unknown" : "failed", words: `${what}. ${next}` };
    }
    this.change(() => {
      if (this.model.outbox.has(requestId)) this.model.outbox.set(requestId, { ...message, ...told });
      this.model.dirty.structure = true;
    });
    this.app.changed();
  }

  drawOutbox() {
    this.waitingList.replaceChildren(...[...this.model.outbox.values()].map((one) => {
      const node = h("article", { class: "message sending", dataset: { state: one.state } }, h("h3", { class: "who" }, "You"),
        h("div", { class: "body", dir: "auto" }, words(one.content)), h("p", { class: "note", role: "status" }, one.words));
      if (one.state === "unknown" || one.state === "failed") {
        const back = h("button", { type: "button", onclick: () => this.takeBack(one) }, one.state === "failed" ? "Edit" : "Forget it");
        const again = h("button", { type: "button", class: "primary", onclick: () => this.send(one) }, "Send again");
        node.append(h("div", { class: "row" }, again, back));
      }
      return node;
    }));
    this.saveOutbox();
  }

  takeBack({ requestId, content }) {
    this.model.outbox.delete(requestId);
    this.composer.offer(content);
    this.drawEntries();
  }

  // --- controls ---

  buildBar() {
    const text = h("span", { class: "bar-text" });
    const status = h("span", { class: "status", role: "status" });
    const interrupt = h("button", { type: "button", onclick: () => this.control("interrupt") }, "Interrupt");
    const stop = h("button", { type: "button", class: "danger", onclick: () => this.confirmStop() }, "Stop…");
    const next = h("button", { type: "button", class: "primary", hidden: true, onclick: () => this.toPending() }, "Go to it");
    const node = h("div", { class: "bar", hidden: true }, text, status, h("span", { class: "row" }, next, interrupt, stop));
    const update = () => {
      const run = this.model.active;
      if (node.hidden !== (run === null)) {
        if (node.contains(document.activeElement)) this.composer.text.focus();
        node.hidden = run === null;
        setText(status, "");
      }
      if (run === null) return;
      const pending = this.model.pending.length;
      const name = plain(run.fold.head.agent ?? "The agent");
      const doing = run.outcome !== null ? "is finishing" : pending ? "waits for you" : run.fold.applied ? "is running" : "is starting";
      setText(text, `${name} ${doing}`);
      next.hidden = !pending;
      interrupt.hidden = run.outcome !== null;
    };
    return { node, status, update, interrupt, stop };
  }

  toPending() {
    const first = this.log.querySelector('.ask[data-state="pending"] h4');
    if (!first) {
      for (const { run } of this.model.pending) this.viewOf(run.id)?.rebuild(Infinity);
    }
    const found = first ?? this.log.querySelector('.ask[data-state="pending"] h4');
    found?.focus();
    found?.scrollIntoView({ block: "center" });
  }

  async control(verb) {
    const run = this.model.active;
    if (run === null) return;
    const { status } = this.bar;
    setText(status, verb === "stop" ? "Stopping…" : "Interrupting…");
    try {
      const answer = await this.app.client[verb](run.id);
      setText(status, receiptWords(answer));
      if (answer.status === "unknown") {
        const ask = async () => setText(status, receiptWords(await this.app.client.control(answer.control_id, run.id)));
        status.append(" ", h("button", { type: "button", onclick: () => ask().catch((error) => setText(status, explain(error).join(" "))) }, "Ask what became of it"));
      }
    } catch (error) {
      setText(status, explain(error).filter(Boolean).join(" "));
    }
  }

  confirmStop() {
    confirm({
      title: "Stop the agent?",
      text: "Its process and everything that it started are ended. What it has done stays; what it is doing is cut off. Interrupt ends only its turn.",
      yes: "Stop it", no: "Let it run", act: () => this.control("stop"),
    });
  }
}

// --- entries ---

function messageNode(entry) {
  const texts = entry.content.map((part) => (typeof part.text === "string" ? part.text : `[${part.type}]`));
  return h("article", { class: "message" },
    h("header", {}, h("h3", { class: "who" }, entry.author ? oneLine(entry.author, 60) : "You"), h("span", { class: "when" }, time(entry.at)),
      entry.into && h("span", { class: "tag" }, "joined the running response")),
    h("div", { class: "body", dir: "auto" }, words(texts.join("\n\n"))));
}

/** A request that came to nothing before or instead of an execution. */
class FailureView {
  constructor(entry, view) {
    const { code, detail, retryable } = entry;
    const next = remedyOf(code) || (retryable ? "Send the message again." : "");
    this.entry = entry;
    this.view = view;
    this.choices = h("div", { class: "row" });
    this.node = h("article", { class: "notice end" }, h("strong", {}, "This message came to nothing. "), `${oneLine(code, 80)}: ${oneLine(detail, 600)} `, next, this.choices);
    this.updateHead();
  }

  updateHead() {
    const choices = this.view.isNewest(this.entry) ? resumeChoices(this.entry) : [];
    drawChoices(this.choices, choices, (choice, text) =>
      h("button", { type: "button", onclick: () => this.view.resend(this.entry, choice) }, text));
  }
}

function noticeNode({ kind, body, error, at }) {
  if (kind === "problem") {
    const [what, remedy] = explain(error);
    const { first, last } = error.context ?? {};
    const range = first === undefined ? "" : ` (events ${first} to ${last})`;
    return h("article", { class: "notice gap" }, h("strong", {}, "The stream: "), `${what}${range}. `, remedy);
  }
  const list = facts([
    ["stream", body.stream], ["model request", body.model_request], ["unreadable", body.corrupt],
    ["salvaged", body.salvaged && oneLine(body.salvaged, 400)], ["at", time(at)],
  ]);
  return h("article", { class: "notice recovery" }, h("strong", {}, "Recovered. "), list);
}
