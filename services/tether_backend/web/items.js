/* One item of an execution as a node that can be brought up to date: text, reasoning, tool, new session, raw line, gap.
 *
 * Text that streams is shown as it comes (plain, marked as provisional); once it is complete it is drawn anew with its
 * markup. What is folded is built when it is opened: ten thousand closed tools are ten thousand lines.
 */

import { h, oneLine, plain, pretty, setText, telling, words } from "/static/dom.js";
import { markdown } from "/static/markdown.js";

const PIECE = 4000; // characters of one block of streaming text: what grows is laid out again, so it is kept short
const SHOWN_MOST = 200_000; // characters of an input or output that are shown

export const TOOL_STATES = {
  running: "running", ok: "done", error: "failed", interrupted: "interrupted",
  unknown: "outcome unknown: its process ended",
};

/** A text that grows at its end; only what is new is written. */
class Stream {
  constructor() {
    this.node = h("div", { class: "stream", dir: "auto" });
    this.shown = "";
    this.tail = null;
  }

  show(text) {
    const whole = words(text);
    if (!whole.startsWith(this.shown)) {
      this.node.replaceChildren();
      [this.shown, this.tail] = ["", null];
    }
    let fresh = whole.slice(this.shown.length);
    this.shown = whole;
    while (fresh) {
      if (this.tail !== null && this.tail.length >= PIECE) {
        const end = fresh.indexOf("\n");
        if (end >= 0) {
          this.tail.appendData(fresh.slice(0, end));
          fresh = fresh.slice(end + 1);
          this.tail = null;
          if (!fresh) break;
        }
      }
      if (this.tail === null) this.node.append(h("div", {}, (this.tail = document.createTextNode(""))));
      const room = Math.max(PIECE - this.tail.length, 0) || fresh.length;
      this.tail.appendData(fresh.slice(0, room));
      fresh = fresh.slice(room);
    }
  }
}

function blobNote(item) {
  if (!item.blob) return null;
  return h("p", { class: "note" }, `This is the beginning; the whole (${item.blob.bytes.toLocaleString()} bytes) is kept apart.`);
}

class TextView {
  constructor() {
    this.body = h("div", { class: "body" });
    this.mark = h("span", { class: "mark" });
    this.node = h("div", { class: "item text" }, this.body);
    this.stream = null;
  }

  update(item) {
    this.node.dataset.state = item.state;
    this.node.classList.toggle("child", item.parent !== null);
    this.node.hidden = item.state === "completed" && !item.text.trim();
    if (item.state === "streaming") {
      if (this.stream === null) this.body.replaceChildren((this.stream = new Stream()).node);
      this.stream.show(item.text);
      return;
    }
    this.stream = null;
    if (item.state === "discarded") {
      this.body.replaceChildren();
      this.node.replaceChildren(h("p", { class: "note" }, "Withdrawn: the model's request was made again."));
      return;
    }
    this.body.replaceChildren(markdown(item.text));
    const cut = item.state === "partial" && h("p", { class: "note" }, "Cut off here.");
    const of = item.parent !== null && h("p", { class: "note" }, "From a subagent");
    this.node.replaceChildren(...[of, this.body, blobNote(item), cut].filter(Boolean));
  }
}

/** A `<details>` whose content is made when it is opened. */
class Folded {
  constructor(kind) {
    this.summary = h("summary");
    this.body = h("div", { class: "body" });
    this.node = h("details", { class: `item ${kind}`, ontoggle: () => this.node.open && this.fill() }, this.summary, this.body);
    this.item = null;
  }

  update(item) {
    this.item = item;
    this.node.dataset.state = item.state ?? "";
    this.node.classList.toggle("child", Boolean(item.parent));
    this.head(item);
    if (this.node.open) this.fill();
  }
}

class ReasoningView extends Folded {
  constructor() {
    super("reasoning");
    this.label = h("span", { class: "label" });
    this.glance = h("span", { class: "glance" });
    this.summary.append(h("span", { class: "name" }, "Reasoning"), this.glance, this.label);
    this.stream = null;
  }

  head(item) {
    this.node.hidden = item.state === "completed" && !item.text.trim();
    setText(this.glance, oneLine(item.text.slice(0, 300), 90));
    setText(this.label, { streaming: "thinking…", partial: "cut off", discarded: "withdrawn" }[item.state] ?? "");
  }

  fill() {
    this.stream ??= new Stream();
    this.stream.show(this.item.text);
    this.body.replaceChildren(this.stream.node, ...[blobNote(this.item)].filter(Boolean));
  }
}

