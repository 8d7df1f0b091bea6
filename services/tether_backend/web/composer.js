/* Where a message is written. Enter sends, Shift+Enter begins a line; what is not sent yet survives a reload. */

import { freshId, h, randomId, readJson, setText } from "/static/dom.js";

const TEXT_PIXELS_MOST = 240;
const MODES = [
  ["auto", "auto: take its turn"], ["interject", "interject: into the running response"],
  ["takeover", "takeover: replace the running response"],
];

export class Composer {
  constructor(view) {
    this.view = view;
    this.text = h("textarea", {
      rows: 1, id: freshId("message"), placeholder: "Message", "aria-label": "Message", enterKeyHint: "send", dir: "auto",
    });
    const short = { type: "text", autocomplete: "off", spellcheck: false, maxLength: 64 };
    this.agent = h("input", { ...short, pattern: "[a-z0-9][a-z0-9:._\\-]{0,63}", placeholder: "claude" });
    this.agent.setAttribute("list", "agent-kinds"); // read-only as a property
    this.mode = h("select", {}, ...MODES.map(([value, label]) => h("option", { value }, label)));
    this.workspace = h("input", { ...short, placeholder: "one of its own" });
    this.error = h("p", { class: "error", role: "alert" });
    this.submit = h("button", { type: "submit", class: "primary" }, "Send");
    const labelled = (label, control) => h("label", { class: "option" }, h("span", {}, label), control);
    this.workspaceLabel = labelled("Workspace", this.workspace);
    this.options = h("div", { class: "options" }, labelled("Agent", this.agent), labelled("Mode", this.mode), this.workspaceLabel);
    this.node = h("form", { class: "composer", noValidate: true, "aria-label": "New message" },
      h("div", { class: "line" }, this.text, this.submit), this.error, this.options);
    this.node.addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    this.node.addEventListener("input", () => this.save());
    this.node.addEventListener("change", () => this.save());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    const draft = readJson(this.key, {});
    this.text.value = draft.text ?? "";
    this.agent.value = draft.agent ?? localStorage.getItem("tether.agent") ?? "";
    this.agentChosen = Boolean(draft.agent);
    this.agent.addEventListener("input", () => (this.agentChosen = true));
    this.mode.value = draft.mode ?? "auto";
    this.workspace.value = draft.workspace ?? "";
    queueMicrotask(() => this.grow());
  }

  get key() {
    return `tether.draft.${this.view.id}`;
  }

  save() {
    const [agent, mode, workspace] = [this.agentChosen ? this.agent.value : undefined, this.mode.value, this.workspace.value];
    sessionStorage.setItem(this.key, JSON.stringify({ text: this.text.value, agent, mode, workspace }));
    setText(this.error, "");
    this.grow();
  }

  grow() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, TEXT_PIXELS_MOST)}px`;
  }

  /** The workspace is fixed by the first message; who answered last answers next, unless the reader says otherwise. */
  update() {
    const last = this.view.model.entries.findLast((entry) => entry.type === "response" && entry.agent);
    if (last && !this.agentChosen) this.agent.value = last.agent;
    this.workspaceLabel.hidden = !this.view.model.loaded || this.view.model.entries.length > 0;
  }

  offer(text) {
    this.text.value = this.text.value ? `${text}\n${this.text.value}` : text;
    this.save();
    this.text.focus();
  }

  send() {
    const content = this.text.value;
    if (!content.trim()) return;
    if (this.agent.value && !this.agent.checkValidity()) {
      setText(this.error, "Agent: lower-case letters, digits and : . _ - only, such as claude, codex or scripted.");
      this.agent.focus();
      return;
    }
    const workspace = this.workspaceLabel.hidden ? "" : this.workspace.value.trim();
    if (workspace && !/^[A-Za-z0-9_-]{1,64}$/.test(workspace)) {
      setText(this.error, "Workspace: 1 to 64 of the characters A-Z a-z 0-9 _ -");
      this.workspace.focus();
      return;
    }
    const [agent, mode] = [this.agent.value.trim(), this.mode.value];
    localStorage.setItem("tether.agent", agent);
    this.text.value = "";
    this.mode.value = "auto"; // the others are meant for one message
    this.save();
    const message = { content, agent: agent || undefined, workspace: workspace || undefined, mode };
    this.view.send({ requestId: randomId("req"), ...message });
  }
}
