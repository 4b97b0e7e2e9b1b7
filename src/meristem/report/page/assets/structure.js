// The structure as a picture: a row for every layer, a box as wide as its dim for every head, arcs where it runs again.
"use strict";

const SHADES = [
  "#440154",
  "#482878",
  "#3e4989",
  "#31688e",
  "#26828e",
  "#1f9e89",
  "#35b779",
  "#6ece58",
  "#b5de2b",
  "#fde725",
];
const SIZES = ["#b9d4ec", "#12497b"],
  SIZE_RANGE = [16, 256];

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function blend(one, other, share) {
  const a = channels(one),
    b = channels(other);
  return `#${a
    .map((value, index) =>
      Math.round(value + (b[index] - value) * share)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;
}
function shade(share) {
  const at = Math.max(0, Math.min(1, share)) * (SHADES.length - 1),
    index = Math.min(SHADES.length - 2, Math.floor(at));
  return blend(SHADES[index], SHADES[index + 1], at - index);
}
function inkOn(hex) {
  const [red, green, blue] = channels(hex);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#14181c" : "#ffffff";
}

// Many heads are counted instead of named.
const loopedHeads = (heads) => (heads.length > 4 ? counted(heads.length, "head") : `h${heads.join(", h")}`);

// What heads can be coloured by: { title, text(value), share(value), low, high, of(step) -> (layer, head) -> value }.
function headColours(run) {
  const { structure, readings, evaluation } = run,
    found = {};
  const readingsAt = (rows) => {
    const steps = rows.map((row) => row.step),
      made = new Map();
    return (step) => {
      const index = lastNotAbove(steps, step);
      if (index < 0) return null;
      if (!made.has(index)) {
        const row = rows[index],
          values = new Map();
        structure.snapshots[row.at].layers.forEach((place, number) => {
          const shape = structure.shapes[place],
            own = row.values[number];
          if (Array.isArray(own)) own.forEach((value, head) => values.set(shape.heads[head], value));
          else values.set(`layer ${shape.layer}`, own);
        });
        made.set(index, {
          step: row.step,
          of: (layer, head) => values.get(head) ?? values.get(`layer ${layer}`) ?? null,
        });
      }
      return made.get(index);
    };
  };
  const spread = (rows) => {
    let low = Infinity,
      high = -Infinity;
    for (const row of rows)
      for (const value of row.values.flat())
        if (value !== null) {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
    return [low, high];
  };
  const linear = (low, high) => (value) => (high > low ? (value - low) / (high - low) : 0.5);
  const logarithmic = (low, high) => (value) =>
    high > low ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : 0.5;
  const add = (name, title, text, low, high, scale) => {
    found[name] = { title, text, low, high, share: scale(low, high), at: readingsAt(readings[name]) };
  };
  const number = (value) => compact(value, 3);
  if (readings.entropy.length) add("entropy", "entropy", number, ...spread(readings.entropy), linear);
  if (readings.demand.length) {
    const [least, most] = spread(readings.demand),
      high = Math.max(most, 1),
      low = Math.min(1, Math.max(least, high / 1e4));
    add("demand", "demand, in thresholds", (value) => `${number(value)} × threshold`, low, high, logarithmic);
  }
  if (readings.own_share.length) {
    const [least, high] = spread(readings.own_share);
    if (high > 0) add("own_share", "own share", number, Math.max(least, high / 1e4), high, logarithmic);
  }
  if (evaluation && evaluation.distance) {
    const { layers, values } = evaluation.distance,
      known = new Map(layers.map((layer, index) => [layer, values[index]]));
    const high = Math.max(...values.filter((value) => value !== null), 1);
    found.distance = {
      title: "attention distance",
      text: (value) => `${compact(value, 3)} tokens`,
      low: 0,
      high,
      share: linear(0, high),
      at: () => ({ step: evaluation.step, of: (layer) => known.get(layer) ?? null }),
    };
  }
  const [narrow, wide] = SIZE_RANGE;
  const dims = run.structure.shapes.map((shape) => shape.dim);
  found.size = {
    title: "head size",
    text: (value) => `dim ${value}`,
    low: Math.min(...dims),
    high: Math.max(...dims),
    share: (dim) => Math.log(dim / narrow) / Math.log(wide / narrow),
    sizes: true,
    at: () => ({ step: null, of: (layer, head, shape) => shape.dim }),
  };
  return found;
}

function structurePicture(run, chosen) {
  const { structure } = run,
    steps = structure.snapshots.map((one) => one.step),
    colours = headColours(run);
  const figure = element("figure", { class: "structure" });
  const svg = drawn("svg", { role: "img" }),
    tip = element("div", { class: "tip", hidden: true });
  const key = element("div", { class: "controls key" });
  let colour = chosen in colours ? chosen : Object.keys(colours)[0],
    step = run.last_step;
  const slots = Math.max(structure.all_layers, structure.target),
    loops = structure.shapes.some((shape) => shape.loop);
  figure.append(svg, tip, key);

  const snapshotAt = (at) => structure.snapshots[Math.max(0, lastNotAbove(steps, at))];

  function drawKey() {
    const scale = colours[colour],
      bar = drawn("svg", { width: 130, height: 12, viewBox: "0 0 130 12", "aria-hidden": "true" });
    for (let index = 0; index < 26; index += 1) {
      const share = index / 25,
        value = scale.sizes ? blend(SIZES[0], SIZES[1], share) : shade(share);
      bar.append(drawn("rect", { x: index * 5, width: 5.5, height: 12, fill: value }));
    }
    bar.style.cssText = "width:130px;flex:none;border-radius:3px";
    const [low, high] = scale.sizes ? SIZE_RANGE : [scale.low, scale.high];
    const when = scale.at(step),
      measured = scale.sizes
        ? ""
        : when
          ? `measured at step ${when.step.toLocaleString("en-US")}`
          : "not measured yet at this step";
    key.replaceChildren(
      element("span", {}, `${scale.title}:`),
      element("span", {}, compact(low, 3)),
      bar,
      element("span", {}, compact(high, 3)),
      element("span", { class: "muted" }, measured),
    );
    if (loops || structure.shapes.some((shape) => shape.repeats))
      key.append(element("span", {}, element("span", { class: "swatch", style: "color:var(--loop)" }), "run again"));
    if (structure.shapes.some((shape) => shape.kv < shape.heads.length))
      key.append(
        element(
          "span",
          {},
          element("span", { class: "swatch", style: "color:var(--c2)" }),
          "key/value head, shared by the heads above it",
        ),
      );
    if (structure.snapshots.length > 1)
      key.append(
        element(
          "span",
          {},
          element("span", { class: "swatch", style: "color:var(--birth)" }),
          "new since the last change",
        ),
      );
  }

  function draw() {
    const width = Math.max(260, figure.clientWidth || 700),
      slim = width < 560;
    const left = slim ? 34 : 72,
      right = slim ? 74 : 200;
    const row = Math.max(14, Math.min(loops ? 44 : 32, 900 / slots)),
      top = 6;
    const scale = (width - left - right) / structure.widest,
      height = top + slots * row + 26;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const now = snapshotAt(step),
      reading = colours[colour].at(step),
      born = new Set(now.born);
    const present = new Map(now.layers.map((place) => [structure.shapes[place].layer, structure.shapes[place]]));
    const parts = [];
    for (let slot = 0; slot < slots; slot += 1) {
      const y = top + slot * row,
        shape = present.get(slot),
        middle = y + row * (loops && row > 26 ? 0.62 : 0.5);
      const box = Math.min(22, row * (loops && row > 26 ? 0.52 : 0.76)),
        boxTop = middle - box / 2;
      const gone = structure.left[slot];
      if (row >= 12 || slot % 2 === 0)
        parts.push(
          drawn(
            "text",
            { x: left - 8, y: middle + 4, "text-anchor": "end", class: shape ? "strong" : "" },
            gone === undefined
              ? slim
                ? String(slot)
                : `layer ${slot}`
              : slim
                ? "–"
                : shape
                  ? "(leaves)"
                  : "taken out",
          ),
        );
      if (!shape) {
        parts.push(
          drawn("rect", {
            x: left,
            y: boxTop,
            width: structure.width * scale,
            height: box,
            fill: "none",
            stroke: "var(--absent)",
            "stroke-dasharray": "3 4",
            rx: 2,
          }),
        );
        const why =
          gone !== undefined && step >= gone
            ? `taken out at step ${gone.toLocaleString("en-US")}`
            : slot < structure.all_layers
              ? "not there yet"
              : "to come";
        if (!slim && row >= 14) parts.push(drawn("text", { x: width - right + 20, y: middle + 4 }, why));
        continue;
      }
      parts.push(
        ...layerNodes(shape, { left, middle, boxTop, box, scale, row, reading, born, slim, x: width - right + 20 }),
      );
    }
    const rule = top + slots * row + 6,
      end = left + structure.width * scale;
    parts.push(
      drawn("path", {
        d: `M${left} ${rule - 3}V${rule + 3}M${left} ${rule}H${end}M${end} ${rule - 3}V${rule + 3}`,
        stroke: "var(--muted)",
        fill: "none",
      }),
      drawn("text", { x: (left + end) / 2, y: rule + 15, "text-anchor": "middle" }, `model width ${structure.width}`),
    );
    svg.replaceChildren(...parts);
    svg.setAttribute("aria-label", `Structure at step ${step}: ${now.text}`);
    drawKey();
  }

  function layerNodes(shape, place) {
    const { left, boxTop, box, scale, row, reading, born, slim, x, middle } = place,
      nodes = [];
    const size = shape.dim * scale,
      gap = Math.min(2.5, size * 0.15),
      looped = shape.loop ? new Set(shape.loop[0]) : new Set(),
      fading = new Set(shape.fading);
    const scaleOf = colours[colour];
    shape.heads.forEach((head, index) => {
      const value = reading ? reading.of(shape.layer, head, shape) : null;
      const fill =
        value === null || value === undefined
          ? "var(--absent)"
          : scaleOf.sizes
            ? blend(SIZES[0], SIZES[1], Math.max(0, Math.min(1, scaleOf.share(value))))
            : shade(scaleOf.share(value));
      const start = left + index * size;
      nodes.push(
        drawn("rect", {
          x: start.toFixed(2),
          y: boxTop.toFixed(2),
          width: Math.max(1, size - gap).toFixed(2),
          height: box.toFixed(2),
          rx: Math.min(3, size * 0.2),
          fill,
          stroke: born.has(head) ? "var(--birth)" : null,
          "stroke-width": born.has(head) ? 2.5 : null,
          "data-layer": shape.layer,
          "data-head": index,
          class: "head",
        }),
      );
      if (looped.has(index))
        nodes.push(
          ...loopNodes(start, size - gap, boxTop, Math.min(row - box - 4, 16), shape.loop[1], fading.has(index)),
        );
      if (looped.has(index) && size > 30 && row > 26 && fill.startsWith("#"))
        nodes.push(
          drawn(
            "text",
            {
              x: start + (size - gap) / 2,
              y: middle + 4,
              "text-anchor": "middle",
              style: `fill:${inkOn(fill)};pointer-events:none`,
            },
            `×${shape.loop[1]}`,
          ),
        );
    });
    if (shape.kv < shape.heads.length) {
      const group = (size * shape.heads.length) / shape.kv;
      for (let index = 0; index < shape.kv; index += 1)
        nodes.push(
          drawn("rect", {
            x: left + index * group,
            y: boxTop + box + 2,
            width: Math.max(1, group - gap),
            height: 3,
            fill: "var(--c2)",
          }),
        );
    }
    const end = left + shape.heads.length * size;
    if (shape.repeats)
      nodes.push(
        drawn("path", {
          d: `M${end} ${middle + box * 0.35}c13 3 13 ${-box * 0.7 - 3} 1 ${-box * 0.7}m5 -3.5l-5.5 3.5l5 4`,
          fill: "none",
          stroke: "var(--loop)",
          "stroke-width": 2,
        }),
      );
    const heads = `${shape.heads.length} × ${shape.dim}`;
    const again = shape.loop
      ? `loops ${loopedHeads(shape.loop[0])} ×${shape.loop[1]}`
      : shape.repeats
        ? `block again ×${shape.repeats}`
        : "";
    if (row >= 12) {
      nodes.push(drawn("text", { x, y: middle + 4, class: "strong" }, heads));
      if (!slim && again) nodes.push(drawn("text", { x: x + 62, y: middle + 4, style: "fill:var(--loop)" }, again));
    }
    return nodes;
  }

  // A head's way back to its own beginning: an arc for every further pass, at most three drawn.
  function loopNodes(start, size, top, rise, passes, fading) {
    const nodes = [],
      a = start + size * 0.18,
      b = start + size * 0.82,
      bend = size * 0.12;
    if (rise < 5)
      return [
        drawn("rect", { x: start + 1, y: top + 1, width: Math.max(1, size - 2), height: 4, fill: "var(--loop)" }),
      ];
    for (let pass = 0; pass < Math.min(3, passes); pass += 1) {
      const height = rise * (1 - pass * 0.3);
      nodes.push(
        drawn("path", {
          d: `M${b} ${top}C${b + bend} ${top - height * 1.3} ${a - bend} ${top - height * 1.3} ${a} ${top - 1}`,
          fill: "none",
          stroke: "var(--loop)",
          "stroke-width": 1.7,
          "stroke-dasharray": fading ? "2 2" : null,
          class: "loop",
        }),
      );
    }
    nodes.push(
      drawn("path", {
        d: `M${a - 3.4} ${top - 5.5}L${a + 0.4} ${top}L${a + 3.8} ${top - 5}`,
        fill: "none",
        stroke: "var(--loop)",
        "stroke-width": 1.7,
      }),
    );
    return nodes;
  }

  svg.addEventListener("pointermove", (event) => {
    const target = event.target.closest ? event.target.closest(".head") : null;
    if (!target) {
      tip.hidden = true;
      return;
    }
    const now = snapshotAt(step),
      layer = Number(target.dataset.layer),
      index = Number(target.dataset.head);
    const shape = structure.shapes[now.layers.find((place) => structure.shapes[place].layer === layer)];
    const lines = [
      `dim ${shape.dim}${shape.kv < shape.heads.length ? `, ${counted(shape.kv, "key/value head")} in the layer` : ""}`,
    ];
    for (const scale of Object.values(colours)) {
      if (scale.sizes) continue;
      const reading = scale.at(step),
        value = reading && reading.of(layer, shape.heads[index], shape);
      if (value !== null && value !== undefined)
        lines.push(`${scale.title.split(",")[0]} ${scale.text(value)} (step ${reading.step.toLocaleString("en-US")})`);
    }
    if (shape.loop && shape.loop[0].includes(index))
      lines.push(
        `run again in ${counted(shape.loop[1], "further pass", "es")}${shape.fading.includes(index) ? ", fading" : ""}`,
      );
    const since = structure.born[layer];
    if (since && since.step <= step)
      lines.push(
        `block since step ${since.step.toLocaleString("en-US")}`,
        ...(since.copy_of === null ? [] : [`a copy of layer ${since.copy_of}`]),
      );
    tip.replaceChildren(
      element("b", {}, `layer ${layer}, head ${index}`),
      ...lines.map((line) => element("div", {}, line)),
    );
    tip.hidden = false;
    const box = figure.getBoundingClientRect(),
      px = event.clientX - box.left;
    tip.style.left = px < box.width / 2 ? `${px + 14}px` : "";
    tip.style.right = px < box.width / 2 ? "" : `${box.width - px + 14}px`;
    tip.style.top = `${event.clientY - box.top + 14}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  drawnToWidth(figure, draw);
  return {
    element: figure,
    colours,
    snapshotAt,
    colour: () => colour,
    setColour(name) {
      colour = name;
      colouring = name;
      draw();
    },
    setStep(at) {
      step = at;
      if (figure.clientWidth) draw();
    },
  };
}
