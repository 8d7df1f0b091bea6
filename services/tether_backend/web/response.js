/* A response: its head, its items in order, how it ended. Only what changed is drawn; of a long one only the end. */

import { AskView } from "/static/asks.js";
import { count, duration, explain, h, money, oneLine, plain, remedyOf, resumeChoices, setText, time } from "/static/dom.js";
import { viewOf } from "/static/items.js";

const SHOWN_FIRST = 150; // items of one response that are drawn at first
const STEP = 200; // and further ones, each time that they are asked for
export const SHOWN_MOST = 1200; // while the reader is at the end; older ones can be shown again

const OUTCOMES = {
  completed: ["completed", ""],
  failed: ["failed", ""],
  cancelled: ["interrupted", ""],
  stopped: ["stopped", ""],
  drained: ["saved and shut down", "The sandbox was shut down in good order. Send a message to go on."],
  lost: ["lost", "Its process vanished before it was done. What it did may have had effects; send a message to go on from its last session."],
  never_started: ["never started", "Nothing of it ran. Send the message again."],
  superseded: ["replaced by a newer message", ""],
};
const BARE = new Set(["failed", "never_started"]); // it failed, it never started; it was stopped
const PHASES = {
  starting: "starting", running: "running", waiting: "waiting for you", exiting: "finishing", ended: "ended",
};

