/**
 * The tokenizers of section 5.1, read from tokenizer.json: byte-level BPE and word pieces.
 *
 * A text is normalized and split into words. A word starts as characters, in byte-level BPE as those that stand for its
 * bytes. Then the neighbors that training merged first become one piece, and so on.
 */

const CACHED_WORDS = 10_000;
const CACHED_LENGTH = 100; // in characters; longer words are rare
const CONTROL_TOKENS = new Set(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]);

// The classes \s and \w of the library that trained the tokenizer. JavaScript's \s has U+FEFF and lacks U+0085, and its
// \w has ASCII only. The library counts the fractions and exponents of Latin-1 as part of words.
const SPACE = "\\p{White_Space}";
const WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}²³¹¼½¾";

/** GPT-2's words, each with the space before it. */
const BYTE_LEVEL_WORDS = new RegExp(
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|"
  + ` ?[^${SPACE}\\p{L}\\p{N}]+|[${SPACE}]+(?![^${SPACE}])|[${SPACE}]+`, "gu");

/** The character of each byte: its own if it is printable, else the next one from U+0100. */
const BYTE_CHARACTERS = [];
for (let byte = 0, next = 0x100; byte < 256; byte++) {
  const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  BYTE_CHARACTERS.push(String.fromCharCode(isPrintable ? byte : next++));
}
const BYTES = new Map(BYTE_CHARACTERS.map((character, byte) => [character, byte]));

const escapePattern = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

/** Return the RegExp of a pattern in tokenizer.json. */
function readPattern({ String: text, Regex: pattern }) {
  return new RegExp(text === undefined ? pattern.replaceAll("\\w", `[${WORD}]`) : escapePattern(text), "gu");
}

/** Return the matches of a pattern and the texts between them, in order, without empty ones. */
function splitAt(text, pattern) {
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    pieces.push({ text: text.slice(end, match.index), isMatch: false }, { text: match[0], isMatch: true });
    end = match.index + match[0].length;
  }
  pieces.push({ text: text.slice(end), isMatch: false });
  return pieces.filter((piece) => piece.text !== "");
}

const unknownType = (field, got, types) => new Error(
  `tokenizer.json: unknown ${field}; got ${got}, expected ${types}. Use a tokenizer that this package has trained.`);

/** Raise an error if a part of tokenizer.json has a setting that no tokenizer of this package has. */
function expectSettings(field, description, expected) {
  for (const [name, value] of Object.entries(expected)) {
    const got = description[name] ?? value;
    if (got !== value) throw unknownType(`${field}.${name}`, JSON.stringify(got), JSON.stringify(value));
  }
}

/** Return the function that a field of tokenizer.json describes, by the `table` of its types. */
function choose(field, table, description) {
  const type = description?.type;
  if (!Object.hasOwn(table, type)) throw unknownType(field, type, Object.keys(table).join(", "));
  return table[type](description);
}

/** From a text to the form in which it is split. */
const NORMALIZERS = {
  NFC: () => (text) => text.normalize("NFC"),
  Lowercase: () => (text) => Array.from(text, (character) => character.toLowerCase()).join(""), // each by itself
  Replace: ({ pattern, content }) => {
    const compiled = readPattern(pattern);
    return (text) => text.replace(compiled, () => content);
  },
  Sequence: ({ normalizers }) => {
    const steps = normalizers.map((step) => choose("normalizer", NORMALIZERS, step));
    return (text) => steps.reduce((normalized, apply) => apply(normalized), text);
  },
};

/** From a normalized text to the characters of its words. */
const SPLITTERS = {
  ByteLevel: (description) => {
    expectSettings("pre_tokenizer", description, { add_prefix_space: false, use_regex: true });
    return (text) => (text.match(BYTE_LEVEL_WORDS) ?? []).map(
      (word) => Array.from(new TextEncoder().encode(word), (byte) => BYTE_CHARACTERS[byte]));
  },
  Split: (description) => {
    expectSettings("pre_tokenizer", description, { behavior: "Isolated", invert: false });
    const compiled = readPattern(description.pattern);
    return (text) => splitAt(text, compiled).map((word) => [...word.text]);
  },
};

