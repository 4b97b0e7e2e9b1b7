// The sections of the page that are about one run.
"use strict";

function structureSection(run) {
  const { structure } = run,
    picture = structurePicture(run, colouring);
  const grows = structure.snapshots.length > 1,
    said = element("p", { class: "said", "aria-live": "polite" });
  const slider = element("input", {
    type: "range",
    min: 0,
    max: Math.max(1, run.last_step),
    value: run.last_step,
    step: Math.max(1, Math.round(run.last_step / 1000)),
    "aria-label": "step of the training",
    id: "time",
  });
  const strip = drawn("svg", { class: "strip", height: 12, width: "100%", "aria-hidden": "true" });
  const label = element("output", { for: "time", class: "mono" });
  const table = element("div");
  const stops = [...new Set(structure.snapshots.map((one) => one.step))];
  let current = run.last_step; // the slider of a long run does not stop at every step
  const back = element(
    "button",
    { type: "button", onclick: () => go([...stops].reverse().find((at) => at < current) ?? 0) },
    "◀ change before",
  );
  const next = element(
    "button",
    { type: "button", onclick: () => go(stops.find((at) => at > current) ?? run.last_step) },
    "next change ▶",
  );

  function go(step) {
    slider.value = step;
    show(step);
  }
  function show(step) {
    current = step;
    moment = step < run.last_step ? step : null;
    const now = picture.snapshotAt(step),
      row = now.row === null ? null : run.events[now.row];
    picture.setStep(step);
    label.textContent = `step ${step.toLocaleString("en-US")} of ${run.steps.toLocaleString("en-US")}`;
    slider.setAttribute("aria-valuetext", `step ${step}: ${now.text}`);
    const parts = [
      element("b", {}, now.text),
      grows ? (row ? ` — since step ${row.step.toLocaleString("en-US")}: ${row.text}` : " — as the run began") : "",
    ];
    if (!now.checked)
      parts.push(element("span", { class: "muted" }, " (put together from the log; it could not be checked)"));
    said.replaceChildren(...parts);
    charts.forEach((chart) => chart.setCursor(step < run.last_step ? step : null));
    document
      .querySelectorAll("tr[data-row]")
      .forEach((line) => line.classList.toggle("current", now.row !== null && line.dataset.row === String(now.row)));
    if (table.parentElement.open) table.replaceChildren(layerTable(now));
  }
  function layerTable(now) {
    const at = current,
      lines = now.layers.map((place) => structure.shapes[place]);
    const read = Object.values(picture.colours)
      .filter((scale) => !scale.sizes)
      .map((scale) => ({
        title: scale.title,
        of: (shape) => {
          const reading = scale.at(at);
          const values = reading
            ? shape.heads
                .map((head) => reading.of(shape.layer, head, shape))
                .filter((value) => value !== null && value !== undefined)
            : [];
          const texts = values.map((value) => compact(value, 3));
          return new Set(texts).size === 1 ? texts[0] : texts.join(", ");
        },
      }));
    return dataTable(
      [
        { title: "layer", number: true, of: (shape) => String(shape.layer) },
        { title: "heads × dim", number: true, of: (shape) => `${shape.heads.length} × ${shape.dim}` },
        { title: "key/value heads", number: true, of: (shape) => String(shape.kv) },
        {
          title: "run again",
          of: (shape) =>
            shape.loop
              ? `heads ${shape.loop[0].join(", ")} ×${shape.loop[1]}`
              : shape.repeats
                ? `the block ×${shape.repeats}`
                : "",
        },
        ...read,
      ],
      lines,
      { label: "layers at this step" },
    );
  }
  const details = element("details", { ontoggle: () => show(current) }, element("summary", {}, "As a table"), table);
  slider.addEventListener("input", () => {
    const at = Number(slider.value);
    show(at + Number(slider.step) > run.last_step ? run.last_step : at);
  });
  function ticks() {
    const width = strip.clientWidth || 600,
      inner = width - 18;
    strip.setAttribute("viewBox", `0 0 ${width} 12`);
    strip.replaceChildren(
      ...changes(run).map((row) =>
        drawn("line", {
          x1: 9 + (inner * row.step) / Math.max(1, run.last_step),
          x2: 9 + (inner * row.step) / Math.max(1, run.last_step),
          y1: 1,
          y2: 11,
          stroke: markColour(row),
          "stroke-width": 2.5,
        }),
      ),
    );
  }
  drawnToWidth(strip, ticks);
  const names = Object.entries(picture.colours).map(([key, scale]) => [key, scale.title.split(",")[0]]);
  const made = section(
    "structure",
    "Structure",
    element(
      "p",
      { class: "muted" },
      "A row for every layer, a box for every head, as wide as its dimension. ",
      grows
        ? "Move the slider to see what the model was at any step of the training."
        : `The structure has not changed ${run.status.word === "finished" ? "during the run" : "so far"}.`,
    ),
    element(
      "div",
      { class: "controls" },
      names.length > 1
        ? choices("colour", "Colour by", names, picture.colour(), (name) => picture.setColour(name))
        : null,
    ),
    grows
      ? element("div", { class: "time" }, strip, slider, element("div", { class: "controls" }, back, next, label))
      : null,
    said,
    picture.element,
    details,
  );
  const begin = () => {
    ticks();
    go(moment === null ? run.last_step : Math.min(moment, run.last_step));
  };
  return { element: made, go, begin };
}

