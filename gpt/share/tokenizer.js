// Text to ids and back, with the ids of gpt/text/tokenizer.py. A token is a string with a character for each byte.

class Tokenizer {
  // `table`: the tokens by id, each in base64 on a line; `words`: the regular expression that merges do not cross;
  // `last_word`: that of the end of a text whose tokens may change with what follows.
  constructor({ table, words, last_word }) {
    this.ranks = new Map(table.split("\n").map((token, rank) => [atob(token), rank]));
    this.tokens = [...this.ranks.keys(), "<|endoftext|>"];
    this.words = new RegExp(words, "gv");
    this.lastWord = new RegExp(last_word, "v");
    this.eot = this.ranks.size;
  }

  encode(text) {
    if (!text.isWellFormed()) throw new Error("the text has half a character (a lone surrogate): remove it");
    return (text.match(this.words) ?? []).flatMap(word => this.merged(letters(word)));
  }

  // The ids of a word of such letters: the pair whose token has the lowest rank is merged first.
  merged(word) {
    const parts = [...word], whole = this.ranks.get(word);
    if (whole !== undefined) return [whole];
    for (;;) {
      const ranks = parts.slice(1).map((part, i) => this.ranks.get(parts[i] + part) ?? Infinity);
      const least = ranks.reduce((one, other) => Math.min(one, other), Infinity), at = ranks.indexOf(least);
      if (least === Infinity) return parts.map(part => this.ranks.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  bytes(id) { return Uint8Array.from(this.tokens[id], letter => letter.charCodeAt(0)); }

  // The text of a token; part of a character as `bytes:\xf0\x9f`.
  name(id) {
    const bytes = this.bytes(id), text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
    if (!text.includes("\ufffd")) return text;
    return "bytes:" + Array.from(bytes, byte => "\\x" + byte.toString(16).padStart(2, "0")).join("");
  }

  // The ids that a reply to the messages follows: gpt/text/template.py, `Template.prompt`.
  conversation(template, messages) {
    const ids = [this.eot];
    let before = "";
    for (const { role, content } of messages) {
      const [opening, closing] = template[role].split("{content}");
      before += opening;
      if (role === "assistant") {
        ids.push(...this.encode(before), ...this.encode(content), this.eot);
        before = "";
      } else before += content + closing;
    }
    return [...ids, ...this.encode(before + template.assistant.replace("{content}", ""))];
  }
}

// A character for each byte of a text.
const letters = text => Array.from(new TextEncoder().encode(text), byte => String.fromCharCode(byte)).join("");

// Turns ids into pieces of text that never have to be taken back: gpt/generation/text.py.
class TextStream {
  constructor(tokenizer, stop) {
    Object.assign(this, { tokenizer, stop, held: "", stopped: false });
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  // So many bytes at the beginning are typed: they are the prompt's, and left out.
  feed(id, typed = 0) {
    if (id === this.tokenizer.eot) return "";
    return this.release(this.decoder.decode(this.tokenizer.bytes(id).subarray(typed), { stream: true }));
  }

  // The text after a token of the prompt, or after `typed` bytes of it.
  echo(id, typed) {
    if (id === this.tokenizer.eot) return "";
    return this.decoder.decode(this.tokenizer.bytes(id).subarray(0, typed), { stream: true });
  }

  close() { return this.release(this.decoder.decode()) + this.held; }

  // Text waits while it may be the beginning of the string that ends it.
  release(text) {
    if (this.stopped || !this.stop) return this.stopped ? "" : text;
    text = this.held + text;
    let known = text.indexOf(this.stop);
    this.stopped = known >= 0;
    if (!this.stopped) {
      known = Math.max(0, text.length - this.stop.length + 1);
      while (!this.stop.startsWith(text.slice(known))) known++;
    }
    this.held = this.stopped ? "" : text.slice(known);
    return text.slice(0, known);
  }
}
