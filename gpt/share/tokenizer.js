// Text to token ids and back, with the ids of gpt/text/tokenizer.py: byte pair encoding.
//
// A token is bytes. Here it is a string with one character for each byte, so that it can be a key of a Map.

class Tokenizer {
  /**
   * @param {object} file
   * @param {string} file.table the tokens by id, each in base64 on a line
   * @param {string} file.words the regular expression of a word; no token goes beyond one
   * @param {string} file.last_word that of a text's end whose tokens may change with what follows
   */
  constructor({ table, words, last_word }) {
    this.ranks = new Map(table.split("\n").map((token, rank) => [atob(token), rank]));
    this.tokens = [...this.ranks.keys(), "<|endoftext|>"];
    this.words = new RegExp(words, "gv");
    this.lastWord = new RegExp(last_word, "v");
    this.eot = this.ranks.size;
  }

  // The ids of a text.
  encode(text) {
    if (!text.isWellFormed()) throw new Error("the text has half a character (a lone surrogate): remove it");
    const words = text.match(this.words) ?? [];
    return words.flatMap(word => this.encodeWord(byteString(word)));
  }

  // The ids of a word, which is a string of bytes: of all pairs, that with the lowest rank is merged first.
  encodeWord(word) {
    const rank = this.ranks.get(word);
    if (rank !== undefined) return [rank];
    const parts = [...word];
    const rankOfPair = i => this.ranks.get(parts[i] + parts[i + 1]) ?? Infinity;
    const ranks = parts.slice(1).map((_, i) => rankOfPair(i));  // of each part with the next one
    for (;;) {
      const lowest = ranks.reduce((least, rank) => Math.min(least, rank), Infinity);
      if (lowest === Infinity) return parts.map(part => this.ranks.get(part));
      const i = ranks.indexOf(lowest);
      parts.splice(i, 2, parts[i] + parts[i + 1]);
      ranks.splice(i, 1);
      // Only the new part's pairs have changed: with the part before it and with that after it.
      if (i > 0) ranks[i - 1] = rankOfPair(i - 1);
      if (i < ranks.length) ranks[i] = rankOfPair(i);
    }
  }

  // The bytes of a token.
  bytes(id) {
    return bytesOf(this.tokens[id]);
  }

  // The text of a token; if it is part of a character, its bytes as `bytes:\xf0\x9f`.
  name(id) {
    const bytes = this.bytes(id);
    try {
      return newDecoder({ fatal: true }).decode(bytes);
    } catch {
      return "bytes:" + Array.from(bytes, byte => "\\x" + byte.toString(16).padStart(2, "0")).join("");
    }
  }

  /**
   * The ids after which the model replies, as `Template.prompt` in gpt/text/template.py has them.
   * @param {Object<string, string>} template for each role a text with {content}
   * @param {{role: string, content: string}[]} messages
   */
  conversation(template, messages) {
    const ids = [this.eot];
    let before = "";  // text that is not encoded yet
    for (const { role, content } of messages) {
      const [opening, closing] = template[role].split("{content}");
      before += opening;
      if (role === "assistant") {
        ids.push(...this.encode(before), ...this.encode(content), this.eot);
        before = "";
      } else {
        before += content + closing;
      }
    }
    const opening = template.assistant.replace("{content}", "");
    ids.push(...this.encode(before + opening));
    return ids;
  }
}

// Turns ids into pieces of text that never have to be taken back, as gpt/generation/text.py does. Bytes wait
// until they are a whole character. Text waits while it may be the beginning of the string that ends it.
class TextStream {
  /**
   * @param {Tokenizer} tokenizer
   * @param {string} [stop] the text ends before this string, and `stopped` is true then
   */
  constructor(tokenizer, stop) {
    this.tokenizer = tokenizer;
    this.stop = stop;
    this.stopped = false;
    this.held = "";
    this.decoder = newDecoder();
  }

  // Add a token, without its first `typed` bytes: these belong to the prompt. Return the text that is
  // complete.
  feed(id, typed = 0) {
    if (id === this.tokenizer.eot) return "";
    return this.release(this.decode(this.tokenizer.bytes(id).subarray(typed)));
  }

  // Add a token of the prompt, or its first `typed` bytes. A stop string has no effect in the prompt.
  echo(id, typed) {
    if (id === this.tokenizer.eot) return "";
    return this.decode(this.tokenizer.bytes(id).subarray(0, typed));
  }

  // The rest of the text, after the last token.
  close() {
    const text = this.release(this.decoder.decode());
    return text + this.held;
  }

  decode(bytes) {
    return this.decoder.decode(bytes, { stream: true });
  }

  release(text) {
    if (this.stopped) return "";
    if (!this.stop) return text;
    const waiting = this.held + text;
    let end = waiting.indexOf(this.stop);
    this.stopped = end >= 0;
    if (!this.stopped) {
      end = Math.max(0, waiting.length - this.stop.length + 1);
      while (!this.stop.startsWith(waiting.slice(end))) end++;
    }
    this.held = this.stopped ? "" : waiting.slice(end);
    return waiting.slice(0, end);
  }
}

const bytesOf = string => Uint8Array.from(string, character => character.charCodeAt(0));
const byteString = text => {
  const bytes = new TextEncoder().encode(text);
  return Array.from(bytes, byte => String.fromCharCode(byte)).join("");
};
// For a decoder U+FEFF is a character as others. With `fatal` it throws where bytes are no whole character.
const newDecoder = ({ fatal = false } = {}) => new TextDecoder("utf-8", { ignoreBOM: true, fatal });
