// The page of a comparison: paired differences with their intervals, tables, and the losses of all arms.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const NARROW = 680; // below it labels stand above what they name
const LETTER = 6.9; // the mean width of one, in pixels
const BOLD = 1.2; // how much wider a bold one is
const LONGEST = 46; // letters of a label; the whole one is shown where the pointer rests
const MINUS = " minus ";

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// The name of a contrast; of two long ones each has half of the place, so that the second is not lost.
function shortened({ arm, baseline }) {
  const place = LONGEST - MINUS.length,
    second = cut(baseline, Math.max(Math.floor(place / 2), place - arm.length));
  return cut(arm, place - second.length) + MINUS + second;
}

const kindColour = (line) => `var(--${line.kind})`;

// A row for each contrast: the mean, its interval, and a small dot for every seed; the margin of equality is shaded.
function differencesChart(lines, margin) {
  const svg = drawn("svg", { role: "img", class: "differences" });
  svg.setAttribute("aria-label", lines.map((line) => `${line.name}: ${line.text}, ${line.word}`).join("; "));
  const figure = element("figure", {}, svg);
  const ends = lines.flatMap((line) => [line.low, line.high, ...line.seeds.map(([, value]) => value)]);
  ends.push(0, ...(margin === null ? [] : [-margin, margin]));
  const space = 0.05 * (Math.max(...ends) - Math.min(...ends) || 1);
  const low = Math.min(...ends) - space,
    high = Math.max(...ends) + space;

  function draw() {
    const width = Math.max(260, figure.clientWidth || 640),
      narrow = width < NARROW;
    const letters = (pick, bold = 1) =>
      LETTER * Math.max(...lines.map((line) => pick(line).length * (line.primary ? bold : 1)));
    const left = narrow ? 8 : 30 + letters(shortened, BOLD),
      right = width - (narrow ? 8 : 24 + letters((line) => line.word));
    const row = narrow ? 66 : 36,
      top = 6,
      bottom = top + row * lines.length,
      height = bottom + 26;
    const X = (value) => left + ((value - low) / (high - low)) * (right - left);
    const upright = (value, colour, thick) =>
      drawn("line", { x1: X(value), x2: X(value), y1: top, y2: bottom, stroke: colour, "stroke-width": thick });
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const parts = [];
    if (margin !== null)
      parts.push(
        titled(
          drawn("rect", {
            class: "margin",
            x: X(-margin),
            y: top,
            width: X(margin) - X(-margin),
            height: bottom - top,
          }),
          `margin of equality: ${margin}`,
        ),
      );
    for (const tick of roundTicks(low, high, Math.max(2, Math.floor((right - left) / 90)))) {
      parts.push(upright(tick, "var(--grid)", 1));
      parts.push(drawn("text", { x: X(tick), y: bottom + 18, "text-anchor": "middle" }, compact(tick)));
    }
    parts.push(upright(0, "var(--muted)", 1.5));
    lines.forEach((line, index) => parts.push(...rowOf(line, top + row * index, { X, left, right, narrow })));
    svg.replaceChildren(...parts);
  }

  function rowOf(line, above, { X, left, right, narrow }) {
    const y = above + (narrow ? 46 : 16),
      colour = kindColour(line);
    const label = { class: `label${line.primary ? " primary" : ""}` },
      said = { class: "word", style: `fill:${colour}` };
    const name = narrow
      ? drawn("text", { ...label, x: left, y: above + 14 }, shortened(line))
      : drawn("text", { ...label, x: left - 16, y: y + 4, "text-anchor": "end" }, shortened(line));
    const word = narrow
      ? drawn("text", { ...said, x: left, y: above + 30 }, line.word)
      : drawn("text", { ...said, x: right + 16, y: y + 4 }, line.word);
    const group = drawn("g", { fill: colour, stroke: colour });
    group.append(
      drawn("line", { x1: X(line.low), x2: X(line.high), y1: y, y2: y, "stroke-width": 2.5 }),
      drawn("circle", { cx: X(line.mean), cy: y, r: line.primary ? 6 : 5 }),
    );
    for (const [seed, value] of line.seeds)
      group.append(
        titled(
          drawn("circle", { cx: X(value), cy: y + 11, r: 2.2, stroke: "none", opacity: 0.6 }),
          `seed ${seed}: ${compact(value)}`,
        ),
      );
    return [titled(name, line.name), titled(group, `${line.name}: ${line.text}`), word];
  }

  drawnToWidth(figure, draw);
  return figure;
}

