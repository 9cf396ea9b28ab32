// A typed text may end inside a token, and is continued as if it did not: gpt/generation/healing.py.

const MOST_TYPED = 64;  // bytes that are taken back, unless one token has more
const LONGEST_WORD = 65;  // characters of a text's end in which its last word is looked for

// A typed text as ids: those that stay, and its last word with all ways to cut it, if there are several.
function typedPrompt(tokenizer, text) {
  const ids = tokenizer.encode(text), found = text.slice(-LONGEST_WORD).match(tokenizer.lastWord);
  const size = found ? letters(found[0]).length : 0;
  let place = ids.length;
  for (let taken = 0; place > 0 && taken < size; place--) {
    taken += tokenizer.tokens[ids[place - 1]].length;
    if (taken > MOST_TYPED && place < ids.length) break;
  }
  const word = ids.slice(place), ways = waysToCut(tokenizer, word.map(id => tokenizer.tokens[id]).join(""));
  const start = kept => kept.length ? kept : [tokenizer.eot];
  if (ways.reduce((sum, way) => sum + way.ids.length, 0) < 2) return { ids: start(ids) };
  const longest = ways.reduce((most, way) => Math.max(most, way.before.length), 0) + 1;
  return { ids: start(ids.slice(0, place)), ending: { word, ways, longest, isAll: place === 0 } };
}

// By where the token begins that has the word's end: the tokens before it, what it can be, which of these is the
// word's end and nothing more, and how many bytes of the others are the word's.
function waysToCut(tokenizer, word) {
  const ways = [];
  for (let place = 0; place < word.length; place++) {
    const start = word.slice(0, place), rest = word.slice(place), before = tokenizer.merged(start), ids = [];
    for (let id = 0; id < tokenizer.eot; id++) {
      const token = tokenizer.tokens[id];
      if (token.startsWith(rest) && (!place || canFollow(tokenizer, start, before, rest, token))) ids.push(id);
    }
    if (ids.length) ways.push({ before, ids, end: ids.find(id => tokenizer.tokens[id] === rest), typed: rest.length });
  }
  return ways;
}

// Whether the tokenizer gives `before` and then this token in some text.
function canFollow(tokenizer, start, before, rest, token) {
  if (isBlank(start) && isBlank(rest) && rest.length === 1) {
    // What is no blank takes the last of several, if that is a space, into its word, else leaves it as it is.
    if (rest === " " ? !isBlank(token) : token === rest) return true;
  }
  if (tokenizer.ranks.has(start + token)) return false;
  const pair = tokenizer.merged(tokenizer.tokens[before.at(-1)] + token);
  return pair.length === 2 && pair[0] === before.at(-1) && tokenizer.tokens[pair[1]] === token;
}

const isBlank = word => /^\p{White_Space}+$/v.test(new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(word, letter => letter.charCodeAt(0))));

// Draw one of the ways. `logProbabilities(before)` are those (V) of the token after some of the word's; `seen` are
// the ids whose repetition is penalized, where they add something to the text.
async function drawWay(ending, settings, seen, number, logProbabilities) {
  const choices = [], weights = [];
  for (const way of ending.ways) {
    let common = 0;
    for (const [place, id] of way.before.entries()) common += (await logProbabilities(way.before.slice(0, place)))[id];
    const last = await logProbabilities(way.before);
    for (const id of way.ids) { choices.push({ way, id }); weights.push(common + last[id]); }
  }
  const penalized = [...choices.keys()].filter(k => choices[k].id !== choices[k].way.end && seen.includes(choices[k].id));
  const { way, id } = choices[draw(weights, settings, penalized, number)];
  return id === way.end ? { prompt: [...way.before, id], typed: 0 } : { prompt: way.before, first: id, typed: way.typed };
}
