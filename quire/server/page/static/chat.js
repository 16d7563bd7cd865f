// The chat view: the composer, its keyboard shortcuts, and the elements of the conversation.

import { ChatList } from "./chats.js";
import { Conversation } from "./conversation.js";
import { h } from "./dom.js";
import { Settings } from "./settings.js";
import { AnswerTurn, userTurn } from "./turns.js";

const IDEAS = [
  "Explain how a prefix cache saves work, in three sentences.",
  "Which five inventions made printing cheaper? One sentence each.",
  "Give me a Python function that merges two sorted lists.",
];
const MAX_FILE = 1 << 20;
const SAVE_EVERY = 1000; // milliseconds, while an answer streams
const touch = matchMedia("(pointer: coarse)");

/** Returns the function to call when the view is shown. */
export function startChat() {
  const view = new ChatView();
  return () => view.shown();
}

class ChatView {
  constructor() {
    for (const name of [
      "scroller",
      "log",
      "composer",
      "question",
      "send",
      "hint",
      "settings",
      "chats",
      "new",
      "files",
      "attach",
      "attached",
    ]) {
      this[name] = document.getElementById(name);
    }
    this.showSettings = document.getElementById("show-settings");
    this.showChats = document.getElementById("show-chats");
    this.conversation = new Conversation();
    this.panel = new Settings(this.settings, { onClose: () => this.#toggleSettings(false) });
    this.list = new ChatList(this.chats, {
      onOpen: (id) => this.#open(id),
      onGone: (id) => {
        if (id !== this.conversation.id) return;
        this.conversation.forget();
        this.#open(null);
      },
      onRenamed: (id, name) => {
        if (id === this.conversation.id) this.conversation.name = name;
      },
      onClose: () => this.#toggleChats(false),
      current: () => this.conversation.id,
    });
    this.editing = null; // the turn of which the composer holds another version
    this.attachments = []; // files for the next message
    this.views = new Map(); // turn → its elements
    this.dirty = null; // the turn to draw in the next frame
    this.savedAt = 0;
    this.follow = true; // scroll with the answer until the user scrolls up
    this.#listen();
    this.#toggleSettings(innerWidth >= 1200, false);
    this.#showAll();
    this.#showBusy();
  }

  shown() {
    if (!touch.matches) this.question.focus();
    this.#scroll();
  }

  #listen() {
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.conversation.busy) this.conversation.stop();
      else this.#send();
    });
    this.question.addEventListener("input", () => this.#fit());
    this.question.addEventListener("keydown", (event) => {
      const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches;
      if (!sends) return;
      event.preventDefault();
      if (!this.conversation.busy) this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.editing) this.#stopEditing();
      else if (this.conversation.busy) this.conversation.stop();
      else if (!this.settings.hidden && this.settings.contains(document.activeElement)) this.#toggleSettings(false);
    });
    this.new.addEventListener("click", () => {
      this.conversation.begin();
      this.#stopEditing();
      this.#showAll();
      this.list.update();
      this.question.focus();
    });
    this.showChats.addEventListener("click", () => this.#toggleChats(this.chats.hidden));
    this.attach.addEventListener("click", () => this.files.click());
    this.files.addEventListener("change", () => this.#attach());
    this.showSettings.addEventListener("click", () => this.#toggleSettings(this.settings.hidden));
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.follow = scrollHeight - scrollTop - clientHeight < 48;
    });
  }

  // -- asking ---------------------------------------------------------------------------------------------------------

  #send() {
    const text = this.question.value;
    if (!text.trim() && !this.attachments.length) return;
    const turn = { role: "user", text };
    if (this.attachments.length) turn.files = this.attachments;
    if (this.editing) turn.fork = this.conversation.fork(this.editing);
    this.conversation.turns.push(turn);
    this.#stopEditing();
    this.#ask();
  }

  /** Show another kept conversation, or a new one if it is gone. */
  #open(id) {
    if (!id || !this.conversation.open(id)) this.conversation.begin();
    this.#stopEditing();
    this.follow = true;
    this.#showAll();
    this.#showBusy();
    this.list.update();
  }

  async #attach() {
    for (const file of this.files.files) {
      if (file.size > MAX_FILE) this.#tell(`${file.name} is larger than 1 MB.`);
      else {
        const content = await file.text();
        if (content.includes("\0")) this.#tell(`${file.name} is no text.`);
        else this.attachments.push({ name: file.name, content });
      }
    }
    this.files.value = "";
    this.#showAttached();
    this.question.focus();
  }

  #showAttached() {
    this.attached.hidden = !this.attachments.length;
    this.attached.replaceChildren(
      ...this.attachments.map((file) =>
        h(
          "button.chip",
          {
            type: "button",
            "aria-label": `Remove ${file.name}`,
            onclick: () => {
              this.attachments = this.attachments.filter((one) => one !== file);
              this.#showAttached();
            },
          },
          `${file.name} ×`,
        ),
      ),
    );
  }

  #tell(words) {
    this.hint.textContent = words;
  }

  /** An answer to the conversation as it stands. `fork`: it is another version; `into`: it continues a cut answer. */
  async #ask({ fork, into } = {}) {
    let fields;
    try {
      fields = this.panel.fields();
    } catch (error) {
      this.conversation.turns.push({
        role: "assistant",
        text: "",
        reasoning: "",
        calls: [],
        state: "failed",
        error: error.message,
      });
      this.#showAll();
      return;
    }
    this.follow = true;
    const answering = this.conversation.answer({
      fields,
      system: this.panel.system,
      onChange: (turn) => this.#changed(turn),
      fork,
      into,
    });
    this.#showAll();
    this.#showBusy();
    await answering;
    this.#showBusy();
    this.list.update();
  }

  #retry(turn) {
    this.#ask({ fork: this.conversation.fork(turn) });
  }

  /** Nothing is lost by editing: sending makes another version beside the turn. */
  #edit(turn) {
    this.editing = turn;
    this.question.value = turn.text;
    this.attachments = turn.files ?? [];
    this.#showAttached();
    this.#fit();
    this.#showBusy();
    this.question.focus();
  }

  #stopEditing() {
    this.editing = null;
    this.question.value = "";
    this.attachments = [];
    this.#showAttached();
    this.#fit();
    this.#showBusy();
  }

  // -- showing --------------------------------------------------------------------------------------------------------

  #showAll() {
    const { turns } = this.conversation;
    for (const turn of this.views.keys()) if (!turns.includes(turn)) this.views.delete(turn);
    const actions = {
      retry: (turn) => this.#retry(turn),
      edit: (turn) => this.#edit(turn),
      resume: (turn) => this.#ask({ into: turn }),
      versions: (turn) => this.conversation.versions(turn),
      switch: (turn, step) => {
        this.conversation.switch(turn, step);
        this.#stopEditing();
        this.#showAll();
      },
      isLast: (turn) => this.conversation.turns.at(-1) === turn,
      sendResults: (turn) => {
        this.views.delete(turn); // drawn again with its results
        this.#ask();
      },
    };
    for (const turn of turns) {
      if (!this.views.has(turn))
        this.views.set(turn, turn.role === "user" ? userTurn(turn, actions) : new AnswerTurn(turn, actions));
    }
    this.log.replaceChildren(...(turns.length ? turns.map((turn) => this.views.get(turn).element) : [this.#welcome()]));
    this.#scroll();
  }

  #welcome() {
    const ideas = IDEAS.map((idea) =>
      h(
        "li",
        {},
        h(
          "button.idea",
          {
            type: "button",
            onclick: () => {
              this.question.value = idea;
              this.#send();
            },
          },
          idea,
        ),
      ),
    );
    return h(
      "div.welcome",
      {},
      h("h1", {}, "Ask the model."),
      h("p.muted", {}, "What you write goes to this server and nowhere else."),
      h("ul", {}, ideas),
    );
  }

  /** Tokens may come faster than frames: each frame draws what has come by then. */
  #changed(turn) {
    if (Date.now() - this.savedAt > SAVE_EVERY) {
      this.savedAt = Date.now();
      this.conversation.save();
    }
    if (this.dirty) return;
    this.dirty = turn;
    requestAnimationFrame(() => {
      const view = this.views.get(this.dirty);
      this.dirty = null;
      view?.update();
      this.#scroll();
    });
  }

  #scroll() {
    if (this.follow) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #showBusy() {
    const { busy } = this.conversation;
    this.send.textContent = busy ? "Stop" : "Send";
    this.send.classList.toggle("stop", busy);
    const words = this.editing
      ? "Another version of your message. Esc leaves it."
      : busy
        ? "Esc stops"
        : "Enter sends, Shift+Enter for a new line";
    this.hint.textContent = touch.matches && !this.editing ? "" : words;
  }

  #fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight, innerHeight * 0.4)}px`;
  }

  #toggleChats(open) {
    this.chats.hidden = !open;
    this.showChats.setAttribute("aria-expanded", String(open));
    if (open) {
      this.conversation.save();
      this.list.update();
    }
    (open ? this.chats.querySelector("button") : this.showChats).focus();
  }

  #toggleSettings(open, focus = true) {
    this.settings.hidden = !open;
    this.showSettings.setAttribute("aria-expanded", String(open));
    if (focus) (open ? this.settings.querySelector("textarea") : this.showSettings).focus();
  }
}
