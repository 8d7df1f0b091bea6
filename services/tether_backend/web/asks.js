/* What waits for a human, answered where it stands: an approval (allow, deny, change the input) or questions.
 *
 *     pending ── answer ──▶ sent ──▶ receipt told in words ──▶ interaction.resolved closes it
 *                             └──▶ refused, or no reply: said, with what to do; the form stays
 *
 * An answer has no id of its own here: the server derives one from what it says, so the same answer again is the same one.
 */

import { explain, freshId, h, oneLine, plain, pretty, setText, telling, textOf } from "/static/dom.js";
import { block } from "/static/items.js";

const RECEIPTS = {
  accepted: "Accepted. The agent has not taken it yet.",
  delivered: "Delivered to the agent.",
  settled: "Done: the agent has taken it.",
  rejected: "Refused.",
  unknown: "No reply in time: it may have been taken or not. Nothing was sent again.",
};

/** A receipt `{status, reason?, detail?, problem?}` in words. */
export function receiptWords({ status, reason, detail, problem }) {
  const why = [problem?.title ?? reason, problem?.detail ?? detail].filter(Boolean).map((one) => oneLine(one, 300));
  return [RECEIPTS[status] ?? `Its state is ${status}.`, ...why].join(" ");
}

const ENDS = {
  approval: { answered: "Allowed", denied: "Denied", expired: "Expired: its process ended first", cancelled: "Cancelled" },
  question: { answered: "Answered", denied: "Declined", expired: "Expired: its process ended first", cancelled: "Cancelled" },
};

const button = (text, onclick, kind = "") => h("button", { type: "button", class: kind, onclick }, text);

function field(label, control, hint) {
  control.id = freshId("field");
  const note = hint && h("p", { class: "note", id: `${control.id}-hint` }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { htmlFor: control.id }, label), control, note);
}

/** What the agent offers beyond allowing or denying this once: `decision` is what it comes to. */
function offers(item) {
  return (item.options ?? [])
    .filter(({ id, kind }) => typeof id === "string" && /^(allow|reject)_always$/.test(kind))
    .map(({ id, label, kind }) => ({
      id, label: oneLine(typeof label === "string" && label ? label : id, 60), decision: kind.startsWith("allow") ? "allow" : "deny",
    }));
}

/** The answer that was given before, as it may be given again; null where there is none. An option that the agent does
 * not offer this time is left out: the decision stays, for this once. */
function givenBefore({ asks, offered, options }) {
  if (!offered || !["allow", "deny"].includes(offered.decision)) return null;
  const { decision, text, input } = offered;
  const answers = { ...offered.answers };
  const ids = new Set((options ?? []).map(({ id }) => id));
  if (asks === "approval" && ![answers.option ?? []].flat().every((id) => ids.has(id))) delete answers.option;
  const told = { decision, text, input, answers: Object.keys(answers).length ? answers : undefined };
  return Object.fromEntries(Object.entries(told).filter(([, value]) => value !== undefined && value !== null));
}

/** That answer in a few words: "Allow", "Deny: not today", "Red; Large". */
function answerWords({ decision, text, input, answers = {} }, { asks, options }) {
  const option = asks === "approval" && answers.option && (options ?? []).find(({ id }) => [answers.option].flat().includes(id));
  if (option) return oneLine(textOf(option.label || option.id), 60);
  const chosen = asks === "question" && decision === "allow" ? Object.values(answers).map((values) => [values].flat().join(", ")) : [];
  const what = chosen.length ? chosen.join("; ") : decision === "deny" ? "Deny" : input ? "Allow with another input" : "Allow";
  return oneLine(text ? `${what}: ${text}` : what, 160);
}

/** The view of an interaction. `ctx`: `answer(item, body)`, `control(id)`, `leave()` where focus goes afterwards. */
export class AskView {
  constructor(item, ctx) {
    this.ctx = ctx;
    this.item = item;
    this.title = h("h4", { id: freshId("ask"), tabIndex: -1 });
    this.body = h("div", { class: "body" });
    this.status = h("p", { class: "status", role: "status" });
    this.node = h(
      "section", { class: "item ask", "aria-labelledby": this.title.id }, this.title, this.body, this.status,
    );
    this.drawn = null;
    this.receipt = null;
    this.update(item);
  }