function lossSection(run) {
  const { loss, curves } = run,
    unit = run.classifier ? "nats per row" : "nats per token";
  const whole = element("input", {
    type: "checkbox",
    onchange: () => chart.change({ range: whole.checked ? null : loss.range }),
  });
  const chart = timeChart(run, {
    title: `Loss, ${unit}`,
    height: 300,
    range: loss.range,
    legend: true,
    yText: (y) => compact(y, 5),
    series: [
      series("training, as logged", loss.raw, "var(--c0)", { width: 1, opacity: 0.32 }),
      series("training, smoothed", loss.smooth, "var(--c0)", { width: 2.2 }),
      series("held-out", loss.held_out, "var(--c1)", { width: 2, dots: true }),
      series("held-out, average of the weights", loss.average, "var(--c2)", { width: 2, dots: true }),
    ].filter((one) => one.x.length),
  });
  const small = [];
  if (curves.accuracy)
    small.push(
      timeChart(run, {
        title: "Held-out accuracy",
        height: 200,
        legend: Boolean(curves.macro_f1),
        series: [
          series("accuracy", curves.accuracy, "var(--c2)", { dots: true }),
          ...(curves.macro_f1 ? [series("macro-F1", curves.macro_f1, "var(--c3)", { dots: true })] : []),
        ],
      }),
    );
  if (curves.lr)
    small.push(
      timeChart(run, {
        title: "Learning rate",
        height: 200,
        zero: true,
        series: [series("rate", curves.lr, "var(--c3)")],
      }),
    );
  if (curves.gradient_norm)
    small.push(
      timeChart(run, {
        title: "Gradient norm, before clipping",
        height: 200,
        scale: "log",
        series: [series("norm", curves.gradient_norm, "var(--c5)", { width: 1.2 })],
      }),
    );
  return section(
    "loss",
    "Loss and learning rate",
    element(
      "div",
      { class: "controls" },
      element("span", { class: "axis-switch" }, axisSwitch([run], "axis-one")),
      loss.range ? element("label", {}, whole, " the first steps too") : null,
      markKey(run),
    ),
    chart.element,
    element(
      "div",
      { class: "grid" },
      small.map((one) => one.element),
    ),
  );
}

function markKey(run) {
  const kinds = new Map([
    ["--birth", "head born"],
    ["--removal", "head removed"],
    ["--loop", "loop"],
    ["--block", "blocks"],
  ]);
  const used = new Set(run.events.map((row) => MARK[row.action]).filter(Boolean));
  return element(
    "span",
    { class: "muted" },
    [...kinds]
      .filter(([name]) => used.has(name))
      .map(([name, text]) =>
        element(
          "span",
          { style: "margin-right:12px" },
          element("span", {
            class: "mark",
            style: `background:var(${name})`,
          }),
          text,
        ),
      ),
  );
}

