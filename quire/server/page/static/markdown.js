// Markdown to elements. Text only ever becomes text nodes and attributes we chose, so no answer can smuggle markup in.
// Blocks unchanged since the last call are kept: while an answer streams, only its last block is rebuilt.

import { copyText, h } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_INLINE = 8000; // characters of one block; a longer one is shown as plain text
const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/;
const QUOTE = /^ {0,3}>\s?/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** `live`: the text still grows, so an unclosed mark or block counts as closed. */
export function renderInto(container, text, live = false) {
  const blocks = split(live ? closeMarks(text) : text);
  blocks.forEach((block, place) => {
    const old = container.children[place];
    if (old?.markdownSource === block.source) return;
    const fresh = build(block, 0);
    fresh.markdownSource = block.source;
    if (old) old.replaceWith(fresh);
    else container.append(fresh);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

/** Close an open bold phrase or code span, so that its marks are not shown while it streams. */
function closeMarks(text) {
  const start = text.lastIndexOf("\n") + 1;
  let line = text.slice(start);
  const numFences = text.match(/^ {0,3}(```|~~~)/gm)?.length ?? 0;
  if (FENCE.test(line) || numFences % 2) return text; // inside a code block, marks are text
  for (const mark of ["`", "**"]) {
    if (line.split(mark).length % 2) continue; // all closed
    line = line.endsWith(mark) ? line.slice(0, -mark.length) : line.trimEnd() + mark;
  }
  return text.slice(0, start) + line;
}

// -- blocks -----------------------------------------------------------------------------------------------------------

/** Cuts a text into blocks: {kind, lines, source, ...}. */
function split(text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const blocks = [];
  let at = 0;
  const take = (kind, end, more = {}) => {
    const own = lines.slice(at, end);
    blocks.push({ kind, lines: own, source: own.join("\n") + kind, ...more });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) take("code", endOfFence(lines, at, fence[1]), { language: fence[2], mark: fence[1] });
    else if (HEADING.test(line)) take("heading", at + 1);
    else if (RULE.test(line)) take("rule", at + 1);
    else if (QUOTE.test(line))
      take(
        "quote",
        endWhile(lines, at, (one) => QUOTE.test(one)),
      );
    else if (ITEM.test(line)) take("list", endOfList(lines, at));
    else if (isTable(lines, at))
      take(
        "table",
        endWhile(lines, at, (one) => one.includes("|")),
      );
    else take("paragraph", endOfParagraph(lines, at));
  }
  return blocks;
}

function endWhile(lines, start, holds) {
  let end = start + 1;
  while (end < lines.length && holds(lines[end])) end += 1;
  return end;
}

function endOfFence(lines, start, mark) {
  for (let end = start + 1; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.startsWith(mark) && !line.replaceAll(mark[0], "")) return end + 1;
  }
  return lines.length; // not closed yet, since it is still being streamed
}

function endOfList(lines, start) {
  const [, { length: indent }, marker] = ITEM.exec(lines[start]);
  const other = (found) => found && found[1].length <= indent && /\d/.test(found[2]) !== /\d/.test(marker);
  let end = start + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (other(ITEM.exec(line))) return end; // bullets after numbers, or numbers after bullets, begin another list
    if (!line.trim()) {
      const next = lines[end + 1];
      if (next === undefined || !(ITEM.test(next) || indentOf(next) > indent)) return end;
    } else if (!ITEM.test(line) && indentOf(line) <= indent && !lines[end - 1].trim()) return end;
    else if (HEADING.test(line) || (FENCE.test(line) && indentOf(line) <= indent)) return end;
  }
  return end;
}

function endOfParagraph(lines, start) {
  return endWhile(
    lines,
    start,
    (line) =>
      line.trim() &&
      !FENCE.test(line) &&
      !HEADING.test(line) &&
      !RULE.test(line) &&
      !QUOTE.test(line) &&
      !/^ {0,3}([-*+]|1[.)])\s+\S/.test(line),
  );
}

