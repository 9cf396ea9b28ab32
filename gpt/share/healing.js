// Token healing, as in gpt/generation/healing.py: a typed text may end inside a token, and is continued as if
// it did not. Text that follows can change only the tokens of the last word. So these are removed, and drawn
// again from the tokens that agree with the typed bytes.
//
// Words and tokens are strings of bytes, as in tokenizer.js.

const MOST_REMOVED = 64;  // bytes, unless one token has more
const LONGEST_WORD = 65;  // characters at a text's end that are searched for its last word

/**
 * How many of the last tokens of a typed text are drawn again: those of its last word; 0 if it cannot be cut
 * in another way.
 * @param {Tokenizer} tokenizer
 * @param {string} text
 * @param {number[]} ids the tokens of the text
 */
function tokensOfLastWord(tokenizer, text, ids) {
  const match = text.slice(-LONGEST_WORD).match(tokenizer.lastWord);
  const size = match ? byteString(match[0]).length : 0;
  let place = ids.length;
  let removed = 0;
  while (place > 0 && removed < size) {
    removed += tokenizer.tokens[ids[place - 1]].length;
    if (removed > MOST_REMOVED && place < ids.length) break;
    place--;
  }
  const word = ids.slice(place).map(id => tokenizer.tokens[id]).join("");
  for (let start = 0; start < word.length; start++) {
    if (agreeingIds(tokenizer, word.slice(start)).length > 1) return ids.length - place;
  }
  return 0;
}

// The ids of the tokens that begin with the typed bytes `rest`, or with which `rest` begins.
function agreeingIds(tokenizer, rest) {
  const ids = [];
  for (let id = 0; id < tokenizer.eot; id++) {
    const token = tokenizer.tokens[id];
    if (token.startsWith(rest) || rest.startsWith(token)) ids.push(id);
  }
  return ids;
}
