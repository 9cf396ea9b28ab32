// Token healing, as in gpt/generation/healing.py: a typed text may end inside a token, and is continued as if
// it did not.
//
// Text that follows can change only the tokens of the last word. So these are removed, and drawn again
// together with the first new token. Each way to cut the word has the probability that the model gives its
// tokens.
//
// Shapes: V vocab_size. Words and tokens are strings of bytes, as in tokenizer.js.
//
// Source: Phan et al. 2024.

const MOST_REMOVED = 64;  // bytes, unless one token has more
const LONGEST_WORD = 65;  // characters at a text's end that are searched for its last word

/**
 * Ways to cut the word that differ only in the last token, which holds the word's end.
 * @typedef {object} Way
 * @property {number[]} before the tokens before the last one
 * @property {number[]} ids what the last token can be
 * @property {number} [end] the id among these whose text ends where the word does
 * @property {number} typed how many bytes of the others belong to the word
 */

/**
 * The last word of a typed text, and all ways to cut it.
 * @typedef {object} Ending
 * @property {number[]} word its tokens as the tokenizer cuts the typed text
 * @property {Way[]} ways
 * @property {number} longest the number of tokens of the longest way
 * @property {boolean} isAll whether the word is all of the text, so that <|endoftext|> takes its place
 */

/**
 * A typed text as the tokens that stay, and its ending if there are several ways to cut it.
 * @param {Tokenizer} tokenizer
 * @param {string} text
 * @returns {{ids: number[], ending?: Ending}}
 */
function typedPrompt(tokenizer, text) {
  const ids = tokenizer.encode(text);
  const place = lastWordsPlace(tokenizer, text, ids);
  const word = ids.slice(place);
  const ways = waysToCut(tokenizer, word.map(id => tokenizer.tokens[id]).join(""));
  const orStart = kept => kept.length ? kept : [tokenizer.eot];
  const choices = ways.reduce((count, way) => count + way.ids.length, 0);
  if (choices < 2) return { ids: orStart(ids) };
  const longest = Math.max(...ways.map(way => way.before.length)) + 1;
  return { ids: orStart(ids.slice(0, place)), ending: { word, ways, longest, isAll: place === 0 } };
}

// The place in `ids`, the tokens of a text, where those of its last word begin.
function lastWordsPlace(tokenizer, text, ids) {
  const match = text.slice(-LONGEST_WORD).match(tokenizer.lastWord);
  const size = match ? byteString(match[0]).length : 0;
  let place = ids.length;
  let removed = 0;
  while (place > 0 && removed < size) {
    removed += tokenizer.tokens[ids[place - 1]].length;
    if (removed > MOST_REMOVED && place < ids.length) break;
    place--;
  }
  return place;
}

// All ways to cut a word, by the place in it where the last token begins.
function waysToCut(tokenizer, word) {
  const ways = [];
  for (let place = 0; place < word.length; place++) {
    const start = word.slice(0, place);
    const rest = word.slice(place);
    const before = tokenizer.encodeWord(start);
    const ids = [];
    for (let id = 0; id < tokenizer.eot; id++) {
      const token = tokenizer.tokens[id];
      if (!token.startsWith(rest)) continue;
      if (place === 0 || canFollow(tokenizer, start, before, rest, token)) ids.push(id);
    }
    const end = ids.find(id => tokenizer.tokens[id] === rest);
    if (ids.length) ways.push({ before, ids, end, typed: rest.length });
  }
  return ways;
}

// Whether the tokenizer gives `before`, the tokens of `start`, and then this token, which begins with `rest`,
// for some text.
function canFollow(tokenizer, start, before, rest, token) {
  if (isBlank(start) && isBlank(rest) && rest.length === 1) {
    // After several blanks, the next word takes the last one if it is a space. Another blank does not join
    // a word.
    const staysApart = rest === " " ? !isBlank(token) : token === rest;
    if (staysApart) return true;
  }
  // The tokens stay apart if neither the two neighbours merge nor the whole text is one token.
  if (tokenizer.ranks.has(start + token)) return false;
  const last = before.at(-1);
  const pair = tokenizer.encodeWord(tokenizer.tokens[last] + token);
  return pair.length === 2 && pair[0] === last && tokenizer.tokens[pair[1]] === token;
}

const isBlank = word => /^\p{White_Space}+$/v.test(newDecoder().decode(bytesOf(word)));

/**
 * Draw one of the ways.
 * @param {Ending} ending
 * @param {Sampling} settings
 * @param {number[]} seen ids whose repetition is penalized where they add something to the text
 * @param {number} number a random number in [0, 1)
 * @param {function(number[]): Promise<Float32Array>} logProbabilities those (V) of the token after the first
 *     tokens of the word
 * @returns {Promise<{prompt: number[], first?: number, typed: number}>} the prompt's last tokens, and the
 *     first new token if its first `typed` bytes belong to the prompt
 */
async function drawWay(ending, settings, seen, number, logProbabilities) {
  const choices = [];
  const weights = [];  // the log-probability of each choice
  for (const way of ending.ways) {
    let common = 0;
    for (const [place, id] of way.before.entries()) {
      const next = await logProbabilities(way.before.slice(0, place));
      common += next[id];
    }
    const last = await logProbabilities(way.before);
    for (const id of way.ids) {
      choices.push({ way, id });
      weights.push(common + last[id]);
    }
  }
  const isPenalized = ({ way, id }) => id !== way.end && seen.includes(id);
  const penalized = [...choices.keys()].filter(index => isPenalized(choices[index]));
  const { way, id } = choices[draw(weights, settings, penalized, number)];
  if (id === way.end) return { prompt: [...way.before, id], typed: 0 };
  return { prompt: way.before, first: id, typed: way.typed };
}
