/** The page: reads what is typed, asks the worker, and shows the answers. */
import { showAttention } from "./attention-view.js";
import { ModelClient } from "./client.js";
import { byId, element } from "./dom.js";
import { readModel, startWorker } from "./files.js";
import { finishedTargets, scoreOf, SearchView } from "./search-view.js";

const RANGES = { // of the number fields; an empty field stands for the model's own setting
  beams: { name: "Beams", least: 1, most: 16, isWhole: true },
  alpha: { name: "Length penalty", least: -10, most: 10 },
  limit: { name: "Length limit", least: 1, most: 512, isWhole: true },
};
const DELAY = 150; // milliseconds after a change of a number before a search begins

const settings = JSON.parse(byId("settings").textContent);
const state = { text: "", prefix: [], targets: [], turn: 0 };
let client, view;

// Messages

/** Show a sentence instead of results, or remove it. */
function say(sentence) {
  byId("message").textContent = sentence;
  byId("message").hidden = sentence === "";
  byId("results").hidden = sentence !== "";
  if (sentence !== "") for (const id of ["translation", "took"]) byId(id).textContent = "";
  byId("app").classList.remove("busy");
}

/** Run what may fail; its error becomes a sentence on the page, instead of all results unless `report` shows it. */
async function trying(action, report = say) {
  try {
    await action();
  } catch (error) {
    report(error.message);
  }
}

// Settings

/** Return the value of a number field, null if it is empty. */
function numberOf(id) {
  const field = byId(id), { name, least, most, isWhole } = RANGES[id];
  if (field.value === "" && !field.validity.badInput) return null;
  const value = Number(field.value);
  const isValid = !field.validity.badInput && value >= least && value <= most && (!isWhole || Number.isInteger(value));
  field.setAttribute("aria-invalid", !isValid);
  if (isValid) return value;
  const kind = isWhole ? "an integer" : "a number";
  throw new Error(`${name}: out of range; got ${field.value || "no number"}, expected ${kind} from ${least} to ${most}.`);
}

/** Return the options of a search that the fields set. */
function options() {
  const [beams, alpha, limit] = ["beams", "alpha", "limit"].map(numberOf);
  return {
    prefix: state.prefix,
    ...(beams === null ? {} : { beams }),
    ...(alpha === null ? {} : { alpha }),
    ...(limit === null ? {} : { maxTokens: Math.max(1, limit - state.prefix.length), maxSourceRelative: null }),
  };
}

// Searches

/** Translate the typed text, from the beginning that was chosen; the last call counts. */
function search() {
  const turn = ++state.turn;
  return trying(async () => {
    const text = byId("source").value;
    if (text !== state.text) Object.assign(state, { text, prefix: [] });
    if (text.trim() === "") return say("The source is empty; type a sentence.");
    const chosen = options();
    byId("app").classList.add("busy");
    const found = await client.latest("search", { text, options: chosen });
    if (found === null || turn !== state.turn) return undefined;
    show(found);
    return onePass(text); // afterwards, so that neither slows the other
  });
}

function show({ recording, text, notes, milliseconds }) {
  say("");
  byId("translation").textContent = text;
  byId("took").textContent = `${milliseconds} ms in this browser`;
  byId("beam-time").textContent = `${milliseconds} ms for ${recording.steps.length} steps, one word after the other`;
  byId("notes").replaceChildren(...notes.map((note) => element("p", {}, note)));
  byId("alternatives").hidden = true;
  byId("prefix").hidden = state.prefix.length === 0;
  byId("prefix-text").textContent = recording.start;
  state.recording = recording;
  state.targets = finishedTargets(recording);
  view.show(recording);
  showTargets();
  return chooseTarget(0);
}

function showTargets() {
  byId("targets").replaceChildren(...state.targets.map(({ candidate }, index) => element("li", {},
    element("button", { type: "button", class: "target", onclick: () => chooseTarget(index) },
      element("span", { class: "score" }, scoreOf(candidate).toFixed(2)), element("bdi", {}, candidate.text)))));
}

/** Show the path and the attention of a finished target. */
function chooseTarget(index) {
  return trying(async () => {
    byId("targets").querySelectorAll("button").forEach((button, place) => button.setAttribute("aria-pressed", place === index));
    if (index > 0 || view.chosen !== state.targets[0]) view.choose(state.targets[index]);
    const { tokens } = state.targets[index].candidate;
    const weights = await client.latest("attention", { text: state.recording.source, tokens });
    if (weights !== null) showAttention({ ...weights, colors: settings.colors });
  });
}

