/**
 * The view of attention weights: lines between words, heat maps, and all layers at once.
 *
 * Its data are {stacks, colors, isAutoregressive}: for each stack its words, and its weights in thousandths, (layer, head,
 * query, key) in one array; a color for each head.
 */
import { byId, element } from "./dom.js";

const THOUSAND = 1000;
const FAINTEST = { all: 40, one: 10 }; // thousandths: fainter lines, of all words or of one, are not drawn
const FAINT = 0.05; // a word without a larger weight is muted while another is active
const SHADES = 25; // lines of one head and one shade share a path, so that long sentences stay fast
const CROSS = {
  name: "Cross",
  query: "to predict", key: "attends to source word",
  legend: "To predict each word on the left, the decoder attends to the source words. ",
};
const ENCODER = {
  name: "Encoder",
  query: "source word", key: "attends to source word",
  legend: "Each source word, on the left, attends to all source words. ",
};
const DECODER = {
  name: "Decoder",
  query: "to predict", key: "attends to target word",
  legend: "To predict each word on the left, the decoder attends to the target so far, its start token first. ",
};
const WHOLE_DECODER = { // of a non-autoregressive model
  ...DECODER,
  key: "attends to target position",
  legend: "To predict each word on the left, the decoder attends to all positions of the target, here in its last pass. ",
};
const VIEWS = { lines: "Lines", heat: "Heat maps", all: "All layers" };
const LEGENDS = {
  lines: "Each color is a head; the stronger a line, the larger its attention weight. ",
  heat: "Each color is a head; each row attends to the columns; the stronger a cell, the larger its attention weight. ",
  all: "Each row of a heat map attends to its columns; the stronger a cell, the larger its attention weight. ",
};
const HINTS = matchMedia("(hover: none)").matches ? {
  lines: "Tap a word to see only its lines, and a head to hide it.",
  heat: "Tap a cell for its weight, and a head to hide it.",
  all: "Tap a heat map to see its lines.",
} : {
  lines: "Point at a word to see only its lines, click it to keep them; double-click a head to see only that head.",
  heat: "Point at a cell for its weight; double-click a head to see only that head.",
  all: "Click a heat map to see its lines.",
};
let stacks, colors, wording;
let hasAddress = false;
const state = { stack: "cross", view: "lines", layer: 1, heads: new Set(), pinned: null, pointed: null };

const shown = () => stacks[state.stack];

function weight(layer, head, query, key) {
  const { heads, queries, keys, weights } = shown();
  return weights[(((layer - 1) * heads + head - 1) * queries.length + query) * keys.length + key];
}

const selectedHeads = () => [...state.heads].sort((one, other) => one - other);

// The address holds the state: #cross-2&view=heat&heads=1.3&query=4
function readAddress() {
  const [stackAndLayer, ...rest] = location.hash.slice(1).split("&");
  const [stack, layer] = stackAndLayer.split("-");
  const options = new URLSearchParams(rest.join("&"));
  const isKnown = Object.hasOwn(stacks, stack);
  state.stack = isKnown ? stack : "cross";
  const { layers, heads, queries, keys } = shown();
  state.layer = (isKnown ? between(layer, 1, layers) : null) ?? layers;
  state.view = Object.hasOwn(VIEWS, options.get("view")) ? options.get("view") : "lines";
  const asked = (options.get("heads") ?? "").split(".").map((head) => between(head, 1, heads)).filter((head) => head !== null);
  state.heads = new Set(asked.length ? asked : everyHead());
  const query = between(options.get("query"), 1, queries.length), key = between(options.get("key"), 1, keys.length);
  state.pinned = query !== null ? { side: "query", index: query - 1 } : key !== null ? { side: "key", index: key - 1 } : null;
}

function between(text, least, most) {
  const number = Number(text ?? NaN);
  return Number.isInteger(number) && number >= least && number <= most ? number : null;
}

