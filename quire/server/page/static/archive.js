// Conversations kept in this browser, and their export. The oldest make room when the storage is full.

const INDEX = "quire.conversations";
const OPEN = "quire.open"; // of this tab, which shows one of them
const key = (id) => `quire.conversation.${id}`;
const MAX_KEPT = 200;

/** The kept conversations, newest first: {id, name, at}. */
export function kept() {
  return read(INDEX, []).sort((one, other) => other.at - one.at);
}

/** What this tab showed last: {id, name, turns, forks}. A new one if there is none. */
export function opened() {
  return load(sessionStorage.getItem(OPEN)) ?? fresh();
}

export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), name: "", turns: [], forks: {} };
}

/** A kept conversation, which stays closed. */
export function peek(id) {
  return id ? read(key(id), null) : null;
}

export function load(id) {
  const found = peek(id);
  if (found) sessionStorage.setItem(OPEN, id);
  return found;
}

/** Keep a conversation. An empty one is not kept. Returns false if there is no room even for this one. */
export function store(conversation) {
  sessionStorage.setItem(OPEN, conversation.id);
  if (!conversation.turns.length) return true;
  const name = conversation.name || nameOf(conversation.turns);
  const others = kept().filter((one) => one.id !== conversation.id);
  for (const one of others.splice(MAX_KEPT)) localStorage.removeItem(key(one.id));
  for (;;) {
    try {
      localStorage.setItem(key(conversation.id), JSON.stringify(conversation));
      localStorage.setItem(INDEX, JSON.stringify([{ id: conversation.id, name, at: Date.now() }, ...others]));
      return true;
    } catch {
      const oldest = others.pop();
      if (!oldest) return false;
      localStorage.removeItem(key(oldest.id));
    }
  }
}

export function rename(id, name) {
  const found = read(key(id), null);
  if (!found) return;
  localStorage.setItem(key(id), JSON.stringify({ ...found, name }));
  localStorage.setItem(INDEX, JSON.stringify(kept().map((one) => (one.id === id ? { ...one, name } : one))));
}

/** Remove a conversation, and return the function that brings it back. */
export function remove(id) {
  const text = localStorage.getItem(key(id));
  const before = localStorage.getItem(INDEX);
  localStorage.removeItem(key(id));
  localStorage.setItem(INDEX, JSON.stringify(kept().filter((one) => one.id !== id)));
  return () => {
    if (text) localStorage.setItem(key(id), text);
    if (before) localStorage.setItem(INDEX, before);
  };
}

export function nameOf(turns) {
  const first = turns.find((turn) => turn.role === "user")?.text.trim().replace(/\s+/g, " ") ?? "";
  return first.length > 48 ? `${first.slice(0, 47)}…` : first || "Empty conversation";
}

/** A conversation as a file for people. */
export function asMarkdown(turns) {
  return turns.map((turn) => `## ${turn.role === "user" ? "You" : "Answer"}\n\n${turn.text}\n`).join("\n");
}

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
