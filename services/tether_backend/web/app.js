/* The page: signing in, which view is shown, what the connection does.
 *
 *     #token=…            signs in; taken out of the address at once, before anything else is done
 *     #/                  conversations        #/c/{id}        one of them
 *     #/executions        executions           #/sandboxes     sandboxes
 *
 * The token is kept for this tab alone (sessionStorage) and is sent as a header of requests to this very origin.
 */

import { ConversationView } from "/static/conversation.js";
import { Announcer, TOKEN, explain, h, setText } from "/static/dom.js";
import { ConversationList, executionsView } from "/static/lists.js";
import { sandboxesView } from "/static/sandboxes.js";
import { TetherClient } from "/static/tether.js";

const TOKEN_KEY = "tether.token";
const CONNECTION = {
  loading: ["busy", "Loading"], connecting: ["busy", "Connecting"], replaying: ["busy", "Replaying what was missed"],
  live: ["live", "Live"], waiting: ["down", "Reconnecting"], unauthorized: ["down", "Signed out"],
  refused: ["down", "Refused"], ended: ["off", "Ended"], closed: ["off", "Closed"],
};

/** The token of the fragment, taken out of the address and of the history. */
function takeToken() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const token = location.hash.startsWith("#token=") ? parameters.get("token") : null;
  if (token === null) return;
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
}

class App {
  constructor() {
    this.root = document.getElementById("app");
    this.announcer = new Announcer(document.getElementById("announcer"));
    this.view = null;
    this.list = null;
    addEventListener("hashchange", () => {
      if (location.hash.startsWith("#token=")) {
        takeToken();
        this.start();
      } else if (this.client) this.route(true);
    });
    addEventListener("offline", () => this.client && this.connection("waiting", { error: { detail: "this device is offline" } }));
    this.start();
  }

  start() {
    this.leave();
    const token = sessionStorage.getItem(TOKEN_KEY);
    if (!token) {
      this.signIn("");
      return;
    }
    this.client = new TetherClient({ token: () => sessionStorage.getItem(TOKEN_KEY) ?? "" });
    this.frame();
    this.route(false);
  }

  leave() {
    this.view?.close();
    this.list?.close();
    this.client = this.view = this.list = null;
  }

  signedOut(why) {
    if (this.client === null) return;
    sessionStorage.removeItem(TOKEN_KEY);
    this.leave();
    this.signIn(why);
  }

  // --- signing in ---

  signIn(why) {
    document.title = "Sign in – Tether";
    const token = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: false, "aria-describedby": "token-hint token-error" });
    const error = h("p", { class: "error", id: "token-error", role: "alert" }, why);
    const submit = h("button", { type: "submit", class: "primary" }, "Sign in");
    const form = h("form", { class: "sign-in", noValidate: true },
      h("h1", {}, "Tether"), h("label", { htmlFor: "token" }, "Token"), token,
      h("p", { class: "note", id: "token-hint" }, "It is in the token file that ", h("code", {}, "tether up"), " names. It is kept in this tab alone."), error, submit);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const value = token.value.trim();
      if (!/^[\x21-\x7e]+$/.test(value)) {
        setText(error, value ? "A token has no spaces and no letters beyond ASCII." : "Paste the token.");
        token.focus();
        return;
      }
      submit.disabled = true;
      setText(error, "");
      try {
        await new TetherClient({ token: value }).conversations({ limit: 1 });
        sessionStorage.setItem(TOKEN_KEY, value);
        this.start();
      } catch (problem) {
        const [what, remedy] = explain(problem);
        setText(error, problem.status === 401 ? "This token is not accepted." : `${what} ${remedy}`);
        submit.disabled = false;
        token.focus();
      }
    });
    this.root.replaceChildren(h("main", { class: "door" }, form));
    token.focus();
  }

  // --- the frame ---

  frame() {
    this.connectionNode = h("p", { class: "connection", role: "status" });
    this.links = new Map([["#/", "Conversations"], ["#/executions", "Executions"], ["#/sandboxes", "Sandboxes"]]
      .map(([href, text]) => [href, h("a", { href }, text)]));
    const out = h("button", { type: "button", class: "quiet", onclick: () => this.signedOut("") }, "Sign out");
    this.list = new ConversationList(this);
    this.main = h("main", { id: "main" });
    this.shell = h("div", { class: "shell" },
      h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), this.focusMain()) }, "Skip to the content"),
      h("header", { class: "top" }, h("span", { class: "brand" }, "Tether"),
        h("nav", { "aria-label": "Views" }, ...this.links.values()), this.connectionNode, out),
      this.list.node, this.main, h("datalist", { id: "agent-kinds" }, ...["claude", "codex", "scripted"].map((value) => h("option", { value }))));
    this.root.replaceChildren(this.shell);
    this.connection("loading", {});
  }

  focusMain() {
    (this.main.querySelector("h1") ?? this.main).focus();
  }

  route(byReader) {
    const path = location.hash.slice(1) || "/";
    const id = path.startsWith("/c/") ? safeDecode(path.slice(3)) : null;
    this.view?.close();
    this.view = null;
    this.shell.dataset.view = path === "/" ? "list" : id === null ? "table" : "conversation";
    for (const [href, link] of this.links) {
      const isHere = href === `#${path}` || (href === "#/" && id !== null);
      if (isHere) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.list.select(id);
    if (id !== null && TOKEN.test(id)) this.view = new ConversationView(this, id);
    else if (path === "/executions") this.view = executionsView(this);
    else if (path === "/sandboxes") this.view = sandboxesView(this);
    if (this.view) this.main.replaceChildren(this.view.node);
    else {
      const known = path === "/";
      this.main.replaceChildren(h("div", { class: "welcome" }, h("h1", { tabIndex: -1 }, known ? "Conversations" : "There is no such view"),
        h("p", { class: "sub" }, known ? "Choose a conversation, or begin a new one." : "A conversation's id has 1 to 64 of the characters A-Z a-z 0-9 _ -")));
      this.titled(known ? "Conversations" : "Not found", 0);
      this.list.changed();
    }
    if (byReader) (path === "/" ? this.list.node.querySelector("h2") : this.main.querySelector("h1")).focus();
  }

  // --- what views tell ---

  titled(title, pending) {
    const text = `${pending ? `(${pending}) ` : ""}${title} – Tether`;
    if (document.title !== text) document.title = text;
  }

  connection(state, detail) {
    const [kind, text] = CONNECTION[state] ?? ["busy", state];
    this.connectionNode.dataset.kind = kind;
    const why = state === "waiting" && detail.error ? explain(detail.error)[0] : "";
    setText(this.connectionNode, text);
    this.connectionNode.title = why;
  }

  /** Of the list beside a conversation, whose own stream says more. */
  listState(state, detail) {
    if (detail.error?.status === 401) this.signedOut("The token is no longer accepted.");
    else if (this.view === null) this.connection(state, detail);
  }

  changed() {
    this.list?.changed();
  }
}

function safeDecode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

takeToken();
new App();
