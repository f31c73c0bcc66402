/**
 * The drawing of a search, made from its steps: the tree of a beam search, or the passes of a non-autoregressive model.
 *
 * A recording of a beam search is {source, start, steps}. A step is a list of candidates, best first: {word, text, parent,
 * logProb, penalty, isFinished, isKept}, where `text` is the target so far and `parent` the index of the candidate of the
 * step before that it continues, -1 in the first step. One that is not kept is the best one that the step drops. A
 * recording of passes is {source, name, passes}; a pass is {words, tokens, text}.
 *
 * Each part of a drawing says when the search adds it (`data-step`) and when it was last part of a target (`data-last`):
 * it is blue until then, and gray afterwards.
 */
import { byId, element, shape } from "./dom.js";

const BLUE = "#2f6fdb";
const GRAY = "#696c75";
const FONT = "Helvetica, Arial, sans-serif";
const SIZE = 17; // pixels of words
const ROW = { close: 34, scores: 54 }; // pixels from row to row
const GAP = 36; // between two columns, which the lines cross
const MARGIN = 14;
const SECONDS_A_STEP = 0.8;
const NOT_XML = /[\x00-\x08\v\f\x0e-\x1f\ufffe\uffff]/g; // characters that no XML file may contain
const LEGENDS = {
  beams: [
    "A column is a step: every open beam gets one more word, best first.",
    "Blue beams are open or finished, gray ones have died; the bold one is the translation.",
    "In parentheses: the best candidate that a step drops. Click a word for what else could stand there.",
  ],
  recordedBeams: "In parentheses: the best candidate that a step drops.",
  passes: ["A row is the target after one NAME.", "Boxes: words that it changed.", "Gray: words that a later one changes."],
};

const pen = document.createElement("canvas").getContext("2d");

/** Return the pixels of a text. */
function widthOf(text, size = SIZE, weight = 600) {
  pen.font = `${weight} ${size}px ${FONT}`;
  return Math.ceil(pen.measureText(text).width);
}

/** Return all finished targets [step, row] of a recording, best first. */
export function finishedTargets({ steps }) {
  const targets = steps.flatMap((step, number) => step.map((candidate, row) => ({ step: number, row, candidate })));
  const finished = targets.filter(({ candidate }) => candidate.isFinished && candidate.isKept);
  return finished.sort((one, other) => scoreOf(other.candidate) - scoreOf(one.candidate));
}

/** Return log P of a candidate, over lp(Y) once it is finished. */
export const scoreOf = ({ logProb, penalty }) => logProb / penalty;

/** Return the candidates from the first step to a target. */
export function pathTo(steps, step, row) {
  const path = [];
  for (; step >= 0; step--) {
    path.unshift({ step, row, candidate: steps[step][row] });
    row = steps[step][row].parent;
  }
  return path;
}

/**
 * Return for each candidate the last step after which it or a continuation is open.
 *
 * If one of them finishes, that is the last step of all. The end of the search drops the beams that are still open.
 */
function lastSteps(steps) {
  const last = steps.map((step) => step.map(() => 0));
  for (let number = steps.length; number > 0; number--) {
    steps[number - 1].forEach(({ isKept, isFinished, parent }, row) => {
      const alive = isFinished ? steps.length : Math.min(number, steps.length - 1);
      const stays = Math.max(last[number - 1][row], isKept ? alive : 0);
      last[number - 1][row] = stays;
      if (number > 1) last[number - 2][parent] = Math.max(last[number - 2][parent], stays);
    });
  }
  return last;
}

const numbersOf = ({ logProb, penalty, isFinished }) => (isFinished
  ? [`${logProb.toFixed(2)} / ${penalty.toFixed(2)}`, `= ${(logProb / penalty).toFixed(2)}`] : [logProb.toFixed(2)]);

function text(x, y, content, attributes = {}) {
  return shape("text", { x: x.toFixed(1), y: y.toFixed(1), fill: "currentColor", "font-size": SIZE, ...attributes }, content);
}

function picture(width, height, title, ...parts) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height };
  return shape("svg", { ...size, "font-family": FONT, role: "group", "aria-label": title }, ...parts);
}