/** From the tokens of a target to its text. */
const JOINERS = {
  ByteLevel: () => (tokens) => {
    const bytes = tokens.flatMap((token) => {
      const known = Array.from(token, (character) => BYTES.get(character));
      const isBytes = !known.includes(undefined); // else the tag of a user
      return isBytes ? known : [...new TextEncoder().encode(token)];
    });
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  },
  Sequence: ({ decoders }) => {
    const replacements = decoders.filter(({ type }) => type !== "Fuse");
    const steps = replacements.map((step) => choose("decoder", { Replace: NORMALIZERS.Replace }, step));
    return (tokens) => steps.reduce((text, apply) => apply(text), tokens.join(""));
  },
};

/** A priority queue of numbers: the smallest comes first. */
class MinHeap {
  numbers = [];

  push(number) {
    const { numbers } = this;
    let child = numbers.push(number) - 1;
    while (child > 0) {
      const parent = (child - 1) >> 1;
      if (numbers[parent] <= number) break;
      numbers[child] = numbers[parent];
      child = parent;
    }
    numbers[child] = number;
  }

  pop() {
    const { numbers } = this;
    const [smallest] = numbers;
    const last = numbers.pop();
    if (numbers.length === 0) return smallest;
    let parent = 0;
    for (let child = 1; child < numbers.length; child = 2 * parent + 1) {
      if (numbers[child + 1] < numbers[child]) child += 1;
      if (last <= numbers[child]) break;
      numbers[parent] = numbers[child];
      parent = child;
    }
    numbers[parent] = last;
    return smallest;
  }
}

/** Byte-pair encoding (Sennrich et al. 2016): from the characters of a word to the ids of its pieces. */
class BytePairEncoding {
  constructor(description) {
    const { type, vocab, merges, unk_token: unknown, fuse_unk: fusesUnknown } = description;
    if (type !== "BPE") throw unknownType("model", type, "BPE");
    expectSettings("model", description, {
      continuing_subword_prefix: "", end_of_word_suffix: "", byte_fallback: false, ignore_merges: false });
    this.ids = new Map(Object.entries(vocab));
    this.unknown = this.ids.get(unknown);
    this.fusesUnknown = fusesUnknown;

    // Of each pair that training has merged, the rank, smallest first, and the id of the merged piece.
    this.merges = new Map();
    for (const [rank, merge] of merges.entries()) {
      const [left, right] = typeof merge === "string" ? merge.split(" ") : merge;
      this.merges.set(this.key(this.ids.get(left), this.ids.get(right)), { rank, id: this.ids.get(left + right) });
    }
    this.cache = new Map();
  }

  /** Return one number for a pair of ids. */
  key = (left, right) => left * 2 ** 24 + right;

  /** Return the ids of a word's pieces; frequent words are looked up. */
  encode(characters) {
    const word = characters.join("");
    const known = this.cache.get(word);
    if (known !== undefined) return known;
    const ids = this.merge(this.characterIds(characters));
    if (this.cache.size >= CACHED_WORDS) this.cache.clear();
    if (characters.length <= CACHED_LENGTH) this.cache.set(word, ids);
    return ids;
  }

  /** Return the ids of characters; neighbors that the vocabulary lacks become one <unk>, if it has one. */
  characterIds(characters) {
    const ids = [];
    let isAfterUnknown = false;
    for (const character of characters) {
      const id = this.ids.get(character);
      if (id !== undefined) ids.push(id);
      else if (this.unknown !== undefined && !(isAfterUnknown && this.fusesUnknown)) ids.push(this.unknown);
      isAfterUnknown = id === undefined;
    }
    return ids;
  }

