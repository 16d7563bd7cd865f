// Talks to the server: the key, errors in the server's own words, and streams of server-sent events.

const KEY = "quire.key"; // in sessionStorage only, so that it is deleted with the tab

export function key() {
  return sessionStorage.getItem(KEY);
}

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** The server's error, or that the server could not be reached. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = "", id = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.id = id;
  }
}

let askForKey = async () => false;
let asking = null;

/** `ask(message)` shows a dialog and returns whether there is a new key. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** Calls that need the key at the same time share one dialog. */
function wantKey(message) {
  asking ??= askForKey(message).finally(() => {
    asking = null;
  });
  return asking;
}

/** Returns a reply with a good status. If the server requires a key, asks for it and tries again. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const headers = {};
    const sent = key();
    if (sent) headers.authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    let reply;
    try {
      const content = body === undefined ? undefined : JSON.stringify(body);
      // Relative, so that the page works below a proxy's prefix.
      reply = await fetch(`.${path}`, { method: body === undefined ? "GET" : "POST", headers, body: content, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server can't be reached. Is it still running?");
    }
    if (reply.ok) return reply;
    const error = await errorOf(reply);
    if (reply.status !== 401) throw error;
    if (key() === sent && !(await wantKey(sent ? error.message : ""))) throw error;
  }
}

async function errorOf(reply) {
  const id = reply.headers.get("x-request-id") ?? "";
  try {
    const { error } = await reply.json();
    return new ServerError(error.message, { status: reply.status, code: error.code, id });
  } catch {
    return new ServerError(`The server answered with status ${reply.status}.`, { status: reply.status, id });
  }
}

/** The events of a reply's body as {name, data}; comments (keep-alives) are dropped. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r\n", "\n");
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const event = parse(frame);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection, so that the server cancels the request
  }
}

function parse(frame) {
  let name = "message";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { name, data: data.join("\n") } : null;
}
