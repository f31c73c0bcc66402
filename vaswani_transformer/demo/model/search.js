/**
 * The paper's beam search (6.1; Wu et al. 2016, section 7) and greedy search, by any model, as in search.py.
 *
 * A search knows a model by two calls: `step`, from the last tokens of the beams to logits, and `reorder` of beams. It
 * is a generator: it yields the candidates of each step, so that a page can draw them, and returns the n best targets.
 *
 * k beams, n targets to return, V vocabulary. A target is {tokens, parents, logProb, score}: its tokens after the
 * prompt, the beam that each of them continued, log P(Y | X), and log P / lp.
 */

/** The paper's search: beam size 4, lp(Y) with alpha 0.6, at most source length + 50 tokens (6.1). */
const PAPER = {
  beams: 4, // k; 1 for greedy search
  alpha: 0.6, // exponent of the length penalty
  penalty: "gnmt", // or "power", see lengthPenalty
  maxTokens: Infinity, // of a target, after the prompt
  maxSourceRelative: 50, // tokens that a target may be longer than the source; null for no limit
  returned: 1, // n, at most k
  earlyStopping: false, // true: stop at k finished targets; false or "never": when no beam can enter the n best
  suppressed: [], // tokens that are never predicted
  prefix: [], // tokens that every target begins with
};

const TRANSFORMERS_MAX_LENGTH = 20; // its default, which its trainer saves, so it limits nothing

/** Return the options of a search that a generation_config.json sets. */
export function savedOptions(saved) {
  const relative = saved.max_source_relative_length;
  const hasLimit = saved.max_new_tokens != null || relative != null;
  const givesWay = hasLimit || saved.max_length === TRANSFORMERS_MAX_LENGTH;
  const maxLength = givesWay ? null : saved.max_length;
  const options = {
    beams: saved.num_beams ?? 1,
    alpha: saved.length_penalty ?? 1,
    penalty: saved.length_penalty_type ?? "power",
    maxTokens: saved.max_new_tokens ?? (maxLength == null ? undefined : maxLength - 1), // without the start token
    maxSourceRelative: hasLimit || maxLength != null ? (relative ?? null) : undefined,
    earlyStopping: saved.early_stopping ?? undefined,
    suppressed: saved.suppress_tokens ?? undefined,
    bonus: saved.length_bonus ?? undefined, // of CTC
    start: saved.decoder_start_token_id ?? saved.bos_token_id ?? undefined,
    ends: saved.eos_token_id ?? undefined,
  };
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
}

/** Return lp(Y) = ((5 + |Y|) / 6)^alpha for "gnmt" (6.1), |Y|^alpha for "power". */
export const lengthPenalty = (length, { alpha, penalty }) => (penalty === "gnmt" ? (5 + length) / 6 : length) ** alpha;

/**
 * Return the `count` most likely continuations {logProb, parent, token} of the beams by one token, best first.
 *
 * `logits` are (k, V), `before` the log P of each beam.
 */
export function topContinuations(logits, before, count, suppressed = []) {
  const size = logits.length / before.length;
  const best = [];
  for (let parent = 0; parent < before.length; parent++) {
    const row = logits.subarray(parent * size, (parent + 1) * size);
    let max = -Infinity, sum = 0;
    for (let token = 0; token < size; token++) if (row[token] > max) max = row[token];
    for (let token = 0; token < size; token++) sum += Math.exp(row[token] - max);
    const shift = before[parent] - max - Math.log(sum); // from a logit to log P

    let least = best.length === count ? best[count - 1].logProb : -Infinity;
    for (let token = 0; token < size; token++) {
      const logProb = row[token] + shift;
      if (!(logProb > least) || suppressed.includes(token)) continue;
      const rank = best.findIndex((other) => other.logProb < logProb);
      best.splice(rank < 0 ? best.length : rank, 0, { logProb, parent, token });
      if (best.length > count) best.pop();
      if (best.length === count) least = best[count - 1].logProb;
    }
  }
  return best;
}

/** Read a prompt, but for its last token, and return the beam that the search continues. */
function readPrompt(decoder, prompt) {
  prompt.slice(0, -1).forEach((token) => decoder.step([token]));
  return { tokens: [], parents: [], logProb: 0, last: prompt.at(-1) };
}