function titled(node, text) {
  node.prepend(drawn("title", {}, text));
  return node;
}

function tableOf(title) {
  const { columns, rows } = page.tables[title];
  const cell = (column, place) => (row) =>
    column.title === "result" ? element("b", {}, row[place]) : row[place] === "-" ? "–" : row[place];
  const isShort = (column, place) => place > 0 && column.title.length < 14;
  return dataTable(
    columns.map((column, place) => ({ ...column, short: isShort(column, place), of: cell(column, place) })),
    rows,
    { label: title, cards: true },
  );
}

function lossChart({ range, arms }) {
  const lines = arms.flatMap((arm, index) => {
    const dash = index > 7; // the colours come again
    return [
      ...arm.seeds.map((curve) =>
        series(arm.name, curve, runColour(index), { width: 1, opacity: 0.22, quiet: true, dash }),
      ),
      series(arm.name, arm.mean, runColour(index), { width: 2.2, dash }),
    ];
  });
  return lineChart({
    title: "Training loss, smoothed",
    note: "Bold lines are means over seeds. A click on a name shows or hides an arm.",
    height: 340,
    legend: true,
    range,
    xTitle: () => "updates",
    xRead: (x) => `update ${Math.round(x).toLocaleString("en-US")}`,
    yText: (y) => compact(y, 4),
    series: lines,
  }).element;
}

function leads(lines) {
  return lines.map((line) =>
    element(
      "section",
      { class: `lead ${line.kind}` },
      element(
        "p",
        {},
        element("b", {}, line.arm),
        " against ",
        element("b", {}, line.baseline),
        ": ",
        element("b", {}, line.word),
        `. Paired difference ${line.said}.`,
      ),
    ),
  );
}

function build() {
  const lines = page.contrasts,
    shaded = page.margin === null ? "" : "; the margin of equality is shaded";
  const sign =
    `${page.better} of zero the first arm is better${shaded}. Small dots are seeds, bold is the primary contrast. ` +
    "Intervals are of each contrast by itself; what is said of those marked Holm is corrected for their number.";
  document.body.append(
    element(
      "header",
      { class: "page" },
      themeSwitch(),
      element("h1", {}, page.title),
      element("p", { class: "muted" }, page.about),
    ),
    element(
      "main",
      {},
      leads(lines.filter((line) => line.primary)),
      page.cautions.map((caution) => element("p", { class: "note warn" }, caution)),
      section(
        "differences",
        "Paired differences",
        ...(lines.length
          ? [differencesChart(lines, page.margin), element("p", { class: "muted" }, sign)]
          : [element("p", {}, page.nothing)]),
      ),
      section(
        "contrasts",
        "What is shown, and what is not",
        ...(lines.length ? [tableOf("Contrasts")] : []),
        element(
          "ul",
          { class: "notes" },
          page.notes.map((note) => element("li", {}, note)),
        ),
      ),
      section("results", "Results", tableOf("Results")),
      page.curves ? section("curves", "Loss curves", lossChart(page.curves)) : null,
      section("cost", "Cost", tableOf("Cost")),
      section(
        "time",
        "Time",
        element("h3", {}, "Where it went, in the mean over seeds"),
        tableOf("Where the time went"),
        ...(lines.length ? [element("h3", {}, "Paired differences in seconds"), tableOf("Time")] : []),
      ),
      section("arms", "Arms", tableOf("Arms")),
    ),
    element("footer", {}, `Made by meristem ${page.version} from the runs alone. Nothing is loaded from elsewhere.`),
  );
}

build();
