// Small helpers: elements without HTML strings, numbers as people read them, the clipboard.

/** An element: h("p.note", {title: "x", onclick: f}, "text", child). Text is always text, never markup. */
export function h(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address: nothing is loaded from there

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.round(value).toLocaleString("en");
}

/** A number with up to three significant digits: 0.42, 3.1, 128, 12.4k. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 100) return count(value);
  if (size >= 10) return trim(value, 1);
  return trim(value, size >= 1 ? 1 : 2);
}

function trim(value, digits = 1) {
  return String(Number(value.toFixed(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.01) return `${trim(value * 1000, 1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function percent(part, whole) {
  if (!(whole > 0)) return "–";
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "<1%" : `${Math.round(share)}%`;
}

export function clockTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], {
    hourCycle: "h23",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });
}

/** Says "Copied" on the button for a moment. */
export async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // not a secure context: a page served over plain HTTP in a local network
    const field = h("textarea.offscreen", { "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
  }
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = done ? "Copied" : "Can't copy";
  setTimeout(() => {
    button.textContent = before;
  }, 1400);
}