function isTable(lines, at) {
  return (
    lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_LINE.test(lines[at + 1])
  );
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

// -- elements ---------------------------------------------------------------------------------------------------------

function build(block, depth) {
  const { kind, lines } = block;
  if (depth > MAX_DEPTH) return h("p", {}, lines.join("\n"));
  if (kind === "code") return codeBlock(block);
  if (kind === "rule") return h("hr");
  if (kind === "table") return table(lines);
  if (kind === "list") return list(lines, depth);
  if (kind === "quote")
    return h(
      "blockquote",
      {},
      nested(
        lines.map((line) => line.replace(QUOTE, "")),
        depth,
      ),
    );
  if (kind === "heading") {
    const [, marks, title] = HEADING.exec(lines[0]);
    return h(`h${Math.min(6, marks.length + 2)}`, {}, inline(title)); // h1 and h2 are used by the page
  }
  return h("p", {}, inline(lines.map((line) => line.trimStart()).join("\n")));
}

function nested(lines, depth) {
  return split(lines.join("\n")).map((block) => build(block, depth + 1));
}

function codeBlock({ lines, language, mark }) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const code = h("code", {}, highlight(lines.slice(1, closed ? -1 : undefined).join("\n"), language || ""));
  const button = h("button.quiet.small", { type: "button", onclick: () => copyText(code.textContent, button) }, "Copy");
  return h(
    "div.code",
    {},
    h("div.code-head", {}, h("span", {}, language || "text"), button),
    h("pre", { tabindex: "0" }, code),
  );
}

function list(lines, depth) {
  const [, , marker] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const indent = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) items.push([found[3] ?? ""]);
    else items.at(-1).push(line);
  }
  const loose = lines.some((line) => !line.trim());
  const start = ordered && Number.parseInt(marker, 10) !== 1 ? String(Number.parseInt(marker, 10)) : undefined;
  return h(
    ordered ? "ol" : "ul",
    { start },
    items.map((own) => h("li", {}, item(own, loose, depth))),
  );
}

function item([first, ...rest], loose, depth) {
  const least = Math.min(...rest.filter((line) => line.trim()).map(indentOf), 8);
  const children = nested([first, ...rest.map((line) => line.slice(Math.min(least, indentOf(line))))], depth);
  if (!loose && children[0]?.tagName === "P") children.splice(0, 1, ...children[0].childNodes);
  return children;
}

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => cell.trim());
  const aligns = cells(lines[1]).map((mark) => (/^:.*:$/.test(mark) ? "center" : mark.endsWith(":") ? "right" : ""));
  const row = (line, tag) =>
    h(
      "tr",
      {},
      cells(line).map((cell, place) => h(aligns[place] ? `${tag}.${aligns[place]}` : tag, {}, inline(cell))),
    );
  const body = lines.slice(2).map((line) => row(line, "td"));
  return h("div.table", { tabindex: "0" }, h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, body)));
}

// -- within a block ---------------------------------------------------------------------------------------------------

const INLINE = new RegExp(
  [
    /\\([\\`*_{}[\]()#+\-.!~|<>])/, // 1 an escaped mark
    /(`+)(?!`)(.+?)(?<!`)\2(?!`)/, // 2, 3 code
    /!?\[([^[\]]*)\]\(\s*([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)?)(?:\s+"[^"]*")?\s*\)/, // 4, 5 a link or an image
    /<?(https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?*_])>?/, // 6 a bare address
    /\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\*)/, // 7 bold
    /(?<!\w)__(?=\S)(.+?)(?<=\S)__(?!\w)/, // 8 bold
    /\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)/, // 9 italic
    /(?<!\w)_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)/, // 10 italic
    /~~(?=\S)(.+?)(?<=\S)~~/, // 11 struck out
    / {2,}(\n)/, // 12 a line break
  ]
    .map((part) => part.source)
    .join("|"),
  "gs",
);

/** A list of nodes. */
function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return [text];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) nodes.push(text.slice(at, found.index));
    nodes.push(mark(found, depth + 1));
    at = found.index + found[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function mark(found, depth) {
  const [all, escaped, , code, label, target, address, bold, bold2, italic, italic2, struck, lineBreak] = found;
  if (escaped) return escaped;
  if (code !== undefined) return h("code", {}, code.replace(/^ (.*) $/s, "$1"));
  if (label !== undefined) return link(target, label ? inline(label, depth) : [target]) ?? all;
  if (address) return link(address, [address]) ?? all;
  if (bold ?? bold2) return h("strong", {}, inline(bold ?? bold2, depth));
  if (italic ?? italic2) return h("em", {}, inline(italic ?? italic2, depth));
  if (struck) return h("s", {}, inline(struck, depth));
  return lineBreak ? h("br") : all;
}

/** A link to a web address only, without a referrer. */
function link(target, children) {
  if (!/^https?:\/\/[^\s]+$/i.test(target)) return null;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, children);
}
