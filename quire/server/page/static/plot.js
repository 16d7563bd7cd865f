// An SVG plot of a few series over the last minutes: axes with round numbers, a legend with the latest values, and a
// tooltip with the values at the pointer.

import { h, svg } from "./dom.js";
import { WINDOW } from "./feed.js";

const HEIGHT = 168;
// The time shown, in seconds, by the time recorded; and the ticks of its axis.
const SPANS = [
  { span: 60, every: 15 },
  { span: 120, every: 30 },
  { span: WINDOW, every: 60 },
];
const MARGIN = { top: 10, right: 8, bottom: 24, left: 54 };

export class TimePlot {
  /** series: [{name, read(point), look}], `look` being a class of charts.css. Stacked: each on top of the last. */
  constructor({ title, note, series, format, stacked = false, least = 1 }) {
    Object.assign(this, { title, series, format, stacked, least });
    this.values = series.map(() => h("b"));
    const legend = series.map((one, place) =>
      h("span.key", {}, h(`i.swatch.${one.look}`), one.name, " ", this.values[place]),
    );
    this.when = h("span.when");
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.element = h(
      "figure.plot",
      {},
      h("figcaption", {}, h("h3", { title: note }, title), h("div.legend", {}, legend, this.when)),
      this.svg,
    );
    this.points = [];
    this.hover = null;
    this.svg.addEventListener("pointermove", (event) => {
      this.hover = event.offsetX;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.hover = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  update(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return; // not on screen
    const { points } = this;
    const end = points.at(-1)?.t ?? 0;
    const past = SPANS.find(({ span }) => span === WINDOW || end - (points[0]?.t ?? end) <= span);
    const rows = points
      .filter((point) => point.t >= end - past.span)
      .map((point) => ({ point, values: this.#read(point) }));
    const top = niceTop(
      Math.max(this.least, ...rows.flatMap(({ values }) => values.filter((value) => value !== null))),
    );
    const x = (t) => MARGIN.left + (1 - (end - t) / past.span) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top.value) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("width", width);
    const parts = [...this.#axes(width, top, past, (ago) => x(end - ago), y)];
    for (let place = this.series.length - 1; place >= 0; place -= 1) parts.push(...this.#line(rows, place, x, y));
    const shown = this.#nearest(rows, x);
    if (shown && this.hover !== null)
      parts.push(
        svg("line", {
          class: "cross",
          x1: x(shown.point.t),
          x2: x(shown.point.t),
          y1: MARGIN.top,
          y2: HEIGHT - MARGIN.bottom,
        }),
      );
    this.svg.replaceChildren(...parts);
    this.#tell(shown, end);
  }

  #read(point) {
    let sum = 0;
    return this.series.map((one) => {
      const value = one.read(point);
      if (!this.stacked || value === null) return value;
      sum += value;
      return sum;
    });
  }

  *#axes(width, top, { span, every }, x, y) {
    for (let tick = 0; tick <= top.ticks; tick += 1) {
      const value = tick * top.step;
      yield svg("line", {
        class: tick ? "grid" : "axis",
        x1: MARGIN.left,
        x2: width - MARGIN.right,
        y1: y(value),
        y2: y(value),
      });
      yield svg("text", { class: "tick end", x: MARGIN.left - 8, y: y(value) + 4 }, this.format(value));
    }
    const labelled = width < 420 ? 2 * every : every;
    for (let ago = 0; ago <= span; ago += every) {
      yield svg("line", {
        class: "axis",
        x1: x(ago),
        x2: x(ago),
        y1: HEIGHT - MARGIN.bottom,
        y2: HEIGHT - MARGIN.bottom + 4,
      });
      if (ago % labelled) continue;
      const side = ago === 0 ? "end" : ago === span ? "start" : "middle";
      const text = ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
      yield svg("text", { class: `tick ${side}`, x: x(ago), y: HEIGHT - 5 }, text);
    }
  }

  *#line(rows, place, x, y) {
    const { look, dots } = this.series[place];
    let path = "";
    let area = "";
    let run = [];
    const close = () => {
      if (run.length > 1) {
        const line = run.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
        path += `M${line}`;
        area += `M${run[0][0].toFixed(1)} ${y(0)}L${line}L${run.at(-1)[0].toFixed(1)} ${y(0)}Z`;
      }
      run = [];
    };
    for (const { point, values } of rows) {
      if (point.gap || values[place] === null) close();
      if (values[place] !== null) run.push([x(point.t), y(values[place])]);
    }
    close();
    if (!dots) yield svg("path", { class: `area ${look}`, d: area });
    yield svg("path", { class: `line ${look}`, d: path });
  }

  #nearest(rows, x) {
    if (this.hover === null) return rows.at(-1);
    let best = rows.at(-1);
    for (const row of rows)
      if (Math.abs(x(row.point.t) - this.hover) < Math.abs(x(best.point.t) - this.hover)) best = row;
    return best;
  }

  #tell(shown, end) {
    const said = this.series.map((one, place) => {
      const text = shown ? this.format(one.read(shown.point)) : "–";
      this.values[place].textContent = text;
      return `${one.name} ${text}`;
    });
    const ago = shown && this.hover !== null ? Math.round(end - shown.point.t) : 0;
    this.when.textContent = ago ? `${ago} s ago` : "";
    this.svg.setAttribute("aria-label", `${this.title}, now: ${said.join(", ")}`);
  }
}

/** A round number at or above `value`, and the step of its ticks. */
function niceTop(value) {
  const rough = value / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const ticks = Math.max(1, Math.ceil(value / step - 1e-9));
  return { value: ticks * step, step, ticks };
}
