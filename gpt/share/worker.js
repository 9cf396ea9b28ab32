// What answers the page in place of a server: the same requests, for the model in a file.

const LIKELIEST = 5;  // alternatives of a token
const SHORTEST = 12;  // tokens that count as copied
const windowStart = (length, context) => {
  const shift = Math.max(1, context >> 1);
  return Math.max(0, Math.ceil((length - context) / shift) * shift);
};
const pause = () => new Promise(resume => {  // until the messages that came meanwhile are read; a timeout takes longer
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); resume(); };
  port2.postMessage(null);
});

class Writer {
  // `file`: what gpt/share/file.py writes before the blocks of weights.
  constructor(file) {
    const end = file.blocks.reduce((sum, block) => sum + block.bytes, 0);
    this.file = file;
    this.tokenizer = new Tokenizer(file);
    this.model = new Model(file, end);
    this.size = end * this.model.growth / file.models.length;  // of a model, in bytes of memory
    this.held = [];  // the ids in the model's cache
    this.turn = Promise.resolve();  // one text is read at a time
    this.loaded = 0;  // bytes of memory
  }

  // Take the next block, in base64.
  load({ text, index }) {
    const { bytes, sum } = this.file.blocks[index], block = new Uint8Array(bytes);
    let data = "";
    try { data = atob(text); } catch { /* its length tells */ }
    for (let i = 0; i < bytes; i++) block[i] = data.charCodeAt(i);
    if (data.length !== bytes || adler32(block) !== sum) throw new Error("This file is damaged or incomplete: get it again.");
    const loaded = this.model.growth === 1 ? block : fromHalf(new Uint16Array(block.buffer));
    new loaded.constructor(this.model.bytes.buffer, this.loaded, loaded.length).set(loaded);
    this.loaded += loaded.byteLength;
  }

  // The logits (V) of the token after the ids under the model of a snapshot; null if it is `stopped` before. The
  // weights of the last id are added to `weights`.
  async read(ids, snapshot, { weights, stopped } = {}) {
    const before = this.turn;
    let done;
    this.turn = new Promise(resolve => { done = resolve; });
    await before;
    try {
      const base = this.size * this.file.models.findIndex(one => one.step === (snapshot ?? null));
      if (this.model.base !== base) this.held = [];
      this.model.base = base;
      ids = ids.slice(windowStart(ids.length, this.model.context_length));
      const known = ids.findIndex((id, i) => id !== this.held[i]), last = ids.length - 1;
      let logits = null;
      for (let at = known < 0 ? last : Math.min(known, last); at <= last && !stopped?.(); at++) {
        if (this.held[at] !== ids[at]) this.held = [...this.held.slice(0, at), ids[at]];
        logits = this.model.forward(ids[at], at, at === last, at === last ? weights : null);
        await pause();
      }
      return logits?.slice() ?? null;
    } finally { done(); }
  }

  // Yields the choices of a completion as the server streams them.
  async *complete(form, stopped) {
    const { prompt, snapshot, echo, stop, max_tokens, seed = Math.floor(Math.random() * 2 ** 52) } = form;
    if (!Number.isInteger(seed)) throw new Error(`the seed must be a whole number, got ${seed}`);
    const ids = this.ids(prompt, []), random = generator(seed), text = new TextStream(this.tokenizer, stop);
    const most = ids.length + max_tokens;
    for (let at = echo ? 0 : ids.length, finish = null; !finish; at++) {
      const echoed = at < ids.length, logits = at > 0 ? await this.read(ids.slice(0, at), snapshot, { stopped }) : null;
      if (stopped()) return;
      if (!echoed) ids.push(draw(logits, form, ids, random()));
      if (!echoed && ids[at] === this.tokenizer.eot) finish = "stop";
      let piece = text.feed(ids[at], echoed);
      if (text.stopped) finish = "stop";
      else if (at + 1 >= most) finish ??= "length";
      if (finish) piece += text.close();
      yield { text: piece, logprobs: this.scores(ids[at], logits), finish_reason: finish };
    }
  }