function writeAddress() {
  if (!hasAddress) return;
  let address = `#${state.stack}-${state.layer}`;
  if (state.view !== "lines") address += `&view=${state.view}`;
  if (state.heads.size < shown().heads) address += `&heads=${selectedHeads().join(".")}`;
  if (state.pinned) address += `&${state.pinned.side}=${state.pinned.index + 1}`;
  try {
    history.replaceState(null, "", address);
  } catch {
    // A page inside another one may not have an address; all else works.
  }
}

const everyHead = () => Array.from({ length: shown().heads }, (_, index) => index + 1);

function change(changes) {
  Object.assign(state, changes);
  if (state.layer > shown().layers) state.layer = shown().layers;
  if (changes.stack) Object.assign(state, { pinned: null, heads: new Set(selectedHeads().filter((head) => head <= shown().heads)) });
  if (!state.heads.size) state.heads = new Set(everyHead());
  state.pointed = null;
  writeAddress();
  draw();
}

function choice(group, kind, value, text, isChecked, onchange, color) {
  const input = element("input", { type: kind, name: group, value, onchange });
  input.checked = isChecked;
  return element("label", color ? { color } : {}, input, element("span", {}, text));
}

// Controls keep the keyboard's focus: they are created again only if their number changes.
function fill(container, kind, entries, isChecked, onchange) {
  const signature = entries.map(([value]) => value).join(" ");
  if (container.dataset.holds !== signature) {
    container.dataset.holds = signature;
    container.replaceChildren(...entries.map(([value, text, color]) =>
      choice(container.id, kind, value, text, false, (event) => onchange(value, event.target.checked), color)));
  }
  container.querySelectorAll("input").forEach((input, index) => { input.checked = isChecked(entries[index][0]); });
}

function drawControls() {
  fill(byId("stacks"), "radio", Object.keys(stacks).map((stack) => [stack, wording[stack].name]),
    (stack) => stack === state.stack, (stack) => change({ stack }));
  fill(byId("views"), "radio", Object.entries(VIEWS), (view) => view === state.view, (view) => change({ view }));
  fill(byId("layers"), "radio", Array.from({ length: shown().layers }, (_, index) => [index + 1, `${index + 1}`]),
    (layer) => layer === state.layer, (layer) => change({ layer }));
  fill(byId("heads"), "checkbox", everyHead().map((head) => [head, `${head}`, colors[head - 1]]),
    (head) => state.heads.has(head), toggleHead);
  byId("heads").querySelectorAll("label").forEach((label, index) => {
    label.title = "double-click: only this head";
    label.ondblclick = () => change({ heads: new Set([index + 1]) });
  });
  byId("layer-field").hidden = byId("head-field").hidden = state.view === "all";
}

function toggleHead(head, isOn) {
  const heads = new Set(state.heads);
  if (isOn) heads.add(head);
  else heads.delete(head);
  change({ heads });
}

const active = () => state.pointed ?? state.pinned;
const wordsOf = (side) => (side === "query" ? shown().queries : shown().keys);

// Pairs [query, key] to be joined: all of them, or those of one word.
function* pairs() {
  const { queries, keys } = shown(), only = active();
  for (let query = 0; query < queries.length; query++) {
    if (only?.side === "query" && only.index !== query) continue;
    for (let key = 0; key < keys.length; key++) {
      if (only?.side !== "key" || only.index === key) yield [query, key];
    }
  }
}