function layerColour(layer, count) {
  return count <= 8
    ? runColour(layer)
    : `hsl(${Math.round(215 + (layer / Math.max(1, count - 1)) * 250) % 360} 62% var(--layer-light, 48%))`;
}

function gaugeSection(run) {
  const grew = changes(run).length > 0,
    nothing = run.status.word === "finished" ? "Why nothing grew" : "Why nothing has grown";
  const stories =
    run.stories.length === 1 && !run.stories[0].policy
      ? element("p", {}, run.stories[0].text)
      : element(
          "ul",
          { class: "stories" },
          run.stories.map((story) => element("li", {}, element("b", {}, story.policy), `: ${story.text}`)),
        );
  return section(
    "why",
    grew ? "Why it grew, and why no more" : nothing,
    stories,
    element(
      "div",
      { class: "grid gauges" },
      run.gauges.map((gauge) => gaugeChart(run, gauge)),
    ),
  );
}

function gaugeChart(run, gauge) {
  const count = Math.max(...gauge.layers.map((one) => one.layer)) + 1,
    own = gauge.layers.some((one) => one.thresholds);
  const name = (one) => one.name || `layer ${one.layer}`;
  const line = (one, more = {}) => series(name(one), one, layerColour(one.layer, count), { dash: one.dash, ...more });
  const limits = gauge.threshold
    ? [series(gauge.threshold.label, gauge.threshold, "var(--ink)", { dash: true, width: 1.4 })]
    : [];
  function spec(which) {
    if (which !== "all") {
      const one = gauge.layers[Number(which)];
      const limit = own
        ? [
            series("threshold", { steps: one.steps, values: one.thresholds }, "var(--ink)", {
              dash: true,
              width: 1.4,
              step: true,
            }),
          ]
        : limits;
      return {
        series: [line(one, { noise: one.noise, width: 2 }), ...limit],
        yText: (y) => compact(y, 3),
        legend: true,
      };
    }
    if (!own)
      return {
        series: [...gauge.layers.map((one) => line(one, { width: 1.5 })), ...limits],
        yText: (y) => compact(y, 3),
        legend: true,
      };
    const ratios = gauge.layers.map((one) =>
      series(
        name(one),
        {
          steps: one.steps,
          values: one.values.map((value, index) =>
            value === null || !one.thresholds[index] ? null : value / one.thresholds[index],
          ),
        },
        layerColour(one.layer, count),
        { width: 1.5 },
      ),
    );
    const ends = [gauge.layers[0].steps[0], run.last_step];
    return {
      series: [...ratios, { name: "threshold", x: ends, y: [1, 1], colour: "var(--ink)", dash: true, width: 1.4 }],
      yText: (y) => `${compact(y, 3)}×`,
      legend: true,
    };
  }
  const chart = timeChart(run, {
    title: gauge.title,
    note: gauge.note + (own ? " All layers together are shown as multiples of their thresholds." : ""),
    height: 250,
    scale: gauge.scale,
    decades: 1e4,
    ...spec("all"),
  });
  const pick = element(
    "select",
    { "aria-label": `layers of ${gauge.title}`, onchange: () => chart.change(spec(pick.value)) },
    element("option", { value: "all" }, "all layers"),
    gauge.layers.map((one, index) => element("option", { value: String(index) }, name(one))),
  );
  chart.element.querySelector(".controls")?.remove(); // of before
  if (gauge.layers.length > 1)
    chart.element.insertBefore(
      element("div", { class: "controls no-print" }, pick),
      chart.element.querySelector(".legend"),
    );
  return chart.element;
}

