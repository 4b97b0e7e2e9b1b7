// The data that the page carries, and charts of a run over time: against steps, tokens, FLOPs or seconds.
"use strict";

const MARK = {
  birth: "--birth",
  removal: "--removal",
  add: "--loop",
  deepen: "--loop",
  fade: "--loop",
  stack: "--block",
};
const AXES = { steps: "steps", tokens: "tokens", flops: "training FLOPs", seconds: "seconds of training steps" };
let page = JSON.parse(document.getElementById("data").textContent);
// What the reader has chosen: the axis, a colour, a run of several, and a time (null: the end, whenever that is).
let axis = "steps",
  colouring = "entropy",
  shown = 0,
  moment = null;
// Charts that are drawn, and by their titles those that were there before the page was drawn anew.
let charts = [],
  known = new Map(),
  former = new Map();

const markColour = (row) => `var(${MARK[row.action] || "--other"})`;
const number = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en-US"));

// Between steps and the other axes, on straight lines between the points that are known.
function between(from, to, x) {
  if (from.length < 2) return 0;
  const index = Math.max(0, Math.min(from.length - 2, lastNotAbove(from, x)));
  return to[index] + ((x - from[index]) / (from[index + 1] - from[index] || 1)) * (to[index + 1] - to[index]);
}
const fromStep = (run, step) =>
  axis === "steps" || !run.axes[axis] ? step : between(run.axes.steps, run.axes[axis], step);
const toStep = (run, x) => (axis === "steps" || !run.axes[axis] ? x : between(run.axes[axis], run.axes.steps, x));
const placeText = (x) => (axis === "seconds" ? duration(x) : `${compact(x, 4)} ${AXES[axis]}`);
const axisText = (x) => (axis === "seconds" ? duration(x) : compact(x, 4));

function axisSwitch(runs, name) {
  const has = (key) => key === "steps" || runs.every((run) => run.axes[key]);
  return choices(
    name,
    "Against",
    Object.entries({ steps: "steps", tokens: "tokens", flops: "FLOPs", seconds: "seconds" }).map(([key, text]) => [
      key,
      text,
      !has(key),
    ]),
    axis,
    (value) => {
      axis = value;
      document.querySelectorAll(`.axis-switch input[value="${value}"]`).forEach((input) => {
        input.checked = true;
      });
      drawAnew(charts);
    },
  );
}

// A chart that was there before is changed instead of made again: it keeps which of its lines are hidden.
function chartOf(spec) {
  const chart = former.get(spec.title);
  if (chart) chart.change(spec);
  known.set(spec.title, chart || lineChart(spec));
  return known.get(spec.title);
}

// A chart of one run over time: its axis, its events, and the time that the slider shows.
function timeChart(run, spec) {
  const chart = chartOf({
    x: (step) => fromStep(run, step),
    xBack: (x) => toStep(run, x),
    xText: axisText,
    xTitle: () => AXES[axis],
    xEnd: () => fromStep(run, Math.max(1, run.last_step)),
    xRead: (step) =>
      [
        `step ${Math.round(step).toLocaleString("en-US")}`,
        ...(axis === "steps" ? [] : [placeText(fromStep(run, step))]),
      ].join(", "),
    marks: eventMarks(run),
    ...spec,
  });
  charts.push(chart);
  return chart;
}

// The events that changed something, whoever made them.
function changes(run) {
  const places = new Set(run.structure.snapshots.map((one) => one.row));
  return run.events.filter((row, place) => row.action in MARK || places.has(place));
}

const eventMarks = (run) =>
  changes(run)
    .map((row) => ({
      x: row.step,
      colour: markColour(row),
      text: `${row.what}${row.layer_name && `, layer ${row.layer_name}`}`,
    }))
    .concat(
      run.lifetime
        .filter((row) => ["resume", "rewind"].includes(row.kind))
        .map((row) => ({
          x: row.step,
          colour: "var(--other)",
          dash: "2 4",
          text: row.kind === "resume" ? "resumed" : "went back to here",
        })),
    );
