// Answers calls of the JavaScript model: a line of JSON on stdin gets a line of JSON on stdout.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import { activationFunction } from "./activations.js";
import { prefixBeamSearch, searchTargets, slotLogits, targetOfBestPath } from "./ctc.js";
import { Labels } from "./labels.js";
import { linear } from "./matrix.js";
import { unknownNote } from "./notes.js";
import { readSafetensors } from "./safetensors.js";
import { beamSearch, finish, greedySearch, savedOptions, searchSteps, translate } from "./search.js";
import { Tokenizer } from "./tokenizer.js";
import { Transformer } from "./transformer.js";

const readJson = (path) => JSON.parse(readFileSync(path, "utf8"));
const readTensors = (path) => readSafetensors(Uint8Array.from(readFileSync(path)).buffer);

function remember(make) {
  const made = new Map();
  return (key) => made.get(key) ?? made.set(key, make(key)).get(key);
}

const model = remember((folder) =>
  new Transformer(readJson(`${folder}/config.json`), readTensors(`${folder}/model.safetensors`)));
const tokenizer = remember((folder) => new Tokenizer(readJson(`${folder}/tokenizer.json`)));

/** A decoder whose logits are a row of a table, chosen by all tokens of a beam. */
class TableDecoder {
  constructor(table) {
    this.table = table;
    this.beams = [[]];
  }

  step(tokens) {
    this.beams = this.beams.map((beam, row) => [...beam, tokens[row]]);
    const next = (row, token) => (31 * row + token + 1) % this.table.length;
    return { logits: Float64Array.from(this.beams.flatMap((beam) => this.table[beam.reduce(next, 0)])) };
  }

  reorder(beams) {
    this.beams = beams.map((beam) => this.beams[beam]);
  }
}

const plain = (targets) => targets.map(({ tokens, parents, logProb, score }) => ({ tokens, parents, logProb, score }));

const CALLS = {
  bits: ({ path }) => Object.fromEntries(Object.entries(readTensors(path)).map(
    ([name, tensor]) => [name, [...new Uint32Array(Float32Array.from(tensor).buffer)]])),
  linear: ({ x, weight, inputs, bias }) => [...linear(Float32Array.from(x), Float32Array.from(weight), inputs, bias)],
  activation: ({ name, values }) => values.map(activationFunction(name, () => { throw new Error("none"); })),
  encode: ({ folder, texts }) => texts.map((text) => tokenizer(folder).encode(text)),
  encodeSources: ({ folder, texts }) => texts.map((text) => tokenizer(folder).encodeSource(text)),
  decode: ({ folder, rows }) => rows.map((ids) => tokenizer(folder).decode(ids)),
  unknownNotes: ({ folder, texts }) => texts.map((text) => unknownNote(tokenizer(folder), text)),
  cachedWords: ({ folder }) => tokenizer(folder).encoding.cache.size,
  forward: ({ folder, source, target }) => {
    const { logits, encoder, decoder, cross } = model(folder).forward(source, target);
    const asLists = (rows) => rows.map((row) => [...row]);
    const [encoderRows, decoderRows, crossRows] = [encoder, decoder, cross].map((layers) => layers.map(asLists));
    return { logits: asLists(logits), encoder: encoderRows, decoder: decoderRows, cross: crossRows };
  },
  search: ({ table, prompt, settings, greedy }) =>
    plain(finish((greedy ? greedySearch : beamSearch)(new TableDecoder(table), prompt, settings))),
  steps: ({ folder, source, options }) => [...searchSteps(model(folder), source, options)],
  translate: ({ folder, sources, options }) =>
    sources.map((source) => plain(translate(model(folder), source, options))),
  savedOptions: ({ saved }) => savedOptions(saved),
  labels: ({ folder, rows }) => rows.map((ids) => new Labels(tokenizer(folder)).all(ids)),
  prefixSearch: ({ slots, beams, bonus, limit }) => prefixBeamSearch(slots, beams, bonus, limit ?? undefined),
  ctc: ({ folder, source, suppressed, searches }) => {
    const { config } = model(folder);
    const logits = slotLogits(model(folder), source);
    const searched = searches.map((options) => searchTargets(logits, config, { suppressed, ...options }));
    return { logits: logits.map((row) => [...row]), searched, ...targetOfBestPath(logits, config, suppressed) };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { call, ...values } = JSON.parse(line);
  let answer;
  try {
    answer = { result: CALLS[call](values) };
  } catch (error) {
    answer = { error: error.message };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
