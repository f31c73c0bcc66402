/** The models, in a thread of their own, so that the page stays alive; it answers messages {id, call, values}. */
import { searchTargets, slotLogits, targetOfBestPath } from "./ctc.js";
import { Labels } from "./labels.js";
import { unfinishedNote, unknownNote } from "./notes.js";
import { readSafetensors } from "./safetensors.js";
import { lengthPenalty, savedOptions, searchSettings, searchSteps, topContinuations } from "./search.js";
import { Tokenizer } from "./tokenizer.js";
import { Transformer } from "./transformer.js";

const MAX_SOURCE_TOKENS = 128; // keeps the tree and the attention weights small
const ALTERNATIVES = 5;
const LONGEST_WORK = 30; // milliseconds between two looks at newer messages
const THOUSAND = 1000;

const models = {};
const latest = {}; // the id of the last message of each call

/** Let the messages that have arrived be read. */
function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** Return the ids of a source; a source that is too long is an error. */
function encodeSource(tokenizer, text) {
  const source = tokenizer.encodeSource(text);
  if (source.length > MAX_SOURCE_TOKENS) {
    throw new Error(`The source has ${source.length} tokens, more than ${MAX_SOURCE_TOKENS}; shorten it.`);
  }
  return source;
}

/** Return the candidates that a page shows of a step: the kept ones and the best other one, best first. */
function shownCandidates(candidates) {
  const best = candidates.find(({ isKept }) => !isKept);
  return candidates.filter((candidate) => candidate.isKept || candidate === best);
}

/** Records a search as figures/web/search-view.js draws it. */
class Recorder {
  constructor({ tokenizer }, prefix, settings) {
    Object.assign(this, { settings, prefix, steps: [] });
    this.labels = new Labels(tokenizer);
    let start = this.labels.start;
    for (const token of prefix) start = this.labels.next(start, token);
    this.start = prefix.length > 0 ? start.complete.trim() : tokenizer.tokens[settings.prompt[0]];
    this.last = new Map([["", { rank: -1, decoded: start }]]); // candidates of the last step, by their tokens
  }

  add(candidates) {
    const next = new Map();
    const step = shownCandidates(candidates).map(({ tokens, logProb, isFinished, isKept }, rank) => {
      const parent = this.last.get(tokens.slice(0, -1).join(" "));
      const decoded = this.labels.next(parent.decoded, tokens.at(-1));
      next.set(tokens.join(" "), { rank, decoded });
      const penalty = lengthPenalty(tokens.length, this.settings);
      return {
        word: decoded.label, text: decoded.complete.trim(), tokens: decoded.ids, parent: parent.rank,
        logProb, penalty, isFinished, isKept,
      };
    });
    this.steps.push(step);
    this.last = next;
  }
}

/** Return weights[layer][query] (H, K) in thousandths, (layer, head, query, key) in one array. */
function flatten(layers, heads, keys) {
  const weights = [];
  for (const rows of layers) {
    for (let head = 0; head < heads; head++) {
      for (const row of rows) {
        const width = row.length / heads;
        for (let key = 0; key < keys; key++) {
          weights.push(key < width ? Math.round(THOUSAND * row[head * width + key]) : 0);
        }
      }
    }
  }
  return weights;
}

/** Return {word, isRepeat} of each slot of a path, null for a blank. */
function pathWords(path, tokens, tokenizer, blank) {
  const words = new Labels(tokenizer).all(tokens);
  let place = -1;
  return path.map((token, slot) => {
    if (token === blank) return null;
    const isRepeat = token === path[slot - 1];
    if (!isRepeat) place += 1;
    return { word: words[place], isRepeat };
  });
}

const milliseconds = (since) => Math.round(performance.now() - since);

