// The list of kept conversations: open, rename, export, delete with undo.

import { asMarkdown, download, kept, nameOf, peek, remove, rename } from "./archive.js";
import { h } from "./dom.js";

export class ChatList {
  /** `onOpen(id)` shows a conversation; `current()` is the id of the one shown. */
  constructor(root, { onOpen, onGone, onRenamed, onClose, current }) {
    Object.assign(this, { root, onOpen, onGone, onRenamed, onClose, current });
    this.rows = h("ul.chats");
    this.undo = h("p.undo", { role: "status", hidden: true });
    root.append(
      h(
        "div.settings-head",
        {},
        h("h2", {}, "Chats"),
        h("button.quiet.close", { type: "button", "aria-label": "Close chats", onclick: onClose }, "Close"),
      ),
      h("p.muted.small", {}, "Kept in this browser only."),
      this.undo,
      this.rows,
    );
  }

  update() {
    const found = kept();
    this.rows.replaceChildren(...found.map((one) => this.#row(one)));
    if (!found.length) this.rows.append(h("li.muted", {}, "None yet."));
  }

  #row({ id, name }) {
    const open = h("button.chat-name", { type: "button", onclick: () => this.onOpen(id) }, name);
    if (id === this.current()) open.setAttribute("aria-current", "true");
    const small = (label, onclick) => h("button.quiet.small", { type: "button", onclick }, label);
    const row = h(
      "li",
      {},
      open,
      h(
        "span.chat-buttons",
        {},
        small("Rename", () => this.#rename(row, id, name)),
        small("Export", () => this.#export(id)),
        small("Delete", () => this.#remove(id, name)),
      ),
    );
    return row;
  }

  #rename(row, id, name) {
    const field = h("input", { type: "text", "aria-label": "Name of the conversation", maxlength: "80" });
    field.value = name;
    let done = false;
    const finish = (keep) => {
      if (done) return;
      done = true;
      const wanted = field.value.trim();
      if (keep && wanted) {
        rename(id, wanted);
        this.onRenamed(id, wanted);
      }
      this.update();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation();
        finish(event.key === "Enter");
      }
    });
    field.addEventListener("blur", () => finish(true));
    row.replaceChildren(field);
    field.select();
  }

  #export(id) {
    const found = peek(id);
    if (!found) return;
    const name = (found.name || nameOf(found.turns)).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    download(`${name}.md`, asMarkdown(found.turns));
    download(`${name}.json`, JSON.stringify(found, null, 2));
  }

  #remove(id, name) {
    const back = remove(id);
    this.onGone(id);
    this.undo.hidden = false;
    this.undo.replaceChildren(
      `Deleted “${name}”. `,
      h(
        "button.quiet.small",
        {
          type: "button",
          onclick: () => {
            back();
            this.undo.hidden = true;
            this.update();
          },
        },
        "Undo",
      ),
    );
    this.update();
  }
}