function eventSection(run, go) {
  const growth = run.events.length
    ? dataTable(
        [
          {
            title: "step",
            number: true,
            short: true,
            of: (row) =>
              element(
                "button",
                {
                  type: "button",
                  class: "plain",
                  title: "show the structure after it",
                  onclick: () => {
                    go(row.step);
                    document.getElementById("structure").scrollIntoView({ block: "nearest" });
                  },
                },
                number(row.step),
              ),
          },
          { title: "policy", short: true, of: (row) => row.policy },
          {
            title: "what",
            short: true,
            of: (row) =>
              element(
                "span",
                {},
                element("span", {
                  class: "dot",
                  style: `background:${markColour(row)}`,
                }),
                row.what,
              ),
          },
          { title: "layer", number: true, short: true, of: (row) => row.layer_name },
          { title: "head", short: true, of: (row) => row.head },
          { title: "reading", of: (row) => row.reading },
          { title: "threshold", of: (row) => row.threshold },
          { title: "rule", of: (row) => row.rule },
        ],
        run.events,
        { label: "events of growth", cards: true, rowName: (row, index) => index },
      )
    : element("p", {}, "Nothing was decided about the structure.");
  return section(
    "events",
    "Events",
    growth,
    element("h3", { style: "margin-top:14px" }, "The run itself"),
    run.lifetime.length
      ? dataTable(
          [
            { title: "step", number: true, of: (row) => number(row.step) },
            { title: "what happened", of: (row) => row.text },
          ],
          run.lifetime,
          { label: "events of the run" },
        )
      : element("p", {}, "Nothing yet."),
  );
}

function costSection(run) {
  const { costs, uniform, curves } = run;
  const titles = {
    parameters: "Parameters",
    flops: "FLOPs per token (forward, causal)",
    kv_bytes: "KV cache, bytes per token",
  };
  const made = Object.entries(titles)
    .filter(([key]) => key !== "kv_bytes" || !run.classifier)
    .map(([key, title]) => {
      const now = costs[key].at(-1),
        share = uniform && uniform[key] ? now / uniform[key] : null;
      const note =
        share === null
          ? ""
          : `Now ${number(now)}, ${share === 1 ? "exactly" : `${compact(share, 4)} times`} that of the uniform model.`;
      return timeChart(run, {
        title,
        note,
        height: 190,
        zero: true,
        legend: true,
        series: [
          series("this model", { steps: costs.steps, values: costs[key] }, "var(--c0)", {
            step: true,
            until: run.last_step,
            width: 2.2,
          }),
          ...(uniform
            ? [
                {
                  name: "uniform model",
                  x: [0, run.last_step],
                  y: [uniform[key], uniform[key]],
                  colour: "var(--ink)",
                  dash: true,
                  width: 1.4,
                },
              ]
            : []),
        ],
      });
    });
  if (curves.tokens_per_second)
    made.push(
      timeChart(run, {
        title: "Tokens per second, of training steps",
        note: "As measured; a uniform model was not trained beside it.",
        height: 190,
        zero: true,
        series: [series("tokens/s", curves.tokens_per_second, "var(--c2)")],
      }),
    );
  return section(
    "cost",
    "Cost over time",
    uniform
      ? element(
          "p",
          { class: "muted" },
          "The uniform model is as wide and as deep as this one at its end, with the same heads everywhere ",
          `(${uniform.text}), and runs nothing again.`,
        )
      : null,
    element(
      "div",
      { class: "grid" },
      made.map((one) => one.element),
    ),
  );
}