/** Return the targets of one more token, best first; `isFinished` if it is an end token or the last by the limit. */
function continueBeams(decoder, beams, count, length, settings) {
  const { logits } = decoder.step(beams.map(({ last }) => last));
  const continuations = topContinuations(logits, beams.map(({ logProb }) => logProb), count, settings.suppressed);
  if (continuations.length === 0) {
    throw new Error("logits: NaN, so no target has a score. Use float32, and check that the weights are finite.");
  }
  return continuations.map(({ logProb, parent, token }) => ({
    tokens: [...beams[parent].tokens, token],
    parents: [...beams[parent].parents, parent],
    logProb,
    score: logProb / lengthPenalty(length, settings),
    last: token,
    isFinished: settings.ends.includes(token) || length >= settings.limit,
    isKept: false,
  }));
}

/** Return whether an open beam can still enter the n best targets, or the k best under "power". */
function canImprove(open, finished, length, settings) {
  const { beams: k, alpha, penalty, returned: n, limit, earlyStopping } = settings;
  if (open.length === 0) return false;
  if (earlyStopping === true && finished.length >= k) return false;
  const isGnmt = penalty === "gnmt";
  const worst = finished[(isGnmt ? n : k) - 1];
  if (worst === undefined) return true;

  // log P can only decrease, so the bound is the best open beam's at the length with the largest penalty. Under "power"
  // it is that of the current length, as in Transformers, unless `earlyStopping` is "never".
  const usesLimit = alpha > 0 && (isGnmt || earlyStopping === "never");
  const longest = usesLimit ? limit : length + (isGnmt ? 1 : 0);
  return open[0].logProb / lengthPenalty(longest, settings) > worst.score;
}

/** Search the n best targets that begin with `prompt`; fewer if there are not as many. */
export function* beamSearch(decoder, prompt, settings) {
  const { beams: k, returned: n } = settings;
  const count = Math.max(2, 1 + settings.ends.length) * k; // each beam can end in each end token, and k stay open
  let open = [readPrompt(decoder, prompt)];
  let finished = [];
  for (let length = 1; ; length++) {
    const candidates = continueBeams(decoder, open, count, length, settings);
    // Those among the k best that are finished are targets; the k best of the others are the new beams.
    open = candidates.filter(({ isFinished }) => !isFinished).slice(0, k);
    const ended = candidates.slice(0, k).filter(({ isFinished }) => isFinished);
    for (const candidate of [...open, ...ended]) candidate.isKept = true;
    finished = [...finished, ...ended].sort((a, b) => b.score - a.score).slice(0, k);
    yield candidates;
    if (!canImprove(open, finished, length, settings)) return finished.slice(0, n);
    decoder.reorder(open.map(({ parents }) => parents.at(-1)));
  }
}

/** Take the most likely token of each step, until it is an end token or the limit is reached. */
export function* greedySearch(decoder, prompt, settings) {
  let target = readPrompt(decoder, prompt);
  for (let length = 1; ; length++) {
    const candidates = continueBeams(decoder, [target], 2, length, settings);
    [target] = candidates;
    target.isKept = true;
    yield candidates;
    if (target.isFinished) return [target];
  }
}

/** Return the settings of a search for a source's targets: the paper's, but for `options`, with limit and tokens. */
export function searchSettings(config, sourceLength, options = {}) {
  const tokens = { start: config.decoder_start_token_id ?? config.bos_token_id, ends: config.eos_token_id };
  const settings = { ...PAPER, ...tokens, ...options };
  settings.ends = [settings.ends ?? []].flat(); // a token, a list of tokens, or null
  settings.prompt = [settings.start, ...settings.prefix];
  const relative = settings.maxSourceRelative === null ? Infinity : sourceLength + settings.maxSourceRelative;
  settings.limit = Math.min(settings.maxTokens, relative);
  if (config.position_embedding === "learned") { // the last token is not read, so it needs no position
    settings.limit = Math.min(settings.limit, config.max_position_embeddings + 1 - settings.prompt.length);
  }
  return settings;
}

/** Search the targets of a source's tokens step by step; `options` are those of `PAPER`. */
export function* searchSteps(model, source, options = {}) {
  const settings = searchSettings(model.config, source.length, options);
  const decoder = model.decoder(model.encode(source).memory);
  const search = settings.beams === 1 ? greedySearch : beamSearch;
  return yield* search(decoder, settings.prompt, settings);
}

/** Return what a generator returns. */
export function finish(steps) {
  for (;;) {
    const { value, done } = steps.next();
    if (done) return value;
  }
}

/** Return the n best targets of a source's tokens, best first. */
export const translate = (model, source, options = {}) => finish(searchSteps(model, source, options));
