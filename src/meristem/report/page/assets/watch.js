// A page that follows runs: it asks its server for what is new, and shows it without losing the reader's place.
"use strict";

const PATIENCE = 60000; // milliseconds for an answer
let redraw = null; // draws the page anew with other data
const PACE = { usual: 2000, ended: 10000, lost: 5000 }; // milliseconds between two questions
const WORDS = { finished: "good", "at work": "good", stopped: "still", waiting: "still", "not begun": "still" };

// Everything in the page that the reader may have opened, chosen or reached, with a name that lasts.
function stateful(selector) {
  const counts = new Map(),
    found = new Map();
  for (const node of document.querySelectorAll(selector)) {
    const place = `${node.closest("section")?.id} ${node.tagName} ${node.getAttribute("aria-label") ?? ""}`;
    counts.set(place, (counts.get(place) ?? 0) + 1);
    found.set(`${place} ${counts.get(place)}`, node);
  }
  return found;
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";
const nameOf = (nodes, node) => [...nodes].find(([, one]) => one === node)?.[0];

// Where the reader is; what it returns goes back there after the page was drawn anew.
function readersPlace() {
  const details = [...stateful("details")].map(([name, node]) => [name, node.open]);
  const boxes = [...stateful("input[type=checkbox]")].map(([name, node]) => [name, node.checked]);
  const picks = [...stateful("select[aria-label]")].map(([name, node]) => [name, node.value]);
  const tables = [...stateful(".scroll")].map(([name, node]) => [name, node.scrollLeft, "all" in node.dataset]);
  const focused = nameOf(stateful(FOCUSABLE), document.activeElement);
  const anchor = [...document.querySelectorAll("section[id]")].find((one) => one.getBoundingClientRect().bottom > 0);
  const offset = anchor && scrollY > 0 ? anchor.getBoundingClientRect().top : null;
  return () => {
    const opened = stateful("details"),
      checked = stateful("input[type=checkbox]"),
      picked = stateful("select[aria-label]"),
      scrolled = stateful(".scroll");
    for (const [name, open] of details) if (opened.has(name)) opened.get(name).open = open;
    for (const [name, value] of boxes)
      if (checked.has(name) && checked.get(name).checked !== value) checked.get(name).click();
    for (const [name, value] of picks) {
      const pick = picked.get(name);
      if (!pick || pick.value === value || ![...pick.options].some((option) => option.value === value)) continue;
      pick.value = value;
      pick.dispatchEvent(new Event("change"));
    }
    for (const [name, left, all] of tables) {
      const box = scrolled.get(name);
      if (box && all) box.parentElement.querySelector(":scope > button")?.click();
      if (box) box.scrollLeft = left;
    }
    if (focused) stateful(FOCUSABLE).get(focused)?.focus({ preventScroll: true });
    const now = anchor && document.getElementById(anchor.id);
    if (offset !== null && now) scrollBy({ top: now.getBoundingClientRect().top - offset, behavior: "instant" });
  };
}

function follow() {
  const said = element("ul", { class: "states" }),
    lost = element("p", { class: "note warn", hidden: true });
  const live = element("div", { class: "live" }, said, lost);
  redraw = build(live);
  let tag = page.tag,
    fresh = null, // data that are not shown yet
    ahead = 0, // milliseconds by which the server's clock is ahead
    since = null, // when the server was last heard of, if it does not answer
    busy = 0, // until when the reader is not to be disturbed
    pressed = false,
    timer = null;

  const ago = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds));
  function clock(seconds) {
    const whole = Math.round(seconds),
      [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const two = (part) => String(part).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
  }

  // The states are drawn anew when one changes; the age of the last line every second.
  function drawStates() {
    const states = (fresh || page).watch,
      runs = new Map((fresh || page).runs.map((run) => [run.path, run]));
    said.replaceChildren(
      ...states.map((state) => {
        const run = runs.get(state.path),
          parts = [];
        if (state.word === "at work" && run) {
          if (run.now.epoch !== null) parts.push(`epoch ${run.now.epoch.toFixed(2)}`);
          if (run.now.elapsed !== null) parts.push(`${clock(run.now.elapsed)} elapsed`);
          if (run.now.left !== null) parts.push(`${clock(run.now.left)} left`);
        }
        return element(
          "li",
          {},
          element("span", { class: `dot ${WORDS[state.word] || "bad"}${state.word === "at work" ? " moving" : ""}` }),
          states.length > 1 && state.word !== "waiting" ? element("b", {}, `${run?.name ?? state.path}: `) : null,
          element("span", { role: "status" }, state.text),
          parts.length ? element("span", { class: "times" }, parts.join(", ")) : null,
          state.written === null || state.word === "finished"
            ? null
            : element("span", { class: "age muted", "data-written": state.written }),
        );
      }),
    );
    const first = runs.get(states[0].path),
      share = first && states[0].word !== "finished" ? Math.floor((100 * first.last_step) / first.steps) : null;
    document.title = (share === null ? "" : `${share} % · `) + (fresh || page).title;
    drawAges();
  }
  function drawAges() {
    for (const age of said.querySelectorAll(".age"))
      age.textContent = `last line ${ago(Math.max(0, (Date.now() + ahead) / 1000 - Number(age.dataset.written)))} ago`;
    lost.hidden = since === null;
    if (since !== null)
      lost.textContent =
        "meristem watch does not answer: it has ended, or the way to it is cut. " +
        `This page shows what there was ${ago((Date.now() - since) / 1000)} ago, and goes on when it answers again.`;
  }

  // Not while a slider is being dragged, a text is marked, a list is open, or the pointer moves over a chart.
  function showFresh() {
    if (!fresh || pressed || Date.now() < busy || !document.getSelection().isCollapsed) return;
    const back = readersPlace();
    const data = fresh;
    fresh = null;
    redraw(data);
    back();
  }

  async function ask() {
    clearTimeout(timer);
    if (!document.hidden) {
      try {
        const answer = await fetch("data", {
          headers: { "If-None-Match": tag },
          cache: "no-store",
          signal: AbortSignal.timeout(PATIENCE),
        });
        if (answer.status === 200) {
          fresh = await answer.json();
          tag = answer.headers.get("ETag");
          drawStates();
        } else if (answer.status !== 304) throw new Error(`status ${answer.status}`);
        ahead = Date.parse(answer.headers.get("Date")) - Date.now() || 0;
        since = null;
      } catch (error) {
        since ??= Date.now();
      }
      drawAges();
      showFresh();
    }
    const ended = (fresh || page).watch.every((state) => state.word === "finished");
    timer = setTimeout(ask, since !== null ? PACE.lost : ended ? PACE.ended : PACE.usual);
  }

  const quiet = (milliseconds) => {
    busy = Math.max(busy, Date.now() + milliseconds);
  };
  addEventListener("pointerdown", (event) => {
    pressed = true;
    if (event.target.closest?.("select")) quiet(8000);
  });
  for (const name of ["pointerup", "pointercancel"])
    addEventListener(name, () => {
      pressed = false;
    });
  addEventListener("pointermove", (event) => {
    if (event.target.closest?.("figure")) quiet(1500);
  });
  addEventListener("keydown", () => quiet(800));
  addEventListener("scroll", () => quiet(300), { passive: true });
  document.addEventListener("visibilitychange", ask);
  setInterval(() => {
    if (document.hidden) return;
    drawAges();
    showFresh();
  }, 1000);
  drawStates();
  ask();
}

follow();