export function block(title, value) {
  const text = pretty(value);
  const cut = text.length > SHOWN_MOST;
  return h(
    "section",
    { class: "block" },
    h("h4", {}, title),
    h("pre", { tabIndex: 0, role: "group", "aria-label": title }, cut ? text.slice(0, SHOWN_MOST) : text),
    cut && h("p", { class: "note" }, `${(text.length - SHOWN_MOST).toLocaleString()} more characters are not shown.`),
  );
}

const empty = (value) => value === null || value === undefined || value === "" ||
  (typeof value === "object" && Object.keys(value).length === 0);

class ToolView extends Folded {
  constructor() {
    super("tool");
    this.name = h("span", { class: "name" });
    this.glance = h("code", { class: "glance" });
    this.label = h("span", { class: "label" });
    this.summary.append(h("span", { class: "dot", "aria-hidden": "true" }), this.name, this.glance, this.label);
  }

  head(item) {
    setText(this.name, oneLine(item.name || "tool", 60));
    setText(this.glance, telling(item.input));
    setText(this.label, TOOL_STATES[item.state] ?? item.state);
  }

  fill() {
    const { item } = this;
    const parts = [
      item.parent && h("p", { class: "note" }, "Run by a subagent"),
      item.detail && h("p", { class: "note" }, plain(item.detail)),
      !empty(item.input) && block("Input", item.input),
      item.progress && block("Progress", item.progress),
      !empty(item.output) && block("Output", item.output),
      blobNote(item),
    ].filter(Boolean);
    const none = item.state === "running" ? "No output yet." : "No output.";
    this.body.replaceChildren(...(parts.length ? parts : [h("p", { class: "note" }, none)]));
  }
}

class RawView extends Folded {
  constructor() {
    super("raw");
    this.glance = h("code", { class: "glance" });
    this.name = h("span", { class: "name" });
    this.summary.append(this.name, this.glance);
  }

  head(item) {
    setText(this.name, item.stream);
    setText(this.glance, oneLine(item.preview, 90));
  }

  fill() {
    const { item } = this;
    const why = `A line that has no meaning here (${item.why}), ${item.bytes.toLocaleString()} bytes.`;
    this.body.replaceChildren(h("p", { class: "note" }, plain(why)), block("As printed", item.preview));
  }
}

const GAPS = {
  spool_evicted: "The sandbox ran out of room to keep them before they were stored.",
  retention_gap: "They are older than what is kept.",
  durability_gap: "They were never stored durably.",
  corrupt: "They cannot be read.",
  position_changed: "The log was made anew or put back.",
  quarantined: "What the sandbox wrote there was refused.",
  limit: "More than is kept of one execution: what exceeds it is left out.",
};

class GapView {
  constructor() {
    this.node = h("div", { class: "item gap", role: "note" });
  }

  update(item) {
    const { from_ordinal: from, to_ordinal: to } = item;
    const one = from !== null && from === to;
    const which = from === null ? "Events" : one ? `Event ${from}` : `Events ${from} to ${to ?? "…"}`;
    this.node.replaceChildren(
      h("strong", {}, `${which} ${one ? "is" : "are"} missing here.`), " ",
      GAPS[item.reason] ?? plain(item.reason), item.detail ? ` (${plain(item.detail)})` : "", " ",
      h("span", { class: "note" }, "What was done in between may have had effects: look at the workspace."),
    );
  }
}

const RECOVERED = {
  not_found: "The agent's earlier session is lost.",
  chosen: "The agent begins a new session, as was chosen.",
  cut: "The turn before was cut before its session could be resumed.",
};

/** The agent goes on in a session of its own, with the history in place of the one that is lost. */
function recoveredWords({ why, source, rows, partial }) {
  const lost = RECOVERED[why] ?? "The agent begins a new session.";
  const count = `${rows.toLocaleString()} ${rows === 1 ? "row" : "rows"}`;
  const from = source === "native" ? "the agent's own file" : "the conversation's history";
  return `${lost} It was given ${count} of what was said, from ${from}${partial ? "; older or longer parts are left out" : ""}.`;
}

class SessionView {
  constructor() {
    this.node = h("div", { class: "item session notice recovery", role: "note" });
  }

  update(item) {
    this.node.replaceChildren(recoveredWords(item), item.detail ? ` (${oneLine(item.detail, 300)})` : "");
  }
}

const VIEWS = { text: TextView, reasoning: ReasoningView, tool: ToolView, session: SessionView, raw: RawView, gap: GapView };

/** The view of an item's kind; interactions have theirs in `asks`. */
export function viewOf(item) {
  const view = new VIEWS[item.kind]();
  view.update(item);
  return view;
}
