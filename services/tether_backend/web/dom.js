/* Building nodes and words. Data reaches the document as text nodes and fixed attributes only, never as markup. */

/** An element: `props` are properties (`class`, `dataset`, `on…` handlers, attributes with a dash), children nodes or texts. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !name.includes("-")) node[name] = value;
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set a node's text only where it differs: an unchanged text is not told again by a screen reader. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

let ids = 0;
/** An id for a label's sake. */
export const freshId = (prefix) => `${prefix}-${(ids += 1)}`;

/** Any value as a text. An object's own `toString` may be anything. */
export const textOf = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));

/** What would turn the order of what is shown around, or hide, told as its code. */
const TRICKS = /(?![\t\n\ufe0e\ufe0f])[\p{Cc}\p{Cf}\p{Cs}\p{Default_Ignorable_Code_Point}\p{Zl}\p{Zp}]/gu;
const unitOf = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
const codeOf = (char) => char.split("").map(unitOf).join(""); // as JSON has it
export const plain = (value) => textOf(value).replace(/\r\n/g, "\n").replace(TRICKS, codeOf);

/** Of an agent's own words: joiners belong to writing (emoji, Arabic, Persian); only what reorders or controls goes. */
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;
export const words = (value) => textOf(value).replace(/\r\n/g, "\n").replace(CONTROLS, "\ufffd");

export function oneLine(value, most = 110) {
  const text = plain(typeof value === "string" ? value : JSON.stringify(value) ?? "").replace(/\s+/g, " ").trim();
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** Any JSON value for reading: a text as it is. */
export const pretty = (value) => plain(typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "");

const TELLING = ["command", "file_path", "path", "pattern", "url", "query", "prompt", "description"];
/** Of a tool's input, what says most in one line. */
export function telling(input) {
  if (input === null || input === undefined || input === "") return "";
  if (typeof input !== "object") return oneLine(input);
  const key = TELLING.find((name) => typeof input[name] === "string");
  return oneLine(key ? input[key] : Object.keys(input).length ? input : "");
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const WHOLE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** A `<time>`: the clock today, else with the date. */
export function time(at) {
  if (!at) return h("span", {}, "–");
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return h("span", {}, "–");
  const today = date.toDateString() === new Date().toDateString();
  const text = (today ? CLOCK : DAY).format(date);
  return h("time", { dateTime: date.toISOString(), title: WHOLE.format(date) }, text);
}

export function money(cost) {
  if (cost === null || cost === undefined) return "cost unknown";
  return cost >= 1 ? `$${cost.toFixed(2)}` : `$${cost.toFixed(6).replace(/\.?0+$/, "") || "0"}`;
}

export function duration(ms) {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export const count = (number) => number.toLocaleString();

export const randomId = (prefix) =>
  `${prefix}_${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

export const TOKEN = /^[A-Za-z0-9_-]{1,64}$/;

/** A list of facts as `<dl>`; what is not known is left out. */
export function facts(pairs) {
  const list = h("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(h("dt", {}, name), h("dd", {}, value instanceof Node ? value : plain(value)));
  }
  return list;
}

/** Told by a screen reader, politely and not faster than it can speak; a queue that grows too long keeps its newest. */
export class Announcer {
  constructor(node) {
    this.node = node;
    this.queue = [];
    this.timer = null;
  }

  say(text) {
    this.queue.push(text);
    if (this.queue.length > 5) this.queue.splice(0, this.queue.length - 5);
    this.timer ??= setTimeout(() => this.next(), 150);
  }

  next() {
    const text = this.queue.shift();
    this.timer = text === undefined ? null : setTimeout(() => this.next(), 1500);
    if (text !== undefined) this.node.replaceChildren(h("p", {}, text));
  }
}

/** Ask before something that cannot be taken back; `act` is called where the answer is yes. */
export function confirm({ title, text, yes, no, act }) {
  const id = freshId("confirm");
  const close = () => dialog.close();
  const agree = h("button", { type: "button", class: "danger", onclick: () => (close(), act()) }, yes);
  const leave = h("button", { type: "button", onclick: close }, no);
  const dialog = h("dialog", { "aria-labelledby": id }, h("h2", { id }, title), h("p", {}, text), h("div", { class: "row" }, leave, agree));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** What `error` says, and what to do: `[what, remedy]`. Any error, of the API or of the network. */
export function explain(error) {
  const code = error?.code ?? error?.problem?.code;
  const detail = error?.detail ?? error?.problem?.detail ?? error?.message ?? String(error);
  const told = code ? `${code}: ${detail}` : detail;
  return [oneLine(told, 600), remedyOf(code) || (error?.retryable ? "Try again in a moment." : "")];
}

const REMEDIES = {
  RUNTIME_UNAVAILABLE: "The service cannot be reached for now. Nothing is lost; try again in a moment.",
  SESSION_STREAM_NOT_ACTIVE: "Nothing is running here. Send the message in mode auto.",
  SESSION_BUSY: "The agent is at work and cannot take this. Wait for its end, interrupt it, or send with mode takeover.",
  CONVERSATION_DELETED: "Nothing of it is kept. Begin another conversation.",
  REQUEST_CONFLICT: "This request was sent before with another text. Send it as a new message.",
  REQUEST_SUPERSEDED: "A newer message took over. Send it again if it is still wanted.",
  LEASE_NOT_READY: "Another part of the service holds the control. Try again in a moment.",
  TARGET_STALE: "This execution no longer runs the conversation. Look at the newest one.",
  TARGET_UNKNOWN: "Its sandbox does not know it yet, or no longer. Look at Executions for where it stands.",
  STOP_UNCONFIRMED: "It was asked to stop; there is no proof of its end yet. Look again before starting anything new.",
  CAPABILITY_MISSING: "The sandbox cannot do this: its version is older, or the agent is not configured. Sandboxes lists what it has.",
  INTERACTION_SETTLED: "Somebody else answered, or it has expired. Nothing is left to do.",
  EXECUTION_DURABILITY_GAP: "A part was never stored. What is shown is all that there is; look at the workspace for its effects.",
  RETENTION_GAP: "A part is no longer kept. What is shown is all that there is.",
  CURSOR_POSITION_CHANGED: "The log was made anew or put back. The state was read again.",
  DRAINING: "The sandbox is being put to sleep. Try again in a moment.",
  CHECKPOINT_FAILED: "The session could not be saved. Try again; look at the service's log if it happens again.",
  RESUME_FAILED: "The agent's earlier session cannot be continued. Send the same message again in a fresh session, or in one that is given the history.",
  QUOTA_EXCEEDED: "Too much is waiting. Wait for what runs, then try again.",
  UNAUTHENTICATED: "Sign in with a valid token.",
  FORBIDDEN: "This token does not allow it.",
  NOT_FOUND: "It is not there (any more).",
  model_error: "The model's provider refused or failed. Send the message again.",
};

export const remedyOf = (code) => (Object.hasOwn(REMEDIES, code) ? REMEDIES[code] : "");

const RESUMES = new Map([["fresh", "Send it again in a fresh session"], ["history", "Send it again with the history"]]);

/** Where the agent's session could not be resumed: `[[choice, what its button says], …]`; else nothing. */
export function resumeChoices(error) {
  if (error?.code !== "RESUME_FAILED") return [];
  return [...RESUMES].filter(([choice]) => !Array.isArray(error.choices) || error.choices.includes(choice));
}

/** What the tab keeps under a key; `otherwise` where there is nothing or it cannot be read. */
export function readJson(key, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