/** Draw the tree of a beam search, with a bold line to the target at `chosen`. */
function drawBeams({ source, start, steps }, chosen, hasScores) {
  const row = hasScores ? ROW.scores : ROW.close;
  const top = 26;
  const last = lastSteps(steps);
  const bold = new Set(chosen ? pathTo(steps, chosen.step, chosen.row).map((node) => `${node.step} ${node.row}`) : []);
  const labelOf = ({ word, isKept }) => (isKept ? word : `(${word})`);
  let x = MARGIN + widthOf(start) + 8;
  let ends = { "-1": `M${x} ${top - 6}` }; // where the lines to the continuations of a candidate begin
  const parts = [shape("g", { color: GRAY }, text(MARGIN, top, start))];
  steps.forEach((step, number) => {
    x += GAP;
    const widths = step.map((candidate) => Math.max(widthOf(labelOf(candidate)),
      hasScores ? Math.max(...numbersOf(candidate).map((line) => widthOf(line, 12, 400))) : 0));
    const right = x + Math.max(...widths) + 8;
    const next = {};
    const nodes = step.map((candidate, rank) => {
      const y = top + row * rank;
      const isBold = bold.has(`${number} ${rank}`);
      const line = `${ends[candidate.parent]}C${x - 22} ${linesEnd(ends[candidate.parent])} ${x - 22} ${y - 6} ${x - 6} ${y - 6}`;
      const label = labelOf(candidate);
      next[rank] = `M${x + widthOf(label, SIZE, isBold ? 700 : 400) + 6} ${y - 6}L${right} ${y - 6}`;
      const numbers = hasScores ? numbersOf(candidate).map((content, index) =>
        text(x, y + 15 + 13 * index, content, { "font-size": 12 })) : [];
      return shape("g", {
        class: `node${isBold ? " bold" : ""}`, "data-step": number + 1, "data-last": last[number][rank],
        "data-row": rank, color: last[number][rank] >= steps.length ? BLUE : GRAY,
      },
      shape("path", {
        d: line, fill: "none", stroke: "currentColor", "stroke-linecap": "round",
        "stroke-width": isBold ? 3 : candidate.isKept ? 1.4 : 0.7,
      }),
      shape("rect", { x: x - 5, y: y - 21, width: widthOf(label) + 10, height: 30, rx: 6, fill: "transparent" }),
      text(x, y, label, { "font-weight": isBold ? 700 : 400 }), ...numbers);
    });
    // Lines that stay longer cover the others, and the bold ones all.
    const order = nodes.map((node, rank) => [bold.has(`${number} ${rank}`), last[number][rank], node]);
    parts.push(...order.sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , node]) => node));
    ends = next;
    x = right;
  });
  const height = top + row * Math.max(...steps.map((step) => step.length)) - (hasScores ? 6 : 14);
  return picture(x + MARGIN, height, `Beam search for “${source}”`, ...parts);
}

/** Return the height at which a line ends. */
const linesEnd = (line) => line.split(/[ML ]/).at(-1);

/** Draw the target after each pass in a row, with a box around each changed word. */
function drawPasses({ source, name, passes }) {
  const heading = (number) => `${name} ${number}`;
  const left = MARGIN + widthOf(heading(passes.length), 14) + 14;
  const widths = passes[0].words.map((_, place) => Math.max(...passes.map(({ words }) => widthOf(words[place]))) + 20);
  const parts = [];
  passes.forEach(({ words, tokens }, index) => {
    const y = 26 + 40 * index;
    const number = index + 1;
    parts.push(shape("g", { "data-step": number, "data-last": 0, color: GRAY },
      text(MARGIN, y, heading(number), { "font-size": 14 })));
    let x = left;
    words.forEach((word, place) => {
      // The word stays until a later pass changes it.
      const changed = passes.findIndex((later, rank) => rank > index && later.tokens[place] !== tokens[place]);
      const last = changed < 0 ? passes.length : changed;
      const isNew = index > 0 && passes[index - 1].tokens[place] !== tokens[place];
      const box = { x: x + 1, y: y - 21, width: widths[place] - 2, height: 30, rx: 6, fill: "none", stroke: "currentColor" };
      parts.push(shape("g", { "data-step": number, "data-last": last, color: last === passes.length ? BLUE : GRAY },
        ...(isNew ? [shape("rect", box)] : []),
        text(x + widths[place] / 2, y, word, { "text-anchor": "middle" })));
      x += widths[place];
    });
  });
  const width = left + widths.reduce((sum, each) => sum + each, 0) + MARGIN;
  return picture(width, 40 * passes.length + 6, `Each ${name} for “${source}”`, ...parts);
}