function drawLines() {
  const heads = selectedHeads(), paths = new Map(), faintest = active() ? FAINTEST.one : FAINTEST.all;
  const gap = Math.min(0.09, 0.55 / heads.length); // rows between the lines of neighbouring heads
  for (const [query, key] of pairs()) {
    heads.forEach((head, rank) => {
      const value = weight(state.layer, head, query, key);
      if (value < faintest) return;
      const shade = Math.ceil(value * SHADES / THOUSAND);
      const middle = 0.5 + (rank - (heads.length - 1) / 2) * gap;
      const style = `${shade} ${head}`;
      const line = `M0 ${(query + middle).toFixed(3)}L100 ${(key + middle).toFixed(3)}`;
      paths.set(style, (paths.get(style) ?? "") + line);
    });
  }
  const strongestLast = [...paths].sort(([one], [other]) => parseInt(one) - parseInt(other));
  byId("lines").replaceChildren(...strongestLast.map(([style, d]) => {
    const [shade, head] = style.split(" ").map(Number);
    const path = document.createElementNS(byId("lines").namespaceURI, "path");
    path.setAttribute("d", d);
    path.setAttribute("stroke", colors[head - 1]);
    path.setAttribute("stroke-opacity", shade / SHADES);
    return path;
  }));
}

// How strongly a word is joined to the active one, head by head, as a strip of colors next to it.
function drawStrips() {
  const only = active();
  for (const word of document.querySelectorAll(".word")) {
    const { side } = word.dataset, index = Number(word.dataset.index);
    const isActive = only?.side === side && only.index === index;
    word.classList.toggle("is-active", isActive);
    word.setAttribute("aria-pressed", state.pinned?.side === side && state.pinned.index === index);
    const [query, key] = side === "key" ? [only?.index, index] : [index, only?.index];
    const isJoined = only && only.side !== side;
    const shares = selectedHeads().map((head) => (isJoined ? weight(state.layer, head, query, key) / THOUSAND : 0));
    [...word.querySelector(".strip").children].forEach((cell, rank) => { cell.style.opacity = shares[rank]; });
    word.classList.toggle("is-faint", Boolean(only) && !isActive && Math.max(...shares) < FAINT);
  }
}

function quoted(word) {
  return element("b", {}, element("bdi", {}, word));
}

function setStatus(...parts) {
  byId("attention-status").replaceChildren(...parts);
}

function describeActive() {
  const only = active();
  if (!only) return setStatus(HINTS.lines);
  const other = only.side === "query" ? "key" : "query", heads = selectedHeads();
  const means = wordsOf(other).map((word, index) => {
    const [query, key] = only.side === "query" ? [only.index, index] : [index, only.index];
    const sum = heads.reduce((total, head) => total + weight(state.layer, head, query, key), 0);
    return { word, mean: sum / heads.length / THOUSAND };
  });
  const strongest = means.filter(({ mean }) => mean >= 0.01).sort((one, two) => two.mean - one.mean).slice(0, 5);
  const listed = strongest.flatMap(({ word, mean }, index) => [index ? ", " : "", quoted(word), ` ${Math.round(mean * 100)}%`]);
  const verb = only.side === "query" ? " attends to " : " is attended to by ";
  const which = heads.length === 1 ? ` (head ${heads[0]})` : ` (mean of ${heads.length} heads)`;
  return setStatus(quoted(wordsOf(only.side)[only.index]), verb, ...(listed.length ? listed : ["no word with 1% or more"]), which);
}

function drawActive() {
  drawLines();
  drawStrips();
  describeActive();
}

function point(pointed) {
  state.pointed = pointed;
  drawActive();
}

function pin(side, index) {
  const isPinned = state.pinned?.side === side && state.pinned.index === index;
  state.pinned = isPinned ? null : { side, index };
  if (isPinned) state.pointed = null;
  writeAddress();
  drawActive();
}

function wordButton(side, text, index) {
  const here = { side, index };
  return element("button", {
    class: "word", type: "button", "data-side": side, "data-index": index, tabindex: index ? -1 : 0, title: text,
    onpointerenter: (event) => event.pointerType === "mouse" && point(here),
    onpointerleave: (event) => event.pointerType === "mouse" && point(null),
    onfocus: (event) => event.target.matches(":focus-visible") && point(here),
    onblur: () => point(null),
    onclick: () => pin(side, index),
    onkeydown: moveBetweenWords,
  }, element("bdi", {}, text), element("span", { class: "strip" }, ...selectedHeads().map((head) =>
    element("i", { color: colors[head - 1] }))));
}

