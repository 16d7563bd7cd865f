// Colours for code: comments, strings, numbers and words of common languages. It only makes text nodes and spans.

import { h } from "./dom.js";

const MAX_CODE = 40_000; // characters; longer code stays plain
const WORDS = new Set(
  (
    "and as assert async await break case catch class const continue def default del do elif else enum except export " +
    "extends false finally fn for from func function global if impl import in interface is lambda let match mod mut " +
    "new nil none not null or package pass private protected pub public raise return self static struct super switch " +
    "this throw trait true try type typeof undefined use using var void where while with yield int float double char " +
    "bool string select insert update delete create table join on group by order limit values into set"
  ).split(" "),
);
const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "make"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);

/** The nodes of a piece of code. */
export function highlight(code, language) {
  const name = language.toLowerCase();
  if (!name || name === "text" || code.length > MAX_CODE) return [code];
  const line = HASH.has(name) ? "#[^\\n]*" : DASH.has(name) ? "--[^\\n]*" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const strings = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`(?:[^`\\\\]|\\\\.)*`?";
  const pattern = new RegExp(`(${line})|(${strings})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(pattern)) {
    const [all, comment, string, number, word] = found;
    const look = comment ? "comment" : string ? "string" : number ? "number" : isWord(word, name) ? "word" : "";
    if (!look) continue;
    if (found.index > at) nodes.push(code.slice(at, found.index));
    nodes.push(h(`span.code-${look}`, {}, all));
    at = found.index + all.length;
  }
  if (at < code.length) nodes.push(code.slice(at));
  return nodes;
}

function isWord(word, language) {
  return WORDS.has(language === "sql" ? word.toLowerCase() : word) || (word === "None" || word === "True" || word === "False");
}
