/** What a reader should know about a translation. */

const REPEATED_TOKENS = 12; // at the end of a target, of one n-gram: the model runs in a circle
const PERIODS = [3, 4]; // a period of 1 or 2 is one of 4 too

const known = new WeakMap();

const isOfBytes = (tokenizer) => tokenizer.encoding.unknown === undefined;

/** Return the characters of normalized texts that the tokens of a vocabulary contain whole. */
function knownCharacters(tokenizer) {
  if (!known.has(tokenizer)) {
    const texts = isOfBytes(tokenizer) ? tokenizer.tokens.map((_, id) => tokenizer.decode([id])) : tokenizer.tokens;
    known.set(tokenizer, new Set(texts.flatMap((text) => [...text])));
  }
  return known.get(tokenizer);
}

/** Return a sentence on the characters of a source that no token contains, or "". */
export function unknownNote(tokenizer, source) {
  const characters = [...new Set(tokenizer.normalize(source).replace(/\s/gu, ""))];
  if (!characters.some((character) => character > "\x7f")) return "";
  const unknown = characters.filter((character) => character > "\x7f" && !knownCharacters(tokenizer).has(character));
  if (unknown.length === 0) return "";
  const way = isOfBytes(tokenizer) ? "only as bytes" : "not at all";
  return `The vocabulary has ${unknown.join(" ")} ${way}, so the translation of such characters is a guess.`;
}

/** Return a sentence on a target that does not end, or "". */
export function unfinishedNote(tokens, ends) {
  const words = tokens.filter((token) => !ends.includes(token));
  const tail = words.slice(-REPEATED_TOKENS);
  const repeats = tail.length === REPEATED_TOKENS
    && PERIODS.some((period) => tail.slice(period).every((token, index) => token === tail[index]));
  if (words.length === tokens.length) return `The translation does not end: it was cut at ${tokens.length} tokens.`;
  return repeats ? "The translation repeats itself: the model ran in a circle." : "";
}
