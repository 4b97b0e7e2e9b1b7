// Line charts in SVG: axes, legend, values under the pointer or by arrow keys, marks, thresholds, and a cursor in time.
"use strict";

const MARGIN = { left: 56, right: 14, top: 12, bottom: 34 };

const runColour = (index) => `var(--c${index % 8})`;

// A curve as a line of a chart.
const series = (name, curve, colour, more = {}) => ({ name, x: curve.steps, y: curve.values, colour, ...more });

// About so many round values from low to high.
function roundTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1)
    ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [],
    decades = Math.log10(high / low),
    every = Math.max(1, Math.ceil(decades / 6));
  const factors = decades < 1.5 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (power % every) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// Draw charts anew: those in view now, the others one by one as the browser finds time.
function drawAnew(charts) {
  const later = charts.filter((chart) => {
    const near = chart.inView();
    if (near) chart.draw();
    return !near;
  });
  const round = (drawAnew.round = (drawAnew.round || 0) + 1);
  const next = () => {
    if (later.length && round === drawAnew.round) {
      later.shift().draw();
      setTimeout(next);
    }
  };
  setTimeout(next);
}

/* spec: {
     title, note, unit, height, scale: "linear" | "log", range: [low, high] | null, zero: whether 0 is in the range,
     xTitle, xText(x), yText(y), x: (x) => place on the axis (a change of units),
     series: [{ name, x: [], y: [], colour, width, opacity, dash, step, dots, noise: [], quiet: unnamed }],
     marks: [{ x, colour, text }], cursor: x | null
   } */
