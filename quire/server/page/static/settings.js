// The sampling panel. Empty fields are not sent, so the model's defaults apply.

import { call } from "./api.js";
import { h } from "./dom.js";

const STORED = "quire.settings";
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, help: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05, help: "Share of the likeliest tokens to draw from." },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, help: "The longest answer." },
  { name: "seed", label: "Seed", step: 1, help: "The same seed gives the same answer." },
];

const PRESETS = {
  "Model's own": { temperature: "", top_p: "" },
  Precise: { temperature: "0", top_p: "" },
  Balanced: { temperature: "0.7", top_p: "0.9" },
  Inventive: { temperature: "1.1", top_p: "0.95" },
};

export class Settings {
  constructor(root, { onClose }) {
    this.values = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    this.toolsProblem = h("p.field-problem", { role: "alert", id: "tools-problem", hidden: true });
    root.append(
      h(
        "div.settings-head",
        {},
        h("h2", {}, "Settings"),
        h("button.quiet.close", { type: "button", "aria-label": "Close settings", onclick: onClose }, "Close"),
      ),
      this.#model(),
      this.#presets(root),
      this.#text("system", "System prompt", 5, "How the model should behave."),
      h(
        "div.numbers",
        {},
        NUMBERS.map((spec) => this.#number(spec)),
      ),
      h(
        "details",
        { open: Boolean(this.values.tools) },
        h("summary", {}, "Tools"),
        this.#text(
          "tools",
          "JSON array of functions",
          8,
          '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]',
        ),
        this.toolsProblem,
      ),
      h("button.quiet", { type: "button", onclick: () => this.#reset(root) }, "Reset to defaults"),
    );
  }

  /** The fields of a request. Throws with a message for people when the tools are no valid JSON. */
  fields() {
    const fields = {};
    for (const { name } of NUMBERS) if (this.values[name] !== undefined) fields[name] = Number(this.values[name]);
    if (this.values.model) fields.model = this.values.model;
    const tools = this.#tools();
    if (tools.length) fields.tools = tools;
    return fields;
  }

  /** The models and adapters of the server, shown if there are several. */
  #model() {
    const field = h("select", { id: "set-model" });
    const whole = h("div.field", { hidden: true }, h("label", { for: field.id }, "Model"), field);
    field.addEventListener("change", () => this.#change("model", field.value));
    call("/v1/models")
      .then((reply) => reply.json())
      .then(({ data }) => {
        const names = data.map(({ id }) => id);
        if (!names.includes(this.values.model)) delete this.values.model;
        field.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
        field.value = this.values.model ?? names[0];
        whole.hidden = names.length < 2;
      })
      .catch(() => {}); // without the list the server's own model answers
    return whole;
  }

  #presets(root) {
    const field = h(
      "select",
      { id: "set-preset" },
      ["Choose…", ...Object.keys(PRESETS)].map((name) => h("option", {}, name)),
    );
    field.addEventListener("change", () => {
      for (const [name, value] of Object.entries(PRESETS[field.value] ?? {})) {
        const own = root.querySelector(`#set-${name}`);
        own.value = value;
        this.#change(name, value);
      }
      field.selectedIndex = 0;
    });
    return h("div.field", {}, h("label", { for: field.id }, "Preset"), field);
  }

  get system() {
    return this.values.system ?? "";
  }

  /** Tools in OpenAI's form, or a list of functions. */
  #tools() {
    if (!this.values.tools) return [];
    let tools;
    try {
      tools = JSON.parse(this.values.tools);
    } catch (error) {
      throw new Error(`The tools in the settings are not valid JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) throw new Error("The tools in the settings must be a JSON array.");
    return tools.map((tool) => (tool.type === "function" ? tool : { type: "function", function: tool }));
  }

  #change(name, value) {
    if (value.trim() === "") delete this.values[name];
    else this.values[name] = value;
    sessionStorage.setItem(STORED, JSON.stringify(this.values));
    if (name === "tools") this.#checkTools();
  }

  #checkTools() {
    this.toolsProblem.textContent = "";
    try {
      this.#tools();
    } catch (error) {
      this.toolsProblem.textContent = error.message;
    }
    this.toolsProblem.hidden = !this.toolsProblem.textContent;
  }

  #number({ name, label, help, ...limits }) {
    const attributes = Object.fromEntries(Object.entries(limits).map(([key, value]) => [key, String(value)]));
    const field = h("input", {
      id: `set-${name}`,
      type: "number",
      inputmode: "decimal",
      placeholder: "default",
      title: help,
      ...attributes,
    });
    field.value = this.values[name] ?? "";
    field.addEventListener("input", () => this.#change(name, field.value));
    return h("div.field", {}, h("label", { for: field.id }, label), field);
  }

  #text(name, label, rows, placeholder) {
    const field = h("textarea", {
      id: `set-${name}`,
      rows: String(rows),
      placeholder,
      spellcheck: name === "tools" ? "false" : "true",
    });
    field.value = this.values[name] ?? "";
    field.addEventListener("input", () => this.#change(name, field.value));
    return h("div.field", {}, h("label", { for: field.id }, label), field);
  }

  #reset(root) {
    this.values = {};
    sessionStorage.removeItem(STORED);
    for (const field of root.querySelectorAll("input, textarea")) field.value = "";
    for (const field of root.querySelectorAll("select")) field.selectedIndex = 0;
    this.#checkTools();
  }
}
