/**
 * CTC: all words in one pass, without predicting a length (Libovický and Helcl 2018, Gu and Kong 2021), as in ctc.py.
 *
 * The decoder is the paper's, but every position sees all of them. It has `upsampling` slots per source token, and
 * predicts a word or the blank, <pad>, at each. Such a path collapses to a target; a search adds up the paths of a target.
 *
 * S source tokens, U slots, V vocabulary.
 */
import { joinRows, splitRows } from "./matrix.js";
import { topContinuations } from "./search.js";
import { range } from "./transformer.js";

const BEST_TOKENS = 8; // most likely words of a slot that may extend a prefix

/** Return the logits[slot] (V) of a source's slots. */
export function slotLogits(model, source) {
  // The slots start from a soft copy of the memory: slot i has that of source token floor(i S / U).
  const { config } = model;
  const { memory } = model.encode(source);
  const limit = config.position_embedding === "learned" ? config.max_position_embeddings : Infinity;
  const slots = range(Math.min(config.upsampling * source.length, limit));
  const rows = splitRows(memory, config.d_model);
  const copied = slots.map((slot) => rows[Math.floor(slot * source.length / slots.length)]);

  let x = model.decoder_embedding.addPositions(joinRows(copied, config.d_model), slots);
  for (const layer of model.decoder_layers) ({ x } = layer.forward(x, layer.cross_attn.projectKeyValues(memory)));
  return splitRows(model.project(x), config.vocab_size);
}

/** Return the tokens that cannot be in a path, besides the blank. */
function excludedTokens(config, suppressed) {
  const { pad_token_id: blank, bos_token_id: start, decoder_start_token_id: first, eos_token_id: ends } = config;
  return [start, first, ends, suppressed].flat().filter((token) => token !== blank);
}

/** Return the most likely token of each slot and its log-probability; only words and the blank can be in a path. */
export function bestPath(logits, config, suppressed = []) {
  const excluded = excludedTokens(config, suppressed);
  return logits.map((row) => topContinuations(row, [0], 1, excluded)[0]);
}

/** Return the target of a path of tokens: equal neighbors become one token, then the blanks are removed. */
export function collapse(path, blank) {
  return path.filter((token, slot) => token !== path[slot - 1] && token !== blank);
}

/**
 * Prefix beam search (Graves et al. 2006; Hannun et al. 2014): up to k targets whose alignments are likely together.
 *
 * A slot is {words, blank}: its best words {token, probability} and the probability of the blank. A prefix of a target has
 * two probabilities, of its alignments to the slots so far that end in a blank, and of those that end in its last word.
 * Only after a blank the same word again is a new one. `bonus` is added to log p for each word, of at most `limit`.
 */
export function prefixBeamSearch(slots, beams, bonus = 0, limit = Infinity) {
  let prefixes = [{ tokens: [], inBlank: 1, inWord: 0 }];
  for (const { words, blank } of slots) {
    const next = new Map();
    const prefixOf = (tokens) => {
      const name = tokens.join(" ");
      if (!next.has(name)) next.set(name, { tokens, inBlank: 0, inWord: 0 });
      return next.get(name);
    };
    for (const { tokens, inBlank, inWord } of prefixes) {
      prefixOf(tokens).inBlank += (inBlank + inWord) * blank;
      for (const { token, probability } of words) {
        const isLast = token === tokens.at(-1);
        if (isLast) prefixOf(tokens).inWord += inWord * probability;
        if (tokens.length < limit) prefixOf([...tokens, token]).inWord += (isLast ? inBlank : inBlank + inWord) * probability;
      }
    }

    // The k best, relative to the largest, so that no product of many slots becomes 0.
    const total = ({ inBlank, inWord }) => inBlank + inWord;
    const score = (prefix) => Math.log(total(prefix)) + bonus * prefix.tokens.length;
    const possible = [...next.values()].filter((prefix) => total(prefix) > 0);
    const best = possible.sort((a, b) => score(b) - score(a)).slice(0, beams);
    const largest = Math.max(...best.map(total));
    prefixes = best.map(({ tokens, inBlank, inWord }) => ({ tokens, inBlank: inBlank / largest, inWord: inWord / largest }));
  }
  return prefixes.map(({ tokens }) => tokens);
}

function logSumExp(values) {
  const max = values.reduce((one, other) => Math.max(one, other));
  return max === -Infinity ? max : max + Math.log(values.reduce((sum, value) => sum + Math.exp(value - max), 0));
}

/** Return the log-probability of a target: the sum over its alignments to the slots' log-probabilities (V). */
function targetLogProb(logProbs, target, blank) {
  // The states are the words with blanks around them. Each slot stays in a state or moves on; only a blank between
  // different words can be skipped.
  const states = [blank, ...target.flatMap((token) => [token, blank])];
  const before = (values, state, steps) => values[state - steps] ?? -Infinity;
  let forward = states.map((token, state) => (state < 2 ? logProbs[0][token] : -Infinity));
  for (const row of logProbs.slice(1)) {
    forward = states.map((token, state) => {
      const maySkip = token !== blank && token !== states[state - 2];
      const skipped = maySkip ? before(forward, state, 2) : -Infinity;
      return logSumExp([forward[state], before(forward, state, 1), skipped]) + row[token];
    });
  }
  return logSumExp(forward.slice(-2)); // it ends in the last word or in the blank after it
}

/** Return log P of each token. */
function logSoftmax(logits) {
  const sum = logSumExp(logits);
  return Array.from(logits, (logit) => logit - sum);
}

/** Return up to k targets {tokens, logProb, score} that a search finds, best first by log P plus `bonus` for each word. */
export function searchTargets(logits, config, { beams, bonus = 0, limit = Infinity, suppressed = [] }) {
  const { pad_token_id: blank } = config;
  const excluded = [...excludedTokens(config, suppressed), blank];
  const logProbs = logits.map(logSoftmax);
  const count = Math.max(BEST_TOKENS, beams);
  const slots = logits.map((row, slot) => ({
    words: topContinuations(row, [0], count, excluded).map(({ token, logProb }) => ({ token, probability: Math.exp(logProb) })),
    blank: Math.exp(logProbs[slot][blank]),
  }));
  const targets = prefixBeamSearch(slots, beams, bonus, limit).map((tokens) => {
    const logProb = targetLogProb(logProbs, tokens, blank); // the search may have dropped some alignments
    return { tokens, logProb, score: logProb + bonus * tokens.length };
  });
  return targets.sort((a, b) => b.score - a.score);
}

/** Return the target of the most likely path {tokens, logProb, path}; `tokens` are words only, without </s>. */
export function targetOfBestPath(logits, config, suppressed = []) {
  const best = bestPath(logits, config, suppressed);
  const path = best.map(({ token }) => token);
  const logProb = best.reduce((sum, slot) => sum + slot.logProb, 0);
  return { tokens: collapse(path, config.pad_token_id), logProb, path };
}
