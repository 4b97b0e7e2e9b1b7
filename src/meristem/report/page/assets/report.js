// The page of a run, or of several: curves over one another, what differs, and one run in detail.
"use strict";

function compareSection(runs) {
  const held = runs.some((run) => run.loss.held_out.steps.length);
  const overlay = (title, pick, more = {}) => {
    const lines = runs.flatMap((run, index) => pick(run, index).map((one) => ({ ...one, run })));
    if (!lines.some((line) => line.x.length)) return null;
    // Every run has its own axis, so that places are made before they are drawn.
    const placed = () => lines.map((line) => ({ ...line, x: line.x.map((step) => fromStep(line.run, step)) }));
    const chart = chartOf({
      title,
      height: 300,
      legend: true,
      xText: axisText,
      xTitle: () => AXES[axis],
      xRead: placeText,
      yText: (y) => compact(y, 5),
      series: placed(),
      ...more,
    });
    charts.push({ draw: () => chart.change({ series: placed() }), inView: chart.inView, setCursor() {} });
    return chart.element;
  };
  const ranges = runs.map((run) => run.loss.range).filter(Boolean);
  const range = ranges.length
    ? [Math.min(...ranges.map((one) => one[0])), Math.max(...ranges.map((one) => one[1]))]
    : null;
  const parts = [
    element("div", { class: "controls" }, element("span", { class: "axis-switch" }, axisSwitch(runs, "axis-all"))),
  ];
  if (page.warning) parts.push(element("p", { class: "note warn" }, page.warning));
  parts.push(
    held
      ? overlay("Held-out loss", (run, index) => [
          series(run.name, run.loss.held_out, runColour(index), { dots: true, width: 2 }),
        ])
      : null,
    overlay(
      "Training loss, smoothed",
      (run, index) => [series(run.name, run.loss.smooth, runColour(index), { width: 2 })],
      { range },
    ),
  );
  const table = page.table;
  parts.push(
    element("h3", { style: "margin-top:16px" }, "Differences"),
    element(
      "p",
      { class: "muted" },
      `Every number as it is at the end of its run; in brackets what it is more than that of ${runs[0].name}.`,
    ),
    dataTable(
      [
        { title: "", of: (row) => row.label },
        ...runs.map((run, index) => ({ title: run.name, number: true, of: (row) => row.values[index] })),
      ],
      table,
      { label: "differences of the runs", wrap: true, cards: true },
    ),
    element("h3", { style: "margin-top:16px" }, `Settings that differ (${page.differences.length})`),
    page.differences.length
      ? dataTable(
          [
            { title: "setting", code: true, of: (row) => row.key },
            ...runs.map((run, index) => ({ title: run.name, code: true, of: (row) => row.values[index] ?? "–" })),
          ],
          page.differences,
          { label: "settings that differ", wrap: true, cards: true },
        )
      : element("p", {}, "None: the runs have the same configuration."),
  );
  return section("compare", "Side by side", ...parts);
}

function runSections(run) {
  const structure = structureSection(run);
  const parts = [
    structure.element,
    lossSection(run),
    gaugeSection(run),
    eventSection(run, structure.go),
    costSection(run),
    evaluationSection(run),
    settingsSection(run),
  ];
  return { parts, begin: structure.begin };
}

function chooseRun(runs, index, show) {
  const options = runs.map((run, place) =>
    element("option", { value: String(place), selected: place === index }, run.name),
  );
  const choose = (event) => {
    moment = null;
    show(Number(event.target.value));
    document.getElementById("which").focus();
  };
  return element(
    "section",
    { class: "no-print" },
    element(
      "div",
      { class: "controls" },
      element("label", { for: "which" }, "One run in detail:"),
      element("select", { id: "which", onchange: choose }, options),
    ),
    element("p", {}, `${runs[index].title}. ${runs[index].status.text}`),
  );
}

// Draws the page, and what it returns draws it anew with other data. `live` is what a page that follows a run adds.
function build(live = null) {
  const head = element("header", { class: "page" }),
    nav = element("nav", { class: "sections", "aria-label": "sections" }),
    main = element("main"),
    theme = themeSwitch();
  function show(index) {
    const { runs } = page,
      run = runs[index];
    shown = index;
    charts = [];
    known = new Map();
    main.replaceChildren();
    if (!run) return;
    if (runs.length > 1) main.append(compareSection(runs), chooseRun(runs, index, show));
    const made = runSections(run);
    for (const text of run.warnings) main.append(element("p", { class: "note warn" }, text));
    main.append(...made.parts);
    former = new Map();
    made.begin();
  }
  function top() {
    const { runs } = page,
      one = runs.length === 1 ? runs[0] : null;
    const paths = one && !live ? `${one.path}. ${one.status.text}` : runs.map((run) => run.path).join(" · ");
    nav.replaceChildren(
      ...[...main.querySelectorAll("section[id]")].map((part) =>
        element("a", { href: `#${part.id}` }, part.querySelector("h2").textContent),
      ),
    );
    const parts = [theme, element("h1", {}, page.title), element("p", { class: "muted path" }, paths), live];
    head.replaceChildren(...[...parts, one ? facts(one.summary) : null, nav].filter(Boolean));
  }
  document.body.append(
    head,
    main,
    element(
      "footer",
      {},
      `Made by meristem ${page.version} from the files of the run${page.runs.length > 1 ? "s" : ""} alone. `,
      "Nothing is loaded from elsewhere.",
    ),
  );
  show(0);
  top();
  return (data) => {
    page = data;
    former = known;
    show(Math.min(shown, Math.max(0, page.runs.length - 1)));
    top();
    drawAnew(charts);
  };
}

if (!page.watch) build();
