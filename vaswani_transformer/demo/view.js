// Show the search up to the step of the slider: its parts are blue while they belong to a target, and gray afterwards.
const find = (selector) => element.querySelector(selector);

function show() {
  if (!find("svg")) return;
  const step = Number(find("[type=range]").value);
  for (const part of element.querySelectorAll("[data-step]")) {
    part.setAttribute("display", Number(part.dataset.step) <= step ? "inline" : "none");
    part.setAttribute("color", Number(part.dataset.last) >= step ? props.blue : props.gray);
  }
  for (const numbers of element.querySelectorAll(".numbers")) {
    numbers.setAttribute("display", find("[type=checkbox]").checked ? "inline" : "none");
  }
  find("output").textContent = JSON.parse(find("output").dataset.texts)[step - 1];
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
watch("value", show);