  /**
   * Merge the pair of smallest rank, the first of equal ones, until no pair can be merged.
   *
   * A queue holds the pairs, and a merge adds at most two: n pieces take n log n steps.
   */
  merge(ids) {
    const length = ids.length;
    const pieces = [...ids]; // -1: merged into the piece before it
    const previous = ids.map((_, index) => index - 1);
    const next = ids.map((_, index) => index + 1);
    const mergeAt = (index) => this.merges.get(this.key(pieces[index], pieces[next[index]]));
    const queue = new MinHeap();
    const enqueue = (index) => {
      const merge = index >= 0 && next[index] < length ? mergeAt(index) : undefined;
      if (merge !== undefined) queue.push(merge.rank * length + index);
    };

    ids.forEach((_, index) => enqueue(index));
    while (queue.numbers.length > 0) {
      const first = queue.pop();
      const index = first % length;
      const merge = pieces[index] >= 0 && next[index] < length ? mergeAt(index) : undefined;
      if (merge?.rank !== Math.floor(first / length)) continue; // one of its pieces is in a different pair now
      const right = next[index];
      pieces[index] = merge.id;
      pieces[right] = -1;
      next[index] = next[right];
      if (next[right] < length) previous[next[right]] = index;
      enqueue(previous[index]);
      enqueue(index);
    }
    return pieces.filter((id) => id >= 0);
  }
}

/** The tokens that a user has added, such as the language tag <2es>: each is one token wherever a text contains it. */
class Tags {
  constructor(ids) {
    this.ids = ids;
    const longestFirst = [...ids.keys()].sort((a, b) => b.length - a.length);
    this.pattern = ids.size > 0 ? new RegExp(longestFirst.map(escapePattern).join("|"), "gu") : null;
  }

  /** Return the ids of a text: those of tags, and between tags what `encode` returns. */
  encode(text, encode) {
    if (this.pattern === null) return encode(text);
    const pieces = splitAt(text, this.pattern);
    return pieces.flatMap((piece) => (piece.isMatch ? this.ids.get(piece.text) : encode(piece.text)));
  }
}

export class Tokenizer {
  /** Read the contents of a tokenizer.json. */
  constructor({ model, normalizer, pre_tokenizer: splitter, post_processor: template, decoder, added_tokens: added }) {
    this.normalize = choose("normalizer", NORMALIZERS, normalizer);
    this.split = choose("pre_tokenizer", SPLITTERS, splitter);
    this.join = choose("decoder", JOINERS, decoder);
    this.encoding = new BytePairEncoding(model);
    this.template = template?.single ?? [{ Sequence: {} }];

    this.tokens = []; // of each id
    for (const [token, id] of this.encoding.ids) this.tokens[id] = token;
    for (const { id, content, normalized } of added) this.tokens[id] = normalized ? this.normalize(content) : content;
    this.special = new Set(added.filter(({ special }) => special).map(({ id }) => id));

    // Tags are in a text before or after it is normalized; control tokens, such as </s>, are never in a text.
    const tags = added.filter(({ content }) => !CONTROL_TOKENS.has(content));
    for (const tag of tags) expectSettings("added_tokens", tag, { lstrip: false, rstrip: false, single_word: false });
    const mapTags = (chosen, form) => new Tags(new Map(chosen.map(({ id, content }) => [form(content), id])));
    this.tags = mapTags(tags.filter(({ normalized }) => !normalized), (content) => content);
    this.normalizedTags = mapTags(tags.filter(({ normalized }) => normalized), this.normalize);
  }

  /** Return the ids of a text, which ends with </s>; the characters "</s>" in it are four characters. */
  encode(text) {
    const encodeWords = (normalized) => this.split(normalized).flatMap((word) => this.encoding.encode(word));
    const ids = this.tags.encode(text, (piece) => this.normalizedTags.encode(this.normalize(piece), encodeWords));
    return this.template.flatMap((part) => (part.Sequence ? ids : this.tokens.indexOf(part.SpecialToken.id)));
  }

  /** Return the ids of a source, in which Unicode's other spaces, such as the no-break space, count as spaces. */
  encodeSource(text) {
    return this.encode(text.replace(/\p{Zs}/gu, " "));
  }

  /** Return the text of ids, without special tokens, and without ids that no token has. */
  decode(ids) {
    return this.join(ids.filter((id) => !this.special.has(id) && this.tokens[id] !== undefined).map((id) => this.tokens[id]));
  }
}
