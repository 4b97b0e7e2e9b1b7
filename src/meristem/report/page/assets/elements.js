// Making elements, and numbers as people read them. Text only ever becomes text: nothing here reads markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function drawn(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes)
    if (attributes[key] !== null && attributes[key] !== undefined) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

const counted = (count, name, ending = "s") => `${count.toLocaleString("en-US")} ${name}${count === 1 ? "" : ending}`;

// A number to a few digits, large ones in few letters: 0.0123, 2.431, 950, 1.5k, 20M.
function compact(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15)
    return value
      .toExponential(digits - 1)
      .replace("e+", "e")
      .replace(/\.?0+e/, "e");
  for (const [limit, unit] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (size >= limit) return `${Number((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(digits))}${unit}`;
  }
  if (size < 1e-3)
    return value
      .toExponential(Math.min(2, digits - 1))
      .replace("e-", "e−")
      .replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 120) return `${compact(seconds, 3)} s`;
  if (seconds < 7200) return `${compact(seconds / 60, 3)} min`;
  return `${compact(seconds / 3600, 3)} h`;
}

// Where in a rising list the last entry is that is not above x; -1 before the first.
function lastNotAbove(values, x) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearestIndex(values, x) {
  const before = lastNotAbove(values, x);
  if (before < 0) return 0;
  return before + 1 < values.length && values[before + 1] - x < x - values[before] ? before + 1 : before;
}

// Choices of which one holds, as radio buttons: arrow keys work by themselves.
function choices(name, title, entries, chosen, change) {
  return element(
    "fieldset",
    { class: "choices" },
    element("legend", {}, title),
    entries.map(([value, text, disabled]) =>
      element(
        "label",
        {},
        element("input", {
          type: "radio",
          name,
          value,
          checked: value === chosen,
          disabled,
          onchange: () => change(value),
        }),
        element("span", {}, text),
      ),
    ),
  );
}

// A button for light, dark, or as the system has it; kept for the next page where the browser lets one keep anything.
function themeSwitch() {
  const orders = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";
  try {
    theme = orders.find((name) => name === localStorage.getItem("meristem-theme")) || "auto";
  } catch (error) {
    // a page from disk may not be allowed to
  }
  function show() {
    document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
    button.textContent = `Colours: ${theme}`;
  }
  function next() {
    theme = orders[(orders.indexOf(theme) + 1) % orders.length];
    try {
      localStorage.setItem("meristem-theme", theme);
    } catch (error) {
      // then it holds for this page
    }
    show();
  }
  const button = element("button", { class: "switch-theme no-print", type: "button", onclick: next });
  system.addEventListener("change", show);
  show();
  return button;
}

// Draw when an element is given another width, and at first; not within the observer, which would be called again.
function drawnToWidth(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (!node.clientWidth || node.clientWidth === width) return;
    width = node.clientWidth;
    requestAnimationFrame(draw);
  }).observe(node);
}

const section = (id, title, ...content) =>
  element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), ...content);
const facts = (rows) =>
  element(
    "dl",
    { class: "facts" },
    rows.map((row) => element("div", {}, element("dt", {}, row.label), element("dd", {}, row.value))),
  );