/** The view of one search at a time: player, drawing, legend and table. */
export class SearchView {
  /** `onword` is called with the step and row of a word of the tree that is clicked. */
  constructor({ onword = null } = {}) {
    this.onword = onword;
    this.timer = null;
    byId("step").addEventListener("input", () => { this.stop(); this.showStep(); this.follow(); });
    byId("scores").addEventListener("change", () => this.draw());
    byId("play").addEventListener("click", () => (this.timer === null ? this.play() : this.stop()));
    byId("save").addEventListener("click", () => this.save());
    byId("drawing").addEventListener("click", (event) => this.chooseWord(event.target.closest(".node")));
    byId("drawing").addEventListener("keydown", (event) => this.moveFocus(event));
  }

  /** Show a recording after its last step. */
  show(recording) {
    this.stop();
    this.recording = recording;
    this.isTree = recording.steps !== undefined;
    this.steps = recording.steps ?? recording.passes;
    this.chosen = this.isTree ? finishedTargets(recording)[0] : null;
    const name = this.isTree ? "step" : recording.name;
    byId("step-name").textContent = name[0].toUpperCase() + name.slice(1);
    byId("step").max = this.steps.length;
    byId("step").value = this.steps.length;
    byId("scores-field").hidden = !this.isTree;
    for (const part of [byId("play"), byId("step").parentElement]) part.hidden = this.steps.length === 1;
    this.showLegend(name);
    this.draw();
    byId("drawing").scrollLeft = 0;
  }

  showLegend(name) {
    const [first, second, third] = this.isTree ? LEGENDS.beams : LEGENDS.passes;
    const lines = [first.replace("NAME", name), second, this.isTree && !this.onword ? LEGENDS.recordedBeams : third];
    const isOnePass = !this.isTree && this.steps.length === 1;
    byId("search-legend").replaceChildren(...(isOnePass ? [] : lines.map((line) => element("li", {}, line))));
  }

  /** Draw the path to a finished target in bold. */
  choose(target) {
    this.chosen = target;
    this.draw();
  }

  draw() {
    const svg = this.isTree ? drawBeams(this.recording, this.chosen, byId("scores").checked) : drawPasses(this.recording);
    byId("drawing").replaceChildren(svg);
    if (this.isTree && this.onword) this.makeWordsButtons();
    this.showStep();
  }

  makeWordsButtons() {
    byId("drawing").querySelectorAll(".node").forEach((word, index) => {
      const { word: label, logProb } = this.candidateOf(word);
      word.setAttribute("role", "button");
      word.setAttribute("tabindex", index === 0 ? 0 : -1);
      word.setAttribute("aria-label", `${label}, step ${word.dataset.step}, log P ${logProb.toFixed(2)}`);
    });
  }

  candidateOf({ dataset }) {
    return this.recording.steps[dataset.step - 1][dataset.row];
  }

  /** Show the search up to the step of the slider. */
  showStep(isNew = false) {
    const step = Number(byId("step").value);
    for (const part of byId("drawing").querySelectorAll("[data-step]")) {
      part.setAttribute("display", part.dataset.step <= step ? "inline" : "none");
      part.setAttribute("color", part.dataset.last >= step ? BLUE : GRAY);
      part.classList.toggle("new", isNew && Number(part.dataset.step) === step);
    }
    this.keepTabStop();
    byId("step-text").textContent = `${step} of ${this.steps.length}: ${this.textAt(step)}`;
    this.showTable(step);
  }

  /** Return the best target after a step. */
  textAt(step) {
    if (!this.isTree) return this.steps[step - 1].text;
    return step === this.steps.length && this.chosen ? this.chosen.candidate.text : this.steps[step - 1][0].text;
  }