  update(item) {
    this.item = item;
    this.node.dataset.state = item.state;
    if (this.drawn === item.state) return;
    this.drawn = item.state;
    if (item.state === "pending") this.open();
    else this.close();
  }

  /** A receipt of its control, as the log tells it. */
  tell(receipt) {
    if (this.item.state === "pending" && receipt.interaction === this.item.id) setText(this.status, receiptWords(receipt));
  }

  open() {
    const { item } = this;
    const isApproval = item.asks === "approval";
    setText(this.title, isApproval ? `May it run ${oneLine(item.name || "this tool", 60)}?` : "The agent asks");
    const description = item.description && h("p", {}, plain(item.description));
    const again = this.again();
    this.body.replaceChildren(...[description, isApproval ? this.approval(again) : this.questions(again)].filter(Boolean));
  }

  /** What was answered before its process was cut, and the button that gives the same answer: null where nothing was. */
  again() {
    const body = givenBefore(this.item);
    if (body === null) return null;
    const note = h("p", { id: freshId("before") }, `You answered this before: ${answerWords(body, this.item)}. Give the same answer again?`);
    const buttons = [button("Give the same answer", () => this.send(body, buttons), "primary")];
    buttons[0].setAttribute("aria-describedby", note.id);
    const why = h("p", { class: "note" }, "Its process ended before it was known whether the answer was applied.");
    const node = h("div", { class: "before" }, note, body.input ? block("The input that was allowed", body.input) : null, h("div", { class: "row" }, buttons[0]), why);
    return { node, buttons };
  }

  close() {
    const { item } = this;
    const hadFocus = this.node.contains(document.activeElement);
    setText(this.title, `${ENDS[item.asks]?.[item.state] ?? item.state}: ${item.asks === "approval" ? oneLine(item.name || "a tool", 60) : oneLine(item.questions[0]?.question ?? "a question", 90)}`);
    const glance = item.asks === "approval" ? telling(item.input) : "";
    this.body.replaceChildren(...(glance ? [h("code", { class: "glance" }, glance)] : []));
    setText(this.status, "");
    if (hadFocus) this.ctx.leave(this.node);
  }

  async send(body, buttons) {
    for (const one of buttons) one.disabled = true;
    setText(this.status, "Sending…");
    try {
      this.told(await this.ctx.answer(this.item, body));
    } catch (error) {
      this.status.replaceChildren(...explain(error).filter(Boolean).map((text) => h("span", {}, `${text} `)));
    }
    if (this.item.state === "pending") for (const one of buttons) one.disabled = false;
  }

  told(answer) {
    if (this.item.state !== "pending") return;
    setText(this.status, receiptWords(answer));
    if (answer.status !== "unknown") return;
    const again = button("Ask what became of it", async () => {
      try {
        this.told(await this.ctx.control(answer.control_id));
      } catch (error) {
        setText(this.status, explain(error).join(" "));
      }
    });
    this.status.append(" You may send the same answer again: it counts once. ", again);
  }

  // --- approval ---