  // The log-probabilities of a token and of the likeliest ones, in the form of the server.
  scores(id, logits) {
    const { tokenizer } = this, scored = { tokens: [tokenizer.name(id)], token_ids: [id], token_logprobs: [null], top_logprobs: [null] };
    if (!logits) return scored;
    const most = logits.reduce((one, other) => Math.max(one, other), -Infinity);
    const total = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
    const edge = logits.slice().sort()[Math.max(0, logits.length - LIKELIEST)];
    const likeliest = [...logits.keys()].filter(other => logits[other] >= edge);
    const top = [...likeliest.sort((one, other) => logits[other] - logits[one]).slice(0, LIKELIEST), id];
    scored.token_logprobs = [logits[id] - total];
    scored.top_logprobs = [Object.fromEntries(top.map(other => [tokenizer.name(other), logits[other] - total]))];
    return scored;
  }

  ids(prompt, more) {
    const ids = [...typeof prompt === "string" ? this.tokenizer.encode(prompt) : prompt, ...more];
    return ids.length ? ids : [this.tokenizer.eot];
  }

  async attention({ prompt, tokens, snapshot }) {
    const ids = this.ids(prompt, tokens), weights = [], decoder = new TextDecoder();
    await this.read(ids, snapshot, { weights });
    const seen = ids.slice(windowStart(ids.length, this.model.context_length));
    return { tokens: seen.map(id => decoder.decode(this.tokenizer.bytes(id))), weights };
  }

  about() { return { id: this.file.name, chat: this.file.template !== null, copied: this.file.text !== null }; }

  training() {
    const snapshots = this.file.models.slice(1), train = snapshots.filter(one => one.loss !== null).map(one => [one.step, one.loss]);
    return { snapshots: snapshots.map(one => one.step), train };
  }

  conversation({ messages }) { return { tokens: this.tokenizer.conversation(this.file.template, messages) }; }

  // The longest runs [start, end) of the tokens that stand in the training text, and are long enough.
  copied({ tokens }) {
    const letters = String.fromCharCode(...tokens.map(id => id < 0xd800 ? id : id + 0x800)), runs = [];  // as `text` has them
    for (let start = 0, last = 0; start + SHORTEST <= letters.length; start++) {
      let end = Math.max(last, start + SHORTEST - 1);
      while (end < letters.length && this.file.text.includes(letters.slice(start, end + 1))) end++;
      if (end > last && end >= start + SHORTEST) runs.push([start, last = end]);
    }
    return { runs };
  }
}

// Answer the messages {id, path, form} of the page with {id, value}, the last of them with `done`.
function answer(port, file) {
  const stopped = new Set();
  let writer;
  port.onmessage = async ({ data: { id, path, form, stop } }) => {
    if (stop) { stopped.add(id); return; }
    try {
      writer ??= new Writer(file);
      if (path === "complete") {
        for await (const value of writer.complete(form, () => stopped.has(id))) port.postMessage({ id, value });
        port.postMessage({ id, done: true });
      } else port.postMessage({ id, value: await writer[path](form), done: true });
    } catch (error) {
      port.postMessage({ id, error: error.message, done: true });
    }
    stopped.delete(id);
  };
}

function adler32(bytes) {
  let low = 1, high = 0;
  for (const byte of bytes) {
    low = (low + byte) % 65521;
    high = (high + low) % 65521;
  }
  return high * 65536 + low;
}

// The bits of a float16 in the place of a float32's give its value, but for the exponents' offset.
function fromHalf(halves) {
  const bits = Uint32Array.from(halves, half => (half & 0x8000) << 16 | (half & 0x7fff) << 13);
  return new Float32Array(bits.buffer).map(value => value * 2 ** 112);
}