  showTable(step) {
    byId("step-caption").textContent = `${byId("step-name").textContent} ${step} of ${this.steps.length}`;
    const headings = this.isTree ? ["rank", "target so far", "log P(Y | X)", "log P(Y | X) / lp(Y)", "state"] : ["target"];
    const stateOf = ({ isKept, isFinished }) => (!isKept ? "dropped" : isFinished ? "finished" : "open");
    const rows = this.isTree ? this.steps[step - 1].map((candidate, rank) => [
      rank + 1, candidate.text || candidate.word, candidate.logProb.toFixed(3),
      candidate.isFinished ? scoreOf(candidate).toFixed(3) : "", stateOf(candidate)]) : [[this.textAt(step)]];
    byId("step-head").replaceChildren(element("tr", {}, ...headings.map((each) => element("th", { scope: "col" }, each))));
    byId("step-rows").replaceChildren(...rows.map((cells) =>
      element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))))));
  }

  /** Scroll so that the step of the slider is in view where the drawing is wider than its box. */
  follow() {
    const box = byId("drawing");
    const step = byId("step").value;
    const newest = [...box.querySelectorAll(`[data-step="${step}"]`)];
    if (newest.length === 0) return;
    const area = box.getBoundingClientRect();
    const right = Math.max(...newest.map((part) => part.getBoundingClientRect().right));
    const left = Math.min(...newest.map((part) => part.getBoundingClientRect().left));
    if (right > area.right) box.scrollLeft += right - area.right + 24;
    else if (left < area.left) box.scrollLeft -= area.left - left + 24;
  }

  play() {
    const slider = byId("step");
    const showNext = () => {
      slider.stepUp();
      this.showNewStep();
      if (slider.value === slider.max) this.stop();
    };
    byId("play").textContent = "Stop";
    this.timer = setInterval(showNext, 1000 * SECONDS_A_STEP);
    if (slider.value !== slider.max) return showNext();
    slider.value = 1;
    return this.showNewStep();
  }

  showNewStep() {
    this.showStep(true);
    this.follow();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
  }

  chooseWord(word) {
    if (word === null || !this.onword) return;
    this.focusWord(word);
    this.mark(word);
    this.onword(word.dataset.step - 1, Number(word.dataset.row));
  }

  mark(word) {
    byId("drawing").querySelector(".asked")?.classList.remove("asked");
    word?.classList.add("asked");
  }

  focusWord(word) {
    this.setTabStop(word);
    word.focus({ preventScroll: true });
  }

  /** Let the tab key reach one word. */
  setTabStop(word) {
    for (const each of byId("drawing").querySelectorAll('.node[tabindex="0"]')) each.setAttribute("tabindex", -1);
    word.setAttribute("tabindex", 0);
  }

  /** Let the tab key reach the first word if the one that it reached is hidden. */
  keepTabStop() {
    const reached = byId("drawing").querySelector('.node[tabindex="0"]');
    if (reached?.getAttribute("display") === "none") this.setTabStop(byId("drawing").querySelector('.node[display="inline"]'));
  }

  /** The arrow keys move from word to word: left to the one that it continues, right to a continuation. */
  moveFocus(event) {
    const word = event.target.closest(".node");
    if (word === null) return;
    const [step, row] = [word.dataset.step - 1, Number(word.dataset.row)];
    const continued = this.steps[step + 1]?.findIndex(({ parent }) => parent === row) ?? -1;
    const targets = {
      ArrowUp: [step, row - 1], ArrowDown: [step, row + 1],
      ArrowLeft: [step - 1, this.steps[step][row].parent], ArrowRight: [step + 1, continued],
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.chooseWord(word);
    }
    if (!targets[event.key]) return;
    event.preventDefault();
    const [nextStep, nextRow] = targets[event.key];
    const next = byId("drawing").querySelector(`.node[data-step="${nextStep + 1}"][data-row="${nextRow}"][display="inline"]`);
    if (next === null) return;
    this.focusWord(next);
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Return the drawing as a complete file. */
  svgText() {
    const copy = byId("drawing").querySelector("svg").cloneNode(true);
    const title = copy.getAttribute("aria-label").replace(NOT_XML, "\ufffd");
    copy.prepend(shape("title", {}, title));
    copy.setAttribute("aria-label", title);
    copy.setAttribute("role", "img");
    for (const word of copy.querySelectorAll(".node")) {
      for (const name of ["role", "tabindex", "aria-label", "class"]) word.removeAttribute(name);
    }
    for (const hit of copy.querySelectorAll('rect[fill="transparent"]')) hit.remove();
    return new XMLSerializer().serializeToString(copy);
  }

  save() {
    const link = element("a", { download: "search.svg", href: URL.createObjectURL(new Blob([this.svgText()], { type: "image/svg+xml" })) });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
