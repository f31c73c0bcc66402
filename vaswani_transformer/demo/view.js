// Show the search up to the step of the slider: its parts are blue while they belong to a target, and gray afterwards.
const find = (selector) => element.querySelector(selector);
const CLOSE = 28; // pixels from row to row of a beam tree without scores

function show() {
  const step = Number(find("[type=range]").value);
  for (const part of element.querySelectorAll("[data-step]")) {
    part.setAttribute("display", Number(part.dataset.step) <= step ? "inline" : "none");
    part.setAttribute("color", Number(part.dataset.last) >= step ? props.blue : props.gray);
  }
  const hasScores = find("[type=checkbox]").checked;
  for (const numbers of element.querySelectorAll(".numbers")) numbers.setAttribute("display", hasScores ? "inline" : "none");
  if (find(".numbers")) setRowHeight(hasScores ? props.row : CLOSE);
  find("output").textContent = JSON.parse(find("output").dataset.texts)[step - 1];
}

// Move the words and lines of a beam tree, whose rows are `props.row` pixels high as drawn.
function setRowHeight(row) {
  const svg = find("svg"), before = Number(svg.dataset.row ?? props.row);
  const move = (y) => Number(y) + (row - before) * Math.floor(y / before);
  for (const word of svg.querySelectorAll("[data-step] > text")) word.setAttribute("y", move(word.getAttribute("y")));
  for (const line of svg.querySelectorAll("[data-step] > path")) {
    line.setAttribute("d", line.getAttribute("d").replace(/ ([\d.]+)/g, (_, y) => ` ${move(y)}`));
  }
  const height = (svg.getAttribute("height") * row) / before;
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${height}`);
  svg.dataset.row = row;
}

// The newest step stays in view where the drawing is wider than its box.
function follow() {
  const box = find(".drawing"), newest = [...box.querySelectorAll("[display=inline][data-step]")].at(-1);
  box.scrollLeft += newest.getBoundingClientRect().right - box.getBoundingClientRect().right + 24;
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([find("svg").outerHTML], { type: "image/svg+xml" }));
  link.download = "search.svg";
  link.click();
  URL.revokeObjectURL(link.href);
}

element.addEventListener("input", (event) => {
  show();
  if (event.target.type === "range") follow();
});
element.addEventListener("click", (event) => event.target.type === "button" && save());
watch("value", () => {
  if (!find("svg")) return; // a note instead of a search
  show();
  follow();
});