function lineChart(spec) {
  const figure = element("figure", { class: "chart" });
  const heading = spec.title ? element("h3", {}, spec.title) : null;
  const legend = element("ul", { class: "legend" });
  const svg = drawn("svg", { tabindex: 0, role: "img" });
  const tip = element("div", { class: "tip", hidden: true });
  const spoken = element("div", {
    "aria-live": "polite",
    style: "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)",
  });
  const hidden = new Set();
  let plot = null,
    cursor = spec.cursor ?? null,
    cursorLine = null,
    pointer = null;
  svg.setAttribute("aria-label", `${spec.title}: a chart; arrow keys read its values`);
  svg.setAttribute("height", spec.height || 240); // its place is kept until it is drawn
  const caption = spec.note ? element("figcaption", {}, spec.note) : null;
  figure.append(...[heading, caption, legend, svg, tip, spoken].filter(Boolean));

  const place = (x) => (spec.x ? spec.x(x) : x);
  const yText = spec.yText || ((y) => compact(y));
  const xText = spec.xText || ((x) => compact(x, 6));

  function drawLegend() {
    legend.replaceChildren();
    const named = spec.series.filter((series) => !series.quiet && series.x.length);
    if (named.length < 2 && !spec.legend) return;
    if (named.length > 14) return;
    for (const series of named) {
      legend.append(
        element(
          "li",
          {},
          element(
            "button",
            {
              type: "button",
              "aria-pressed": String(!hidden.has(series.name)),
              title: "show or hide",
              onclick: () => {
                if (!hidden.delete(series.name)) hidden.add(series.name);
                draw();
                drawLegend();
              },
            },
            element("span", {
              class: `swatch${series.dash ? " dashed" : ""}`,
              style: `color:${series.colour};opacity:${series.opacity ?? 1}`,
            }),
            series.name,
          ),
        ),
      );
    }
  }

  function scaleOf(shown) {
    let low = Infinity,
      high = -Infinity;
    for (const series of shown) {
      if (series.unscaled) continue;
      for (const y of series.y)
        if (y !== null && (spec.scale !== "log" || y > 0)) {
          if (y < low) low = y;
          if (y > high) high = y;
        }
    }
    if (spec.range) [low, high] = spec.range;
    if (spec.zero) low = Math.min(low, 0);
    if (!(low <= high)) [low, high] = spec.scale === "log" ? [0.1, 1] : [0, 1];
    if (spec.scale === "log") {
      low = Math.max(low, high / (spec.decades || 1e5));
      if (high / low < 1.05) {
        low /= 1.5;
        high *= 1.5;
      }
      low /= 1.15;
      high *= 1.15;
      const span = Math.log(high / low);
      return { low, high, at: (y) => 1 - Math.log(Math.max(y, low) / low) / span, ticks: logTicks(low, high) };
    }
    if (!spec.range) {
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
      low = spec.zero && low === 0 ? 0 : low - margin;
      high += margin;
    }
    return { low, high, at: (y) => 1 - (y - low) / (high - low), ticks: roundTicks(low, high, 5) };
  }

  function draw() {
    const width = Math.max(240, figure.clientWidth || 640),
      height = spec.height || 240;
    const shown = spec.series.filter((series) => !hidden.has(series.name));
    const scale = scaleOf(shown.length ? shown : spec.series);
    const left = MARGIN.left,
      right = width - MARGIN.right,
      top = MARGIN.top,
      bottom = height - MARGIN.bottom;
    const end = spec.xEnd ? spec.xEnd() : Math.max(...spec.series.map((series) => place(series.x.at(-1) ?? 0)), 0);
    const xEnd = end > 0 ? end : 1;
    const X = (x) => left + (place(x) / xEnd) * (right - left),
      Y = (y) => top + scale.at(y) * (bottom - top);
    plot = { X, Y, left, right, top, bottom, width, height, xEnd, scale };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const id = (lineChart.count = (lineChart.count || 0) + 1);
    const clip = drawn("clipPath", { id: `clip${id}` });
    clip.append(drawn("rect", { x: left, y: top, width: right - left, height: bottom - top }));
    const parts = [clip];
    for (const tick of scale.ticks) {
      parts.push(drawn("line", { x1: left, x2: right, y1: Y(tick), y2: Y(tick), stroke: "var(--grid)" }));
      parts.push(drawn("text", { x: left - 7, y: Y(tick) + 4, "text-anchor": "end" }, yText(tick)));
    }
    const ticks = roundTicks(0, xEnd, Math.max(2, Math.floor((right - left) / 110)));
    for (const tick of ticks) {
      const at = left + (tick / xEnd) * (right - left);
      parts.push(drawn("line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, stroke: "var(--muted)" }));
      const anchor = at > right - 14 ? "end" : "middle";
      parts.push(drawn("text", { x: at, y: bottom + 17, "text-anchor": anchor }, xText(tick)));
    }
    parts.push(
      drawn("text", { x: right, y: bottom + 30, "text-anchor": "end" }, spec.xTitle ? spec.xTitle() : "steps"),
    );
    parts.push(drawn("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--muted)" }));
    const inside = drawn("g", { "clip-path": `url(#clip${id})` });
    for (const mark of spec.marks || [])
      inside.append(
        drawn("line", {
          x1: X(mark.x),
          x2: X(mark.x),
          y1: top,
          y2: bottom,
          stroke: mark.colour,
          "stroke-width": 1.2,
          opacity: spec.marks.length > 40 ? 0.22 : 0.55,
          "stroke-dasharray": mark.dash || null,
        }),
      );
    for (const series of shown) for (const node of seriesNodes(series, X, Y)) inside.append(node);
    cursorLine = drawn("line", { y1: top, y2: bottom, stroke: "var(--ink)", "stroke-width": 1, opacity: 0.55 });
    pointer = drawn("g", {});
    parts.push(inside, cursorLine, pointer);
    if (!spec.series.some((series) => series.y.some((y) => y !== null)))
      parts.push(
        drawn("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no values yet"),
      );
    svg.replaceChildren(...parts);
    setCursor(cursor);
  }

  function seriesNodes(series, X, Y) {
    const nodes = [];
    let path = "",
      open = false,
      last = null;
    const area = [],
      under = [];
    for (let index = 0; index < series.x.length; index += 1) {
      const y = series.y[index];
      if (y === null) {
        open = false;
        continue;
      }
      const px = X(series.x[index]).toFixed(1),
        py = Y(y).toFixed(1);
      if (!open) path += `M${px} ${py}`;
      else path += series.step ? `H${px}V${py}` : `L${px} ${py}`;
      open = true;
      last = py;
      const noise = series.noise && series.noise[index];
      if (noise !== null && noise !== undefined) {
        area.push(`${px} ${Y(y + 2 * noise).toFixed(1)}`);
        under.push(`${px} ${Y(y - 2 * noise).toFixed(1)}`);
      }
    }
    if (series.step && last !== null && series.until) path += `H${X(series.until).toFixed(1)}`;
    if (area.length > 1)
      nodes.push(
        drawn("path", { d: `M${area.join("L")}L${under.reverse().join("L")}Z`, fill: series.colour, opacity: 0.15 }),
      );
    nodes.push(
      drawn("path", {
        d: path,
        fill: "none",
        stroke: series.colour,
        "stroke-width": series.width || 1.8,
        opacity: series.opacity ?? null,
        "stroke-dasharray": series.dash ? "6 4" : null,
        "stroke-linejoin": "round",
      }),
    );
    const known = series.y.filter((y) => y !== null).length;
    if (series.dots || known === 1)
      series.x.forEach((x, index) => {
        if (series.y[index] !== null)
          nodes.push(
            drawn("circle", { cx: X(x), cy: Y(series.y[index]), r: known > 60 ? 1.8 : 3, fill: series.colour }),
          );
      });
    return nodes;
  }

  // The value of a series at a place: of its nearest point, or of the last one where values hold until the next.
  function valueAt(series, x) {
    if (!series.x.length) return null;
    const index = series.step ? lastNotAbove(series.x, x) : nearestIndex(series.x, x);
    return index < 0 ? null : index;
  }

  function read(x) {
    const shown = spec.series.filter((series) => !hidden.has(series.name) && !series.quiet && series.x.length);
    const lines = [];
    for (const series of shown) {
      const index = valueAt(series, x);
      if (index === null || series.y[index] === null) continue;
      const noise = series.noise && series.noise[index];
      lines.push({
        series,
        x: series.x[index],
        y: series.y[index],
        text: yText(series.y[index]) + (noise ? ` ± ${compact(noise, 2)}` : "") + whenFar(series, index, x),
      });
    }
    return lines;
  }

  // Where the nearest value is of another time than the one that is pointed at.
  const whenFar = (series, index, x) =>
    series.step || series.y.length < 2 || Math.abs(plot.X(series.x[index]) - plot.X(x)) < 12
      ? ""
      : ` (at ${xText(place(series.x[index]))})`;

  function showValues(x) {
    if (!plot || !spec.series.some((series) => series.x.length)) return;
    let lines = read(x);
    if (lines.length > 12) lines = lines.sort((a, b) => b.y - a.y).slice(0, 10);
    const near = (spec.marks || []).filter((mark) => Math.abs(plot.X(mark.x) - plot.X(x)) < 5 && mark.text).slice(0, 4);
    const at = spec.xRead ? spec.xRead(x) : `step ${Math.round(x).toLocaleString("en-US")}`;
    tip.replaceChildren(
      element("b", {}, at),
      ...lines.map((line) =>
        element(
          "div",
          { class: "row" },
          element(
            "span",
            {},
            element("span", {
              class: `swatch${line.series.dash ? " dashed" : ""}`,
              style: `color:${line.series.colour}`,
            }),
            line.series.name,
          ),
          element("span", {}, line.text),
        ),
      ),
      ...near.map((mark) => element("div", {}, mark.text)),
    );
    tip.hidden = false;
    const px = (plot.X(x) / plot.width) * figure.clientWidth;
    const over = px > figure.clientWidth / 2;
    tip.style.left = over ? "" : `${px + 12}px`;
    tip.style.right = over ? `${figure.clientWidth - px + 12}px` : "";
    tip.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + 14}px`;
    pointer.replaceChildren(
      drawn("line", {
        x1: plot.X(x),
        x2: plot.X(x),
        y1: plot.top,
        y2: plot.bottom,
        stroke: "var(--accent)",
        "stroke-dasharray": "3 3",
      }),
      ...lines.map((line) =>
        drawn("circle", {
          cx: plot.X(line.x),
          cy: Math.min(plot.bottom, Math.max(plot.top, plot.Y(line.y))),
          r: 3.5,
          fill: line.series.colour,
          stroke: "var(--surface)",
        }),
      ),
    );
    return `${at}: ${lines.map((line) => `${line.series.name} ${line.text}`).join(", ")}`;
  }

  function hide() {
    tip.hidden = true;
    if (pointer) pointer.replaceChildren();
  }

  // All places of points, for arrow keys; made when they are asked for.
  let places = null,
    where = -1;
  function step(by) {
    places ||= [...new Set(spec.series.filter((series) => !series.quiet).flatMap((series) => series.x))].sort(
      (a, b) => a - b,
    );
    if (!places.length) return;
    where = where < 0 ? (cursor === null ? places.length - 1 : nearestIndex(places, cursor)) : where;
    where = Math.max(0, Math.min(places.length - 1, where + by));
    spoken.textContent = showValues(places[where]) || "";
  }
  svg.addEventListener("keydown", (event) => {
    const jump = Math.max(1, Math.round((places ? places.length : 100) / 10));
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -jump, PageUp: jump, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (event.key === "Escape") {
      hide();
      return;
    }
    if (by === undefined) return;
    event.preventDefault();
    step(by);
  });
  svg.addEventListener("blur", () => {
    hide();
    where = -1;
  });
  svg.addEventListener("pointermove", (event) => {
    if (!plot) return;
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * plot.width - plot.left) / (plot.right - plot.left);
    if (share < -0.02 || share > 1.02) {
      hide();
      return;
    }
    const wanted = Math.max(0, Math.min(1, share)) * plot.xEnd;
    showValues(spec.xBack ? spec.xBack(wanted) : wanted);
  });
  svg.addEventListener("pointerleave", hide);

  function setCursor(x) {
    cursor = x;
    if (!cursorLine) return;
    cursorLine.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null && plot) {
      cursorLine.setAttribute("x1", plot.X(x));
      cursorLine.setAttribute("x2", plot.X(x));
    }
  }

  drawnToWidth(figure, draw);
  const inView = () => {
    const box = figure.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  };
  drawLegend();
  return {
    element: figure,
    draw,
    inView,
    setCursor,
    change(more) {
      Object.assign(spec, more);
      places = null;
      if (caption && more.note) caption.textContent = more.note;
      drawLegend();
      if (figure.clientWidth) draw();
    },
  };
}