function evaluationSection(run) {
  const { evaluation } = run;
  if (!evaluation)
    return section(
      "evaluation",
      run.classifier ? "Evaluation" : "Attention distance and evaluation",
      element(
        "p",
        {},
        "Not measured yet: ",
        element("code", {}, `meristem eval ${run.path}`),
        run.classifier ? " scores every class." : " measures how far every layer looks; then make this page again.",
      ),
    );
  const parts = [
    element("p", { class: "muted" }, `By meristem eval at step ${number(evaluation.step)}.`),
    evaluation.facts.length ? facts(evaluation.facts) : null,
  ];
  if (evaluation.distance) {
    const { layers, values, even } = evaluation.distance,
      high = Math.max(even, ...values.filter((value) => value !== null)) || 1;
    const rows = layers.map((layer, index) => ({ layer, value: values[index] }));
    parts.push(
      element("h3", { style: "margin-top:14px" }, "How far each layer looks back"),
      element(
        "p",
        { class: "muted" },
        "Mean attention distance in tokens. ",
        `Attention spread evenly over the past would be at ${compact(even, 3)} (the line).`,
      ),
      dataTable(
        [
          { title: "layer", number: true, of: (row) => String(row.layer) },
          { title: "tokens", number: true, of: (row) => compact(row.value, 3) },
          { title: "", of: (row) => distanceBar(row.value, even, high) },
        ],
        rows,
        { label: "attention distance of every layer" },
      ),
    );
  }
  if (evaluation.classes)
    parts.push(
      element("h3", { style: "margin-top:14px" }, "Classes"),
      dataTable(
        [
          { title: "class", of: (row) => row.label },
          { title: "rows", number: true, of: (row) => number(row.support) },
          ...["precision", "recall", "f1"].map((key) => ({
            title: key === "f1" ? "F1" : key,
            number: true,
            of: (row) => (typeof row[key] === "number" ? row[key].toFixed(4) : "–"),
          })),
        ],
        evaluation.classes,
        { label: "scores of every class" },
      ),
      evaluation.more_classes
        ? element("p", { class: "muted" }, `and ${counted(evaluation.more_classes, "smaller class", "es")}`)
        : null,
    );
  return section("evaluation", run.classifier ? "Evaluation" : "Attention distance and evaluation", ...parts);
}

function distanceBar(value, even, high) {
  const svg = drawn("svg", {
    viewBox: "0 0 300 14",
    width: 300,
    height: 14,
    "aria-hidden": "true",
    style: "max-width:40vw",
  });
  if (value !== null)
    svg.append(
      drawn("rect", { x: 0, y: 2, width: Math.max(1, (value / high) * 296), height: 10, rx: 2, fill: "var(--c3)" }),
    );
  svg.append(
    drawn("line", {
      x1: (even / high) * 296,
      x2: (even / high) * 296,
      y1: 0,
      y2: 14,
      stroke: "var(--ink)",
      "stroke-dasharray": "3 2",
    }),
  );
  return svg;
}

function settingsSection(run) {
  const differs = run.settings.filter((row) => row.differs),
    columns = [
      { title: "setting", code: true, of: (row) => row.key },
      { title: "value", code: true, short: true, of: (row) => row.value },
      { title: "default", code: true, short: true, of: (row) => row.default },
    ];
  const command = element("pre", { tabindex: 0 }, run.origin.command);
  const copy = navigator.clipboard
    ? element(
        "button",
        {
          type: "button",
          class: "no-print",
          onclick: () =>
            navigator.clipboard.writeText(run.origin.command).then(
              () => {
                copy.textContent = "Copied";
              },
              () => {
                copy.textContent = "Could not copy";
              },
            ),
        },
        "Copy the command",
      )
    : null;
  return section(
    "settings",
    "Configuration, and how to repeat the run",
    element(
      "p",
      {},
      "From the folder in which the run was begun, with the same data, this trains the same model again:",
    ),
    command,
    copy,
    run.origin.facts.length
      ? element("p", { class: "muted path" }, run.origin.facts.map((fact) => `${fact.label} ${fact.value}`).join("; "))
      : null,
    element("h3", { style: "margin-top:14px" }, `What differs from the defaults (${differs.length})`),
    differs.length
      ? dataTable(columns, differs, { label: "settings that differ from their defaults", cards: true })
      : element("p", {}, "Nothing."),
    element(
      "details",
      {},
      element("summary", {}, `All ${counted(run.settings.length, "setting")}`),
      dataTable(columns, run.settings, { label: "all settings", cards: true }),
    ),
  );
}
