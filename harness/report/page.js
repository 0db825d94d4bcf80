"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const controls = { view: byId("view"), loss: byId("loss"), goal: byId("goal"), limit: byId("limit") };

// colours in the figures are CSS variables: the theme decides when they are drawn
function themed(node, style) {
  if (typeof node === "string" && node.startsWith("var(--")) return style.getPropertyValue(node.slice(4, -1)).trim();
  if (Array.isArray(node)) return node.map((item) => themed(item, style));
  if (node && typeof node === "object") return Object.fromEntries(Object.entries(node).map(([key, item]) => [key, themed(item, style)]));
  return node;
}

function draw(name, figure) {
  const box = byId("chart-" + name);
  const plot = box.querySelector(".plot");
  box.querySelector(".none").hidden = Boolean(figure);
  plot.hidden = !figure;
  if (!figure) return Plotly.purge(plot);
  const { data: traces, layout } = themed(figure, getComputedStyle(document.documentElement));
  plot.style.height = plot.style.minHeight = (layout.height || 340) + "px";
  // without drag a finger on a chart scrolls the page
  Plotly.newPlot(plot, traces, { ...layout, dragmode: false, autosize: true }, { responsive: true, displayModeBar: false });
}

function drawAll() {
  const view = data.views[controls.view.value];
  for (const [name, figure] of Object.entries(view.charts)) draw(name, figure);
  for (const [name, figure] of Object.entries(data.charts)) draw(name, figure);
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function list(lines) {
  const made = element("ul", "");
  made.append(...lines.map((line) => element("li", line)));
  return made;
}

function showAdvice() {
  const view = data.views[controls.view.value];
  const wanted = Math.max(0, Number(controls.loss.value) || 0);
  const steps = view.advice[controls.goal.value][controls.limit.value];
  const [, found] = steps.filter(([loss]) => loss <= wanted).at(-1);
  const advice = view.texts[found];
  const parts = [element("p", advice.headline, "verdict " + advice.verdict)];
  if (advice.command) {
    const line = element("pre", "");
    line.append(element("code", advice.command));
    parts.push(line, copyButton(advice.command));
  }
  parts.push(list(advice.reasons.map((place) => view.lines[place])));
  if (advice.refused.length) {
    const more = element("details", "");
    more.append(element("summary", "Not taken: " + advice.refused.length), list(advice.refused.map((place) => view.lines[place])));
    parts.push(more);
  }
  byId("advice").replaceChildren(...parts);
  // what was asked, for paper, where the controls are not shown
  const chosen = (select) => select.selectedOptions[0].textContent;
  byId("chosen").textContent = [chosen(controls.view), wanted + " points", chosen(controls.goal), chosen(controls.limit)].join("; ");
}

function copyButton(command) {
  const button = element("button", "copy", "copy");
  button.type = "button";
  button.dataset.copy = command;
  button.setAttribute("aria-label", "copy the override line");
  return button;
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
  } catch {
    // no clipboard access in this browser or page: the older way
    const area = element("textarea", "");
    area.value = button.dataset.copy;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

const rows = [...document.querySelectorAll("tbody tr")];
const filters = [...document.querySelectorAll("[data-filter]")];

function filterRows() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const fits = words.every((word) => text.includes(word)) && filters.every((filter) => {
      const value = row.getAttribute("data-" + filter.dataset.filter.replaceAll("_", "-"));
      return !filter.value || (filter.dataset.filter === "flag" ? value.split(" ").includes(filter.value) : value === filter.value);
    });
    row.hidden = !fits;
    shown += fits;
  }
  byId("count").textContent = shown + " of " + rows.length + " rows";
}

function sortRows(button) {
  const head = button.closest("th");
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of document.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const place = Number(button.dataset.sort);
  const value = (row) => row.children[place].dataset.v;
  const sorted = [...rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    // unknown values stay at the end in both directions
    if (!a || !b) return (a ? 0 : 1) - (b ? 0 : 1);
    const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    return up ? order : -order;
  });
  document.querySelector("tbody").append(...sorted);
}

controls.view.addEventListener("change", () => { drawAll(); showAdvice(); });
for (const name of ["loss", "goal", "limit"]) controls[name].addEventListener("input", showAdvice);
byId("search").addEventListener("input", filterRows);
for (const filter of filters) filter.addEventListener("change", filterRows);
byId("clear").addEventListener("click", () => {
  byId("search").value = "";
  for (const filter of filters) filter.value = "";
  filterRows();
});
document.addEventListener("click", (event) => {
  if (event.target.matches("[data-copy]")) copy(event.target);
  if (event.target.matches("[data-sort]")) sortRows(event.target);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
// paper is white
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; drawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; drawAll(); });
drawAll();
showAdvice();
filterRows();
