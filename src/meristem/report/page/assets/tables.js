// Tables that can be reached and scrolled by keyboard.
"use strict";

// columns: [{ title, of(row), number?, code?, short?: beside others on a phone }]; a cell is text or an element.
function dataTable(
  columns,
  rows,
  { caption = "", label = caption, cards = false, wrap = false, most = 200, rowName = null } = {},
) {
  const body = element("tbody");
  const made = (row, index) => {
    const line = element("tr", rowName ? { "data-row": rowName(row, index) } : {});
    for (const column of columns) {
      const content = column.of(row, index);
      const kind = `${column.number ? "number" : column.code ? "code" : ""}${column.short ? " short" : ""}`;
      const cell = element("td", { class: kind, "data-label": column.title });
      if (content !== null && content !== undefined && content !== "") cell.append(content);
      line.append(cell);
    }
    return line;
  };
  rows.slice(0, most).forEach((row, index) => body.append(made(row, index)));
  const table = element(
    "table",
    { class: `${cards ? "cards" : ""}${wrap ? " wrap" : ""}` },
    caption ? element("caption", {}, caption) : null,
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        columns.map((column) => element("th", { scope: "col", class: column.number ? "number" : "" }, column.title)),
      ),
    ),
    body,
  );
  const box = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label || "table" }, table);
  if (rows.length > most) {
    const all = element(
      "button",
      {
        type: "button",
        onclick: () => {
          rows.slice(most).forEach((row, index) => body.append(made(row, most + index)));
          all.remove();
          box.dataset.all = "";
        },
      },
      `Show all ${rows.length.toLocaleString("en-US")} rows`,
    );
    return element("div", {}, box, all);
  }
  return box;
}