/** `ctx`: `earlier(run)`, `leave(node)`, `client`, `conversation`, `isNewest(entry)`, `resend(entry, choice)`. */
export class ResponseView {
  constructor(entry, run, ctx) {
    this.ctx = ctx;
    this.run = run;
    this.entry = entry;
    this.views = new Map();
    this.hidden = 0; // items of the run before those that are drawn
    this.name = h("h3", { class: "who" });
    this.state = h("span", { class: "state" });
    this.usage = h("span", { class: "usage" });
    this.earlier = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.showEarlier() });
    this.asks = h("div");
    this.items = h("div", { class: "items" });
    this.notes = h("div", { class: "notes" });
    this.choices = h("div", { class: "row" });
    this.node = h(
      "article", { class: "response" },
      h("header", {}, this.name, this.state, h("span", { class: "when" }, time(entry.at)), this.usage),
      this.earlier, this.asks, this.items, this.notes, this.choices,
    );
    this.rebuild(SHOWN_FIRST);
    this.updateHead();
  }

  get drawn() {
    return this.views.size;
  }

  /** All items anew, the last `most` of them drawn; views that are there are kept, with what is open in them. */
  rebuild(most = Math.max(SHOWN_FIRST, this.views.size)) {
    this.run.fold.touched.clear();
    const keys = this.run.fold.keys();
    this.hidden = Math.max(0, keys.length - most);
    const shown = keys.slice(this.hidden);
    const wanted = new Set(shown);
    for (const [key, view] of this.views) {
      if (wanted.has(key)) continue;
      view.node.remove();
      this.views.delete(key);
    }
    let at = this.items.firstChild;
    for (const key of shown) {
      const view = this.draw(key);
      if (view.node === at) at = at.nextSibling;
      else this.items.insertBefore(view.node, at);
    }
    this.asks.replaceChildren(...[...this.run.asks.values()].map((item) => this.make(item).node));
    this.updateEarlier();
  }

  make(item) {
    return item.kind === "interaction" ? new AskView(item, this.askContext()) : viewOf(item);
  }

  askContext() {
    const { ctx, run } = this;
    return {
      answer: (item, body) => ctx.client.answer(ctx.conversation, item.id, { ...body, execution: run.id }),
      control: (id) => ctx.client.control(id, run.id),
      leave: ctx.leave,
    };
  }

  draw(key) {
    const item = this.run.fold.item(key);
    let view = this.views.get(key);
    if (view === undefined) this.views.set(key, (view = this.make(item)));
    else view.update(item);
    return view;
  }

  /** What was touched since the last time. */
  sync() {
    const { touched } = this.run.fold;
    for (const [key, how] of touched) {
      const isDrawn = this.views.has(key);
      if (!isDrawn && how === "changed") continue; // of those that are not shown
      const view = this.draw(key);
      if (!isDrawn) this.items.append(view.node);
    }
    touched.clear();
    for (const receipt of Object.values(this.run.fold.head.receipts)) {
      if (receipt.interaction) this.views.get(`interaction/${receipt.interaction}`)?.tell?.(receipt);
    }
    this.updateHead();
  }

  /** Take items off the beginning until `most` are drawn. The reader is at the end, and can have them back. */
  trim(most) {
    const over = this.views.size - most;
    if (over <= 0) return;
    let left = over;
    for (const [key, view] of this.inOrder()) {
      if (left === 0 || view.node.contains(document.activeElement)) break;
      view.node.remove();
      this.views.delete(key);
      this.hidden += 1;
      left -= 1;
    }
    this.updateEarlier();
  }

  inOrder() {
    return this.run.fold.keys().slice(this.hidden).map((key) => [key, this.views.get(key)]).filter(([, view]) => view);
  }

  updateEarlier() {
    const left = this.hidden + this.run.omitted;
    this.earlier.hidden = left === 0;
    setText(this.earlier, `Show earlier steps (${count(left)} not shown)`);
  }

  async showEarlier() {
    if (this.hidden === 0 && this.run.omitted > 0) {
      this.earlier.disabled = true;
      try {
        await this.ctx.earlier(this.run);
      } catch (error) {
        setText(this.earlier, explain(error).join(" "));
        return;
      } finally {
        this.earlier.disabled = false;
      }
    }
    this.ctx.keepPlace(() => this.rebuild(this.views.size + STEP));
    if (this.earlier.hidden) this.items.querySelector("summary, button")?.focus({ preventScroll: true });
  }

  // --- head and end ---

  get outcome() {
    const { state, outcome } = this.entry;
    if (state === "superseded") return "superseded";
    if (state === "failed") return "failed";
    return this.run.outcome ?? outcome ?? null;
  }

  updateHead() {
    const { head } = this.run.fold;
    const outcome = this.outcome;
    const agent = head.agent ?? this.entry.agent ?? "agent";
    setText(this.name, plain(agent) + (head.model ? ` · ${oneLine(head.model, 40)}` : ""));
    let state = outcome === null ? PHASES[head.phase] ?? head.phase : (OUTCOMES[outcome]?.[0] ?? outcome);
    if (outcome === null && this.run.pending.length) state = PHASES.waiting;
    setText(this.state, state);
    this.state.dataset.state = outcome ?? (state === PHASES.waiting ? "waiting" : "running");
    this.node.setAttribute("aria-busy", String(outcome === null));
    setText(this.usage, usageWords(head));
    this.updateNotes(outcome);
  }

  /** Only of the newest request: what was said after it has chosen already. */
  updateChoices(error) {
    const choices = this.ctx.isNewest(this.entry) ? resumeChoices(error) : [];
    drawChoices(this.choices, choices, (choice, text) =>
      h("button", { type: "button", onclick: () => this.ctx.resend(this.entry, choice) }, text));
  }

  updateNotes(outcome) {
    const { head } = this.run.fold;
    const lines = [];
    const error = this.entry.error ?? head.error;
    this.updateChoices(outcome === null ? null : error);
    if (outcome !== null && outcome !== "completed") {
      const [name, remedy] = OUTCOMES[outcome] ?? [outcome, ""];
      const says = error && (error.detail || ![outcome, name].includes(error.code.toLowerCase())); // more than the outcome itself
      const told = says ? `: ${[oneLine(error.code, 80), error.detail && oneLine(error.detail, 600)].filter(Boolean).join(" – ")}` : "";
      const next = remedyOf(error?.code) || remedy || (outcome === "failed" ? "Send a message to try again." : "");
      const kind = ["failed", "lost", "never_started"].includes(outcome) ? "end" : "calm";
      lines.push([kind, `This response ${BARE.has(outcome) ? "" : "was "}${name}${told}.`, next]);
    } else if (outcome === "completed" && error) lines.push(["end", `${oneLine(error.code, 80)}: ${oneLine(error.detail ?? "", 600)}`, remedyOf(error.code)]);
    const request = head.model_request;
    if (outcome === null && request && !this.run.speaks && (request.state === "retrying" || request.state === "failed")) {
      lines.push(["model", modelWords(request), ""]);
    }
    if (head.background.length && head.phase !== "ended") {
      lines.push(["background", `${head.background.length} background ${head.background.length === 1 ? "task runs" : "tasks run"} on.`, ""]);
    }
    if (head.raw_omitted) lines.push(["raw", `${count(head.raw_omitted)} more lines without a meaning are left out.`, ""]);
    if (head.tail === "unknown") lines.push(["gap", "Whether this is all of it is not known: its volume could not be read.", ""]);
    if (head.partial && head.tail !== "unknown") lines.push(["gap", "Parts of this response are missing; the places are marked.", ""]);
    const signature = JSON.stringify(lines);
    if (signature === this.signature) return;
    this.signature = signature;
    this.notes.replaceChildren(...lines.map(([kind, text, next]) => h("p", { class: `notice ${kind}` }, text, next && ` ${next}`)));
  }
}

/** Draw the buttons anew where which of them there are has changed. `make(choice, text)` makes one. */
export function drawChoices(node, choices, make) {
  const names = choices.map(([choice]) => choice).join(" ");
  if ((node.dataset.choices ?? "") === names) return;
  node.dataset.choices = names;
  node.replaceChildren(...choices.map(([choice, text]) => make(choice, text)));
}

function modelWords({ state, attempt, attempts_max: most, delay_ms: delay, http_status: status, detail }) {
  const facts = [status && `HTTP ${status}`, detail && oneLine(detail, 300)].filter(Boolean).join(", ");
  if (state === "failed") return `The model's request failed${facts && `: ${facts}`}.`;
  const which = attempt ? ` (attempt ${attempt}${most ? ` of ${most}` : ""})` : "";
  return `The model's request is made again${which}${facts && `: ${facts}`}${delay ? `, in ${delay / 1000} s` : ""}.`;
}

export function usageWords({ usage, started_at: started, response_ended_at: ended }) {
  if (!usage.turns) return "";
  const tokens = `${count(usage.input_tokens)} in, ${count(usage.output_tokens)} out`;
  const took = started && ended ? ` · ${duration(ended - started)}` : "";
  return `${tokens} · ${money(usage.cost_usd)}${took}`;
}
