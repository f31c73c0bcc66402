/** Tokens as labels with all characters visible, as in the package's figures/tokens.py. */

const UNDECODED = "\ufffd";
const INVISIBLE = /[\p{C}\p{Z}]/gu;
const CONTROL = /[\x00-\x1f\x7f-\x9f\u2028\u2029]/g;
const ENDS_WITH_WORD = /[\p{L}\p{N}]$/u;
const BEGINS_WITH_WORD = /^[\p{L}\p{N}]/u;

/** Return a character's escape sequence, such as \x00. */
function escapeCharacter(character) {
  if (character === "\r") return "\\r";
  const code = character.codePointAt(0);
  const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
}

function commonLength(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}

/** Return the label of a token's text: without the space before a word, and with "·" if it continues `before`. */
function displayForm(text, before) {
  let shown = text.startsWith(" ") && text.length > 1 ? text.slice(1) : text;
  shown = shown.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(CONTROL, escapeCharacter);
  if (shown.replace(INVISIBLE, "") === "") shown = shown.replace(INVISIBLE, escapeCharacter);
  return ENDS_WITH_WORD.test(before) && BEGINS_WITH_WORD.test(text) ? `·${shown}` : shown;
}

/** The label of the last token of a target, which follows the label of the target that it continues. */
export class Labels {
  constructor(tokenizer) {
    this.tokenizer = tokenizer;
    this.start = { text: "", complete: "", ids: [] };
  }

  /** Return {label, text, ...} of the target `before` and one more token; `before` is such a result, or `start`. */
  next(before, token) {
    const ids = [...before.ids, token];
    if (this.tokenizer.special.has(token)) {
      return { ids, complete: before.complete, text: "", label: this.tokenizer.tokens[token] };
    }
    const decoded = this.tokenizer.decode(ids);
    const complete = decoded.replace(/\ufffd+$/, ""); // a character of several tokens is the text of the last
    let text = complete.slice(commonLength(before.complete, complete));
    if (complete !== decoded) text += UNDECODED;
    return { ids, complete, text, label: displayForm(text, before.text) || this.tokenizer.tokens[token] };
  }

  /** Return the labels of the tokens of one text. */
  all(ids) {
    let before = this.start;
    return ids.map((id) => {
      before = this.next(before, id);
      return before.label;
    });
  }
}
