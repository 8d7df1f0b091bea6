/* A small safe Markdown: text in, nodes out, never markup. What a rule does not know is shown as it was written.
 *
 * Blocks: fenced code, headings, lists (two levels), quotes, rules, paragraphs. Inline: code, strong, emphasis, links and
 * bare addresses of http and https alone, opened without opener or referrer. Each rule is linear in the text's length,
 * and a text beyond MOST is shown as it is: an agent's output may be hostile.
 */

import { h, words } from "/static/dom.js";

const MOST = 200_000; // characters that are looked at for markup
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const LANGUAGE = /^[\w+#.-]{0,32}/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)]) +(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const INLINE =
  /(`{1,8})([^`](?:[^`]|(?!\1)`){0,2000}?)\1(?!`)|\[([^[\]\n]{1,500})\]\(([^()\s<>]{1,2000})\)|\*\*([^*\n]{1,1000})\*\*|(?<![\w*])\*([^*\s\n](?:[^*\n]{0,1000}[^*\s\n])?)\*(?!\w)|(https?:\/\/[^\s<>"'`)\]]{1,2000})/g;

/** An address that may be opened: http or https, absolute; null for any other. */
export function safeHref(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** Without these characters at its end. A pattern for it would be tried anew from each of them. */
function withoutEnd(text, characters) {
  let end = text.length;
  while (end > 0 && characters.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

/** A heading's text without the marks that close it. */
function headingText(text) {
  const open = withoutEnd(text, "#");
  return open !== text && open.endsWith(" ") ? open.trimEnd() || text : text;
}

function link(text, address) {
  const href = safeHref(address);
  if (href === null) return null;
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, text);
}

export function inline(text, into = document.createDocumentFragment()) {
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, label, address, strong, emphasis, bare] = found;
    let node = null;
    if (code !== undefined) node = h("code", {}, code.replace(/^ (.*) $/, "$1"));
    else if (label !== undefined) node = link(label, address);
    else if (strong !== undefined) node = h("strong", {}, strong);
    else if (emphasis !== undefined) node = h("em", {}, emphasis);
    else if (bare !== undefined) {
      const address = withoutEnd(bare, ".,;:!?*_");
      node = link(address, address);
      if (node !== null && address !== bare) node = [node, bare.slice(address.length)];
    }
    if (node === null) continue;
    into.append(text.slice(from, found.index), ...[node].flat());
    from = found.index + whole.length;
  }
  into.append(text.slice(from));
  return into;
}

function codeBlock(text, language) {
  const pre = h("pre", { tabIndex: 0, role: "group", "aria-label": language ? `code, ${language}` : "code" });
  pre.append(h("code", {}, text));
  return pre;
}

class Blocks {
  constructor(text) {
    this.lines = text.split("\n");
    this.at = 0;
    this.out = document.createDocumentFragment();
    this.paragraph = [];
  }

  endParagraph() {
    if (!this.paragraph.length) return;
    const node = h("p", { dir: "auto" });
    inline(this.paragraph.join("\n"), node);
    this.out.append(node);
    this.paragraph = [];
  }

  run() {
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (!line.trim()) this.endParagraph();
      else if (!this.block(line)) this.paragraph.push(line);
      this.at += 1;
    }
    this.endParagraph();
    return this.out;
  }

  /** Take the block that begins at this line; false where none does. */
  block(line) {
    let found;
    if ((found = FENCE.exec(line))) this.put(this.fence(found[1], LANGUAGE.exec(found[2].trimStart())[0]));
    else if ((found = HEADING.exec(line))) {
      this.put(inline(headingText(found[2]), h("p", { class: "heading", dir: "auto", dataset: { level: found[1].length } })));
    } else if (RULE.test(line)) this.put(h("hr"));
    else if (ITEM.test(line)) this.put(this.list());
    else if (QUOTE.test(line)) this.put(this.quote());
    else return false;
    return true;
  }

  put(node) {
    this.endParagraph();
    this.out.append(node);
  }

  fence(mark, language) {
    const from = this.at + 1;
    let end = from;
    while (end < this.lines.length && !this.lines[end].trim().startsWith(mark)) end += 1;
    this.at = end;
    return codeBlock(this.lines.slice(from, end).join("\n"), language);
  }

  quote() {
    const lines = [];
    let found;
    while (this.at < this.lines.length && (found = QUOTE.exec(this.lines[this.at]))) {
      lines.push(found[1]);
      this.at += 1;
    }
    this.at -= 1;
    return h("blockquote", {}, inline(lines.join("\n"), h("p", { dir: "auto" })));
  }

  list() {
    const numbered = (mark) => /\d/.test(mark);
    const make = (mark) => {
      const node = h(numbered(mark) ? "ol" : "ul");
      if (numbered(mark) && parseInt(mark, 10) !== 1) node.start = parseInt(mark, 10);
      return node;
    };
    let found = ITEM.exec(this.lines[this.at]);
    const top = make(found[2]);
    let inner = null;
    let item = null;
    for (; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      found = ITEM.exec(line);
      if (found) {
        const node = inline(found[3], h("li", { dir: "auto" }));
        if (found[1].length >= 2 && item !== null) {
          if (inner === null) item.append((inner = make(found[2])));
          inner.append(node);
        } else {
          top.append((item = node));
          inner = null;
        }
      } else if (item !== null && /^ {2,}\S/.test(line) && !FENCE.test(line)) {
        (inner?.lastElementChild ?? item).append("\n");
        inline(line.trim(), inner?.lastElementChild ?? item);
      } else break;
    }
    this.at -= 1;
    return top;
  }
}

/** The nodes of a completed text. */
export function markdown(text) {
  const clean = words(text);
  return clean.length > MOST ? h("p", { class: "plain", dir: "auto" }, clean) : new Blocks(clean).run();
}