// One stop of the tab key per column; arrows, Home and End move from there, and Escape releases a kept word.
function moveBetweenWords(event) {
  const { side } = event.currentTarget.dataset, index = Number(event.currentTarget.dataset.index);
  const last = wordsOf(side).length - 1;
  const targets = {
    ArrowDown: [side, Math.min(index + 1, last)], ArrowUp: [side, Math.max(index - 1, 0)],
    Home: [side, 0], End: [side, last], ArrowLeft: ["query", index], ArrowRight: ["key", index],
  };
  if (event.key === "Escape" && state.pinned) pin(state.pinned.side, state.pinned.index);
  if (!targets[event.key]) return;
  event.preventDefault();
  const [column, row] = targets[event.key];
  const words = document.querySelectorAll(`.word[data-side="${column}"]`);
  const next = words[Math.min(row, words.length - 1)];
  words.forEach((word) => { word.tabIndex = word === next ? 0 : -1; });
  next.focus();
}

function drawColumns() {
  const { queries, keys } = shown(), rows = Math.max(queries.length, keys.length);
  byId("query-title").textContent = wording[state.stack].query;
  byId("key-title").textContent = wording[state.stack].key;
  for (const [list, side] of [["queries", "query"], ["keys", "key"]]) {
    byId(list).replaceChildren(...wordsOf(side).map((word, index) => element("li", {}, wordButton(side, word, index))));
  }
  const lines = byId("lines");
  lines.setAttribute("viewBox", `0 0 100 ${rows}`);
  lines.style.height = `calc(${rows} * var(--row))`;
  drawActive();
}

// A canvas of one pixel per weight, in the head's color, as opaque as the weight is large.
function heatCanvas(layer, head, width, height) {
  const { queries, keys } = shown();
  const canvas = element("canvas", { width: keys.length, height: queries.length });
  const context = canvas.getContext("2d"), image = context.createImageData(keys.length, queries.length);
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(colors[head - 1].slice(start, start + 2), 16));
  for (let cell = 0; cell < queries.length * keys.length; cell++) {
    const value = weight(layer, head, Math.floor(cell / keys.length), cell % keys.length);
    image.data.set([red, green, blue, Math.round(value * 255 / THOUSAND)], 4 * cell);
  }
  context.putImageData(image, 0, 0);
  canvas.style.width = width;
  canvas.style.height = height;
  return canvas;
}

function heatMap(head) {
  const { queries, keys } = shown();
  const across = element("ol", { class: "across", "aria-hidden": true }, ...keys.map((word) => element("li", {}, word)));
  const down = element("ol", { class: "down", "aria-hidden": true }, ...queries.map((word) => element("li", {}, word)));
  const canvas = heatCanvas(state.layer, head, `calc(${keys.length} * var(--cell))`, `calc(${queries.length} * var(--cell))`);
  const cursor = element("div", { class: "cursor" });
  cursor.hidden = true;
  const show = (query, key) => {
    cursor.hidden = query === null;
    across.querySelectorAll("li").forEach((item, index) => item.classList.toggle("is-active", index === key));
    down.querySelectorAll("li").forEach((item, index) => item.classList.toggle("is-active", index === query));
    if (query === null) return setStatus(HINTS.heat);
    cursor.style.left = `calc(${key} * var(--cell))`;
    cursor.style.top = `calc(${query} * var(--cell))`;
    return setStatus(quoted(queries[query]), " attends to ", quoted(keys[key]),
      ` ${(weight(state.layer, head, query, key) / THOUSAND).toFixed(3)} (head ${head})`);
  };
  makeExplorable(canvas, queries.length, keys.length, show);
  canvas.setAttribute("aria-label", `Head ${head}: ${queries.length} by ${keys.length} weights; arrow keys read each`);
  return element("figure", { color: colors[head - 1] },
    element("figcaption", {}, element("i", { class: "swatch" }), `Head ${head}`),
    element("div", { class: "scroll" }, element("div", { class: "map" }, across, down,
      element("div", { class: "cells" }, canvas, cursor))));
}

