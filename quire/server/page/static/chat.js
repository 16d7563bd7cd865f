// The chat view: the composer, its keyboard shortcuts, and the elements of the conversation.

import { Conversation } from "./conversation.js";
import { h } from "./dom.js";
import { Settings } from "./settings.js";
import { AnswerTurn, userTurn } from "./turns.js";

const IDEAS = [
  "Explain how a prefix cache saves work, in three sentences.",
  "Write a haiku about paper.",
  "Give me a Python function that merges two sorted lists.",
];
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
      "new",
      "show-settings",
    ]) {
      this[name === "show-settings" ? "showSettings" : name] = document.getElementById(name);
    }
    this.conversation = new Conversation();
    this.panel = new Settings(this.settings, { onClose: () => this.#toggleSettings(false) });
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
      if (this.conversation.busy) this.conversation.stop();
      else if (!this.settings.hidden && this.settings.contains(document.activeElement)) this.#toggleSettings(false);
    });
    this.new.addEventListener("click", () => {
      this.conversation.clear();
      this.#showAll();
      this.question.focus();
    });
    this.showSettings.addEventListener("click", () => this.#toggleSettings(this.settings.hidden));
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.follow = scrollHeight - scrollTop - clientHeight < 48;
    });
  }

  // -- asking ---------------------------------------------------------------------------------------------------------

  #send() {
    const text = this.question.value;
    if (!text.trim()) return;
    this.question.value = "";
    this.#fit();
    const turn = { role: "user", text };
    this.conversation.turns.push(turn);
    this.#ask();
  }

  /** An answer to the conversation as it stands. */
  async #ask() {
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
    });
    this.#showAll();
    this.#showBusy();
    await answering;
    this.#showBusy();
  }

  #retry(turn) {
    this.conversation.cut(turn);
    this.#ask();
  }

  #edit(turn) {
    this.conversation.cut(turn);
    this.question.value = turn.text;
    this.#fit();
    this.#showAll();
    this.question.focus();
  }

  // -- showing --------------------------------------------------------------------------------------------------------

  #showAll() {
    const { turns } = this.conversation;
    for (const turn of this.views.keys()) if (!turns.includes(turn)) this.views.delete(turn);
    const actions = {
      retry: (turn) => this.#retry(turn),
      edit: (turn) => this.#edit(turn),
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
    this.hint.textContent = touch.matches ? "" : busy ? "Esc stops" : "Enter sends, Shift+Enter for a new line";
  }

  #fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight, innerHeight * 0.4)}px`;
  }

  #toggleSettings(open, focus = true) {
    this.settings.hidden = !open;
    this.showSettings.setAttribute("aria-expanded", String(open));
    if (focus) (open ? this.settings.querySelector("textarea") : this.showSettings).focus();
  }
}
