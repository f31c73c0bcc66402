/**
 * CTC: all words in one pass, without predicting a length (Libovický and Helcl 2018, Gu and Kong 2021), as in ctc.py.
 *
 * The decoder is the paper's, but every position sees all of them. It has `upsampling` slots per source token, and
 * predicts a word or the blank, <pad>, at each. Such a path collapses to a target.
 *
 * S source tokens, U slots, V vocabulary.
 */
import { joinRows, splitRows } from "./matrix.js";
import { range } from "./transformer.js";

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

/** Return the most likely token of each slot and its log-probability; only words and the blank can be in a path. */
export function bestPath(logits, config, suppressed = []) {
  const { pad_token_id: blank, bos_token_id: start, decoder_start_token_id: first, eos_token_id: ends } = config;
  const excluded = new Set([start, first, ends, suppressed].flat());
  excluded.delete(blank);
  return logits.map((row) => {
    let token = blank, max = -Infinity, sum = 0;
    for (let other = 0; other < row.length; other++) {
      max = Math.max(max, row[other]);
      if (row[other] > row[token] && !excluded.has(other)) token = other;
    }
    for (const logit of row) sum += Math.exp(logit - max);
    return { token, logProb: row[token] - max - Math.log(sum) };
  });
}

/** Return the target of a path of tokens: equal neighbors become one token, then the blanks are removed. */
export function collapse(path, blank) {
  return path.filter((token, slot) => token !== path[slot - 1] && token !== blank);
}

/** Return the target of the most likely path {tokens, logProb, path}; `tokens` are words only, without </s>. */
export function translateByCtc(model, source, { suppressed = [] } = {}) {
  const best = bestPath(slotLogits(model, source), model.config, suppressed);
  const path = best.map(({ token }) => token);
  const logProb = best.reduce((sum, slot) => sum + slot.logProb, 0);
  return { tokens: collapse(path, model.config.pad_token_id), logProb, path };
}