  approval(again) {
    const { item } = this;
    const reason = h("input", { type: "text", maxLength: 4000, autocomplete: "off" });
    const changed = this.changedInput();
    const allow = button("Allow", () => this.send({ decision: "allow" }, all), again ? "" : "primary");
    const deny = button("Deny", () => this.send({ decision: "deny", text: reason.value.trim() || undefined }, all), "danger");
    const offered = offers(item).map(({ id, label, decision }) =>
      button(label, () => this.send({ decision, answers: { option: [id] } }, all)));
    const all = again?.buttons ?? [];
    all.push(allow, deny, changed.button, ...offered);
    changed.button.addEventListener("click", () => {
      const input = changed.value();
      if (input !== null) this.send({ decision: "allow", input }, all);
    });
    reason.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) deny.click();
    });
    return h(
      "div", {},
      item.input === null || item.input === undefined ? null : block("It would run with", item.input),
      again?.node,
      h("div", { class: "row" }, allow, deny, ...offered),
      h("details", { class: "more" }, h("summary", {}, "Say why not, or change the input"),
        field("Reason for denying (told to the agent)", reason), changed.node),
    );
  }

  changedInput() {
    const text = h("textarea", { rows: 6, spellcheck: false, class: "code" }, pretty(this.item.input ?? {}));
    const error = h("p", { class: "error", id: freshId("error"), role: "alert" });
    const value = () => {
      const [found, why] = parseObject(text.value);
      setText(error, why);
      text.setAttribute("aria-invalid", String(found === null));
      if (found === null) text.focus();
      return found;
    };
    text.addEventListener("input", () => {
      const [found, why] = parseObject(text.value);
      setText(error, why);
      text.setAttribute("aria-invalid", String(found === null));
    });
    const node = field("Input to run with instead, as JSON", text);
    text.setAttribute("aria-describedby", error.id);
    const send = h("button", { type: "button" }, "Allow with this input");
    node.append(error, h("div", { class: "row" }, send));
    return { node, button: send, value };
  }

  // --- questions ---

  questions(again) {
    const all = again?.buttons ?? [];
    const parts = this.item.questions.map((question) => new Part(question));
    const form = h("form", { noValidate: true });
    const submit = h("button", { type: "submit", class: again ? "" : "primary" }, "Send the answer");
    const decline = button("Decline", () => this.send({ decision: "deny" }, all), "danger");
    all.push(submit, decline);
    form.append(...(again ? [again.node] : []), ...parts.map((part) => part.node), h("div", { class: "row" }, submit, decline));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const missing = parts.filter((part) => !part.check());
      if (missing.length) missing[0].focus();
      else this.send({ decision: "allow", answers: Object.fromEntries(parts.map((part) => [part.id, part.value()])) }, all);
    });
    return form;
  }
}

/** A JSON object out of a text: `[object, ""]`, or `[null, why not]`. */
function parseObject(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return [null, `This is not JSON: ${error.message}`];
  }
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  return isObject ? [value, ""] : [null, "The input must be a JSON object: { … }"];
}

/** One question: its options (one, or several), and a text of one's own. */
class Part {
  constructor({ id, question, header, options = [], multiple = false }) {
    this.id = id;
    this.multiple = multiple;
    const name = freshId("option");
    this.choices = options.map((option) => {
      const label = textOf(option.label ?? option.value ?? option);
      const input = h("input", { type: multiple ? "checkbox" : "radio", name, value: label, id: freshId("choice") });
      const description = option.description && h("span", { class: "note" }, plain(option.description));
      return { label, input, node: h("label", { class: "choice", htmlFor: input.id }, input, h("span", {}, plain(label), " ", description)) };
    });
    this.own = h("input", { type: "text", maxLength: 8000, autocomplete: "off" });
    this.own.addEventListener("input", () => {
      if (!multiple && this.own.value) for (const { input } of this.choices) input.checked = false;
    });
    for (const { input } of this.choices) {
      input.addEventListener("change", () => {
        if (!multiple) this.own.value = "";
      });
    }
    this.error = h("p", { class: "error", role: "alert" });
    const title = [header && h("span", { class: "tag" }, plain(header)), plain(question)].filter(Boolean);
    this.node = h(
      "fieldset", {}, h("legend", { dir: "auto" }, ...title),
      multiple && options.length ? h("p", { class: "note" }, "Several may be chosen.") : null,
      ...this.choices.map((choice) => choice.node),
      field(options.length ? "Or in your own words" : "Your answer", this.own), this.error,
    );
  }

  value() {
    const chosen = this.choices.filter(({ input }) => input.checked).map(({ label }) => label);
    const own = this.own.value.trim();
    return own ? [...chosen, own] : chosen;
  }

  check() {
    const ok = this.value().length > 0;
    setText(this.error, ok ? "" : "An answer is needed.");
    return ok;
  }

  focus() {
    (this.choices[0]?.input ?? this.own).focus();
  }
}
