// Draws the figures in the page's colours, changes ranks, sorts tables. Figures and captions come from the element #figures.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
// Buttons are named one by one: plotly's own choice has one that would send the figure to its makers.
const config = {
  responsive: true,
  displaylogo: false,
  showSendToCloud: false,
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
};
const PRINTED_WIDTH = 680; // of a page of A4 or Letter, in CSS pixels

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function inColoursOfThePage(layout) {
  const axis = { gridcolor: colour("--line"), linecolor: colour("--faint"), tickcolor: colour("--faint") };
  return {
    ...layout,
    font: { ...layout.font, color: colour("--ink"), family: getComputedStyle(document.body).fontFamily },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
    hoverlabel: {
      ...layout.hoverlabel,
      bgcolor: colour("--hover"),
      bordercolor: colour("--faint"),
      font: { ...layout.hoverlabel.font, color: colour("--ink") },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--ink") },
  };
}

// A figure in a place that has one already keeps what the reader zoomed to.
function draw(place, name) {
  const { figure, caption } = figures[name];
  place.dataset.figure = name;
  const note = document.getElementById(place.id + "-caption");
  if (note) note.textContent = caption;
  return Plotly.react(place, figure.data, inColoursOfThePage(figure.layout), { ...config, displayModeBar: figure.layout.dragmode === "zoom" });
}

const places = [...document.querySelectorAll(".figure")];
const drawAll = () => Promise.all(places.map((place) => draw(place, place.dataset.figure)));

for (const select of document.querySelectorAll("select[data-figure-of]")) {
  select.addEventListener("change", () => draw(document.getElementById(select.dataset.figureOf), select.value));
}

function sort(table, column, descending) {
  const body = table.tBodies[0];
  const value = (row) => row.cells[column].dataset.value;
  const compare = (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined); // unknown: at the end
    const numbers = Number(a) - Number(b);
    return (Number.isNaN(numbers) ? a.localeCompare(b) : numbers) * (descending ? -1 : 1);
  };
  body.append(...[...body.rows].sort(compare));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    head.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(table, head.cellIndex, descending);
    });
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("beforeprint", () => places.forEach((place) => Plotly.relayout(place, { width: PRINTED_WIDTH })));
addEventListener("afterprint", () => places.forEach((place) => Plotly.relayout(place, { width: null, autosize: true })));
drawAll().then(() => document.documentElement.setAttribute("data-drawn", places.length));
