// The engine's last steps: tokens of answers and of prompts in each. Heights are square roots, so that a step with one
// token is visible beside one with thousands.

import { count, h, svg } from "./dom.js";

const HEIGHT = 96;
const BAR = 7; // pixels, including the gap

export class StepBars {
  constructor() {
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.said = h("p.muted.small", {}, "No step has run yet.");
    this.element = h(
      "figure.plot.steps",
      {},
      h(
        "figcaption",
        {},
        h("h3", { title: "Each bar is one step, the latest at the right" }, "Steps"),
        h(
          "div.legend",
          {},
          h("span.key", {}, h("i.swatch.used"), "answers"),
          h("span.key", {}, h("i.swatch.prefill"), "prompts"),
        ),
      ),
      this.svg,
      this.said,
    );
    this.steps = [];
    this.chosen = null; // the step under the pointer
    this.svg.addEventListener("pointermove", (event) => this.#choose(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#choose(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  update(steps) {
    this.steps = steps;
    this.draw();
  }

  #choose(x) {
    this.chosen = x;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || !this.steps.length) return;
    const shown = this.steps.slice(-Math.max(8, Math.floor(width / BAR)));
    const highest = Math.sqrt(Math.max(16, ...shown.map(([, , , tokens]) => tokens)));
    const left = width - shown.length * BAR;
    const place = this.chosen === null ? -1 : Math.floor((this.chosen - left) / BAR);
    const bars = shown.flatMap(([, , , tokens, prompts], index) => {
      const whole = (Math.sqrt(tokens) / highest) * (HEIGHT - 2);
      const lower = tokens ? (whole * (tokens - prompts)) / tokens : 0;
      const at = { x: left + index * BAR, width: BAR - 2 };
      const parts = [
        svg("rect", { ...at, y: HEIGHT - lower, height: lower, class: "bar-one" }),
        svg("rect", { ...at, y: HEIGHT - whole, height: Math.max(0, whole - lower), class: "bar-two" }),
      ];
      if (index === place) parts.push(svg("rect", { ...at, y: 0, height: HEIGHT, class: "bar-chosen" }));
      return parts;
    });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(...bars);
    this.#tell(shown[place] ?? shown.at(-1));
  }

  #tell([number, rows, promptRows, tokens, prompts]) {
    const parts = [];
    if (rows - promptRows) parts.push(`${count(tokens - prompts)} for ${plural(rows - promptRows, "answer")}`);
    if (promptRows) parts.push(`${count(prompts)} of ${plural(promptRows, "prompt")}`);
    const words = `Step ${count(number)}: ${plural(tokens, "token")}${parts.length ? ` (${parts.join(", ")})` : ""}`;
    this.said.textContent = words;
    this.svg.setAttribute("aria-label", words);
  }
}

function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