// Alternatives

/** Show what else could stand at a word of the tree. */
function askAlternatives(step, row) {
  return trying(async () => {
    const { recording } = state;
    const { tokens, parent } = recording.steps[step][row];
    const before = tokens.slice(0, -1);
    const beginning = step === 0 ? recording.start : recording.steps[step - 1][parent].text;
    const found = await client.latest("alternatives", { text: recording.source, before });
    if (found === null || recording !== state.recording) return;
    const choose = (token) => {
      Object.assign(state, { text: recording.source, prefix: [...before, token] }); // of this text alone
      byId("drawing").focus();
      return search();
    };
    byId("beginning").textContent = beginning;
    byId("choices").replaceChildren(...found.map((each) => element("li", {}, choiceButton(each, tokens.at(-1), choose))));
    byId("alternatives").hidden = false;
  });
}

function closeAlternatives() {
  byId("alternatives").hidden = true;
  view.mark(null);
}

function choiceButton({ token, word, probability, isEnd }, clicked, choose) {
  const button = element("button", {
    type: "button", class: `choice${token === clicked ? " clicked" : ""}`, disabled: isEnd,
    title: isEnd ? "The translation ends here" : "Continue from this word",
    onclick: () => choose(token),
  }, element("bdi", {}, word), element("span", { class: "share" }, percent(probability)), element("i", { class: "bar" }));
  button.querySelector(".bar").style.setProperty("--share", probability);
  return button;
}

const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)}%` : `${(100 * share).toPrecision(2)}%`);

// One pass

/** Translate with the CTC model, if there is one, and show its path; an error becomes a sentence in its section. */
function onePass(text) {
  return trying(async () => {
    if (!settings.hasCtc || !byId("ctc-section").dataset.isReady) return;
    const found = await client.latest("ctc", { text, beams: numberOf("beams") ?? 1 });
    if (found !== null) showOnePass(found);
  }, sayInOnePass);
}

function sayInOnePass(sentence) {
  for (const id of ["ctc-path", "ctc-text", "ctc-search", "ctc-time"]) byId(id).replaceChildren();
  byId("ctc-message").textContent = sentence;
}

function showOnePass(found) {
  byId("ctc-message").textContent = "";
  byId("ctc-text").textContent = found.text;
  byId("ctc-time").textContent = `${found.milliseconds} ms for all words at once`;
  byId("ctc-path").replaceChildren(...found.slots.map((slot) => {
    if (slot === null) return element("li", { class: "blank", "aria-label": "blank" }, "–");
    return element("li", { class: slot.isRepeat ? "repeat" : "" }, slot.word);
  }));
  byId("ctc-search").textContent = found.searched === undefined ? "" :
    `With a prefix beam search of ${found.beams} beams over the same pass, ${found.searchMilliseconds} ms: ${found.searched}`;
}

// Start

async function load(name) {
  const { weights, ...files } = await readModel(name);
  return client.call("load", { name, weights, ...files }, [weights]);
}

function addExamples() {
  byId("examples").replaceChildren(...settings.examples.map((text) => element("li", {},
    element("button", { type: "button", class: "example", onclick: () => { byId("source").value = text; search(); } }, text))));
}

function listen() {
  let timer;
  const soon = () => { clearTimeout(timer); timer = setTimeout(search, DELAY); };
  for (const id of Object.keys(RANGES)) byId(id).addEventListener("input", soon);
  byId("form").addEventListener("submit", (event) => { event.preventDefault(); search(); });
  byId("source").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    search();
  });
  byId("remove-prefix").addEventListener("click", () => { state.prefix = []; search(); });
  byId("close").addEventListener("click", closeAlternatives);
  byId("search-view").addEventListener("keydown", (event) => event.key === "Escape" && closeAlternatives());
}

async function start() {
  byId("not-started").hidden = true;
  byId("app").hidden = false;
  view = new SearchView({ onword: askAlternatives });
  client = new ModelClient(startWorker(settings));
  const saved = await load("model");
  byId("beams").value = saved.beams;
  byId("alpha").value = saved.alpha;
  addExamples();
  listen();
  byId("translate").disabled = false;
  byId("source").value ||= settings.examples[0] ?? "";
  await search();
  document.getElementById(location.hash.slice(1))?.scrollIntoView(); // hidden until now
  if (!settings.hasCtc) return;
  byId("ctc-section").hidden = false;
  await trying(async () => {
    await load("ctc");
    byId("ctc-section").dataset.isReady = true;
  }, sayInOnePass);
  await onePass(byId("source").value);
}

trying(start);
