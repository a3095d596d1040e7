"use strict";
const body = document.querySelector("#board tbody"), rows = [...body.rows];
const search = document.querySelector("#search"), count = document.querySelector("#count");
const boxes = [...document.querySelectorAll("#kinds input")];

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kinds = new Set(boxes.filter(box => box.checked).map(box => box.value));
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !kinds.has(row.dataset.kind) || !words.every(word => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length} rows`;
}

function sortBy(heading, index) {
  const isNumber = heading.classList.contains("number");
  const old = heading.getAttribute("aria-sort");
  const order = old === "none" ? (isNumber ? "descending" : "ascending") : old === "ascending" ? "descending" : "ascending";
  for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const value = row => row.cells[index].dataset.value;
  const compare = isNumber ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b));
  body.append(...rows.sort((a, b) => {
    const unknown = isNumber ? (value(a) < 0) - (value(b) < 0) : 0;
    return unknown || sign * compare(a, b);
  }));
}

document.querySelectorAll("#board thead th").forEach((heading, index) => {
  const button = heading.querySelector("button");
  if (button) button.addEventListener("click", () => sortBy(heading, index));
});
search.addEventListener("input", filter);
boxes.forEach(box => box.addEventListener("change", filter));
document.querySelector("#controls").hidden = false;
filter();