// Calls show(row, column) for the cell under the pointer or, with the arrow keys, under a cursor; show(null) for none.
function makeExplorable(canvas, rows, columns, show) {
  let row = 0, column = 0;
  const limited = (value, count) => Math.max(0, Math.min(count - 1, value));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.addEventListener("pointermove", (event) => {
    row = limited(Math.floor(event.offsetY / canvas.clientHeight * rows), rows);
    column = limited(Math.floor(event.offsetX / canvas.clientWidth * columns), columns);
    show(row, column);
  });
  canvas.addEventListener("pointerleave", () => show(null, null));
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && show(row, column));
  canvas.addEventListener("blur", () => show(null, null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    row = limited(row + step[0], rows);
    column = limited(column + step[1], columns);
    show(row, column);
  });
}

function thumbnail(layer, head) {
  const { queries, keys } = shown(), room = Math.max(84, Math.min(170, 1130 / shown().heads - 12));
  const side = room / Math.max(queries.length, keys.length);
  const canvas = heatCanvas(layer, head, `${Math.round(keys.length * side)}px`, `${Math.round(queries.length * side)}px`);
  return element("button", {
    class: "thumbnail", type: "button", color: colors[head - 1], "aria-label": `Layer ${layer}, head ${head}`,
    onclick: () => {
      change({ layer, heads: new Set([head]), view: "lines", pinned: null });
      byId("views").querySelector(":checked").focus();
    },
  }, canvas);
}

function drawOverview() {
  const heads = everyHead(), { layers } = shown();
  const top = element("tr", {}, element("td"), ...heads.map((head) => element("th", { scope: "col" }, `head ${head}`)));
  const rows = Array.from({ length: layers }, (_, index) => element("tr", {},
    element("th", { scope: "row" }, `layer ${index + 1}`),
    ...heads.map((head) => element("td", {}, thumbnail(index + 1, head)))));
  byId("table").replaceChildren(top, ...rows);
}

function drawLegend() {
  const parts = [wording[state.stack].legend, LEGENDS[state.view]];
  if (state.view !== "lines") parts.push("0 ", element("span", { class: "scale", "aria-hidden": true }), " 1. ");
  if (state.view !== "all") parts.push("A dot before a token: it continues the word.");
  byId("attention-legend").replaceChildren(...parts);
  setStatus(HINTS[state.view]);
}

function draw() {
  drawControls();
  drawLegend();
  for (const [view, id] of [["lines", "lines-view"], ["heat", "heat-view"], ["all", "overview"]]) {
    byId(id).hidden = state.view !== view;
  }
  if (state.view === "lines") drawColumns();
  else if (state.view === "heat") byId("maps").replaceChildren(...selectedHeads().map(heatMap));
  else drawOverview();
}

/** Show weights, and keep the view. With `usesAddress` the page's address holds it. */
export function showAttention(data, usesAddress = false) {
  const isFirst = stacks === undefined;
  ({ stacks, colors } = data);
  wording = { encoder: ENCODER, decoder: data.isAutoregressive ? DECODER : WHOLE_DECODER, cross: CROSS };
  hasAddress = usesAddress;
  if (isFirst) {
    byId("attention-form").addEventListener("submit", (event) => event.preventDefault());
    byId("all-heads").addEventListener("click", () => change({ heads: new Set(everyHead()) }));
    if (usesAddress) addEventListener("hashchange", () => { readAddress(); draw(); });
    Object.assign(state, { layer: shown().layers, heads: new Set(everyHead()) });
  }
  if (usesAddress) readAddress();
  Object.assign(state, { pinned: usesAddress ? state.pinned : null, pointed: null });
  draw();
}