const CALLS = {
  /** Build a model from the contents of its files; return its saved search. */
  load({ name, config, generation, tokenizer, weights }) {
    const model = new Transformer(config, readSafetensors(weights));
    models[name] = { model, tokenizer: new Tokenizer(tokenizer), saved: savedOptions(generation) };
    return models[name].saved;
  },

  /** Search the translations of a text; null if a newer search has begun. */
  async search({ text, options }, id) {
    const loaded = models.model;
    const began = performance.now();
    const source = encodeSource(loaded.tokenizer, text);
    const chosen = { ...loaded.saved, ...options };
    const settings = searchSettings(loaded.model.config, source.length, chosen);
    const recorder = new Recorder(loaded, settings.prefix, settings);
    const steps = searchSteps(loaded.model, source, chosen);
    let looked = began;
    let next = steps.next();
    for (; !next.done; next = steps.next()) {
      recorder.add(next.value);
      if (performance.now() - looked < LONGEST_WORK) continue;
      await pause();
      if (latest.search !== id) return null;
      looked = performance.now();
    }
    const took = milliseconds(began);
    const best = settings.prefix.concat(next.value[0].tokens);
    const notes = [unknownNote(loaded.tokenizer, text), unfinishedNote(best, settings.ends)];
    const recording = { source: text, start: recorder.start, steps: recorder.steps };
    return { recording, text: loaded.tokenizer.decode(best).trim(), notes: notes.filter(Boolean), milliseconds: took };
  },

  /** Return the most likely tokens after the beginning of a target, best first, with their probabilities. */
  alternatives({ text, before }) {
    const { model, tokenizer, saved } = models.model;
    const source = encodeSource(tokenizer, text);
    const settings = searchSettings(model.config, source.length, saved);
    const decoder = model.decoder(model.encode(source).memory);
    const steps = [settings.prompt[0], ...before].map((token) => decoder.step([token]));
    const best = topContinuations(steps.at(-1).logits, [0], ALTERNATIVES, settings.suppressed);
    const labels = new Labels(tokenizer);
    const start = before.reduce((decoded, token) => labels.next(decoded, token), labels.start);
    return best.map(({ token, logProb }) => ({
      token, word: labels.next(start, token).label, probability: Math.exp(logProb), isEnd: settings.ends.includes(token),
    }));
  },

  /** Return the attention weights of a target, as figures/web/attention-view.js shows them. */
  attention({ text, tokens }) {
    const { model, tokenizer } = models.model;
    const source = encodeSource(tokenizer, text);
    const inputs = [searchSettings(model.config, source.length).prompt[0], ...tokens.slice(0, -1)];
    const { encoder, decoder, cross } = model.forward(source, inputs);
    const labels = new Labels(tokenizer);
    const [sourceWords, inputWords, outputWords] = [source, inputs, tokens].map((ids) => labels.all(ids));
    const heads = model.config.num_heads;
    const stack = (layers, queries, keys) => (
      { queries, keys, layers: layers.length, heads, weights: flatten(layers, heads, keys.length) });
    return {
      isAutoregressive: true,
      stacks: {
        encoder: stack(encoder, sourceWords, sourceWords),
        decoder: stack(decoder, outputWords, inputWords),
        cross: stack(cross, outputWords, sourceWords),
      },
    };
  },

  /** Translate in one pass: the words of the path, null for a blank, and the target; with beams also by a search. */
  ctc({ text, beams }) {
    const { model, tokenizer, saved } = models.ctc;
    const began = performance.now();
    const logits = slotLogits(model, encodeSource(tokenizer, text));
    const { path, tokens } = targetOfBestPath(logits, model.config, saved.suppressed);
    const answer = { slots: pathWords(path, tokens, tokenizer, model.config.pad_token_id), milliseconds: milliseconds(began) };
    answer.text = tokenizer.decode(tokens).trim();
    if (beams === 1) return answer;
    const [best] = searchTargets(logits, model.config, { ...saved, beams });
    return { ...answer, beams, searched: tokenizer.decode(best.tokens).trim(), searchMilliseconds: milliseconds(began) };
  },
};

onmessage = async ({ data: { id, call, values } }) => {
  latest[call] = id;
  try {
    postMessage({ id, result: await CALLS[call](values, id) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
};
