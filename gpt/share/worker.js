// What answers the page in place of a server: the same requests, for the model in a file.

const LIKELIEST = 5;  // alternatives of a token
const SHORTEST = 12;  // tokens that count as copied
const BREATH = 20;  // milliseconds after which the messages that came meanwhile are read

class Writer {
  // `file`: what gpt/share/file.py writes before the blocks of weights.
  constructor(file) {
    this.file = file;
    this.tokenizer = new Tokenizer(file);
    this.model = new Model(file, file.bytes);
    this.size = file.bytes * this.model.growth / file.models.length;  // of a model, in bytes of memory
    this.held = [];  // the ids in the model's cache
    this.paused = performance.now();
    this.loaded = 0;  // bytes of memory
  }

  // Take the next block, gzip in base64.
  async load({ text }) {
    try {
      const letters = atob(text), packed = new Uint8Array(letters.length);
      for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);  // Uint8Array.from takes ten times as long
      // Not from a Blob, which a worker of Safari's engine cannot read in a page from the disk.
      const block = await new Response(new Response(packed).body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
      const loaded = this.model.growth === 1 ? new Uint8Array(block) : fromHalf(new Uint16Array(block));
      new loaded.constructor(this.model.bytes.buffer, this.loaded, loaded.length).set(loaded);
      this.loaded += loaded.byteLength;
    } catch { throw new Error("This file is damaged or incomplete: get it again."); }
  }

  // The logits (V) of the token after the ids under the model of a snapshot; null if it is `stopped` before. What
  // takes the weights of the last id, (layers, heads, T), is done at once; else other calls come in between.
  async read(ids, snapshot, { weights, stopped } = {}) {
    const { model } = this, last = ids.length - 1;
    const base = this.size * this.file.models.findIndex(one => one.step === (snapshot ?? null));
    for (let at = 0; at <= last;) {
      if (!weights && performance.now() - this.paused > BREATH) {
        await new Promise(resume => setTimeout(resume));
        this.paused = performance.now();
      }
      if (stopped?.()) return null;
      if (model.base !== base) this.held = [];
      model.base = base;
      at = ids.findIndex((id, i) => id !== this.held[i] || i === last);
      const part = ids.slice(at, last - at < BATCH ? at + 1 : at + BATCH);
      model.forward(part, at, at === last ? weights : null);
      this.held = [...this.held.slice(0, at), ...part];
      at += part.length;
    }
    return model.predict().slice();
  }

  // The ids that the model sees of a text.
  window(ids) {
    const context = this.model.context_length, shift = Math.max(1, context >> 1);
    return ids.slice(Math.max(0, Math.ceil((ids.length - context) / shift) * shift));
  }

  // `take` gets the choices of a completion as the server streams them.
  async complete(form, take, stopped) {
    const { snapshot, echo, stop, max_tokens, seed = Math.floor(Math.random() * 2 ** 52) } = form;
    if (!Number.isInteger(seed)) throw new Error(`the seed must be a whole number, got ${seed}`);
    const heal = typeof form.prompt === "string" && !form.messages && max_tokens > 0;
    let { ids, ending } = heal ? typedPrompt(this.tokenizer, form.prompt) : { ids: this.ids(form) };
    if (ending && 2 * ending.longest > this.model.context_length) {  // it would leave no room for what stands before
      ids = ending.isAll ? ending.word : [...ids, ...ending.word];
      ending = null;
    }
    let drawn = 0, spelling = {};  // random numbers; what the prompt's last word is cut into
    if (ending) {
      spelling = await this.cut(ids, ending, form, uniform(seed, drawn++), stopped);
      if (stopped()) return;
      ids.push(...spelling.prompt);
    }
    const length = ids.length, prompt = ids.slice(), text = new TextStream(this.tokenizer, stop);
    const begin = echo ? (ending?.isAll ? 1 : 0) : length;
    for (let at = begin, finish = null; !finish; at++) {
      const isNew = at >= length, logits = at > 0 ? await this.read(this.window(ids.slice(0, at)), snapshot, { stopped }) : null;
      if (stopped()) return;
      if (isNew) ids.push(at === length && spelling.first !== undefined ? spelling.first : draw(logits, form, ids, uniform(seed, drawn++)));
      if (isNew && ids[at] === this.tokenizer.eot) finish = "stop";
      const typed = at === length ? spelling.typed : 0;
      let piece = !isNew ? text.echo(ids[at]) : echo && typed ? text.echo(ids[at], typed) : "";
      if (isNew) piece += text.feed(ids[at], typed);
      if (text.stopped) finish = "stop";
      else if (at + 1 >= length + max_tokens) finish ??= "length";
      if (finish) piece += text.close();
      const logprobs = this.scores(ids[at], logits);
      if (at === begin) logprobs.prompt_token_ids = prompt;
      take({ text: piece, logprobs, finish_reason: finish });
    }
  }

  // Draw what the last word of a prompt is cut into, after the ids before it.
  async cut(ids, ending, form, number, stopped) {
    const known = new Map(), { length } = this.window([...ids, ...Array(ending.longest)]);
    const start = ids.length + ending.longest - length;  // of a window with room for each way
    const logProbabilities = async before => {
      const key = before.join();
      if (!known.has(key)) {
        const logits = await this.read([...ids.slice(start), ...before], form.snapshot, { stopped });
        known.set(key, logits ? logSoftmax(logits) : []);
      }
      return known.get(key);
    };
    for (const way of ending.ways) { await logProbabilities(way.before); if (stopped()) return null; }
    return drawWay(ending, form, [...ids, ...ending.word], number, logProbabilities);
  }

  // The log-probabilities of a token and of the likeliest ones, in the form of the server.
  scores(id, logits) {
    const name = other => this.tokenizer.name(other);
    if (!logits) return { tokens: [name(id)], token_ids: [id], token_logprobs: [null], top_logprobs: [null] };
    const values = logSoftmax(logits);
    const edge = logits.slice().sort()[Math.max(0, logits.length - LIKELIEST)];
    const likeliest = [...logits.keys()].filter(other => logits[other] >= edge);
    const top = [...likeliest.sort((one, other) => logits[other] - logits[one]).slice(0, LIKELIEST), id];
    const others = Object.fromEntries(top.map(other => [name(other), values[other]]));
    return { tokens: [name(id)], token_ids: [id], token_logprobs: [values[id]], top_logprobs: [others] };
  }

  // The ids of a prompt, text or ids, or of a chat.
  ids({ prompt, messages }) {
    if (messages) return this.tokenizer.conversation(this.file.template, messages);
    const ids = typeof prompt === "string" ? this.tokenizer.encode(prompt) : [...prompt];
    return ids.length ? ids : [this.tokenizer.eot];
  }

  async attention(form) {
    const ids = this.window([...this.ids(form), ...form.tokens]), weights = [], decoder = new TextDecoder();
    await this.read(ids, form.snapshot, { weights });
    return { tokens: ids.map(id => decoder.decode(this.tokenizer.bytes(id))), weights };
  }

  about() {
    const { name, figures, template, text, models } = this.file;
    const snapshots = models.slice(1);
    const train = snapshots.filter(one => one.loss !== null).map(one => [one.step, one.loss]);
    const steps = snapshots.map(one => one.step);
    return { id: name, figures, chat: template !== null, copied: text !== null, snapshots: steps, train };
  }

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

// Answer a call of the page on the port that comes with it: the choices of a completion, then a value or an error.
function answer(port, file) {
  let writer;
  port.onmessage = async ({ data: { path, form }, ports: [call] }) => {
    let stopped = false;
    call.onmessage = () => { stopped = true; };
    try {
      writer ??= new Writer(file);
      const value = await writer[path](form, choice => call.postMessage({ choice }), () => stopped);
      call.postMessage({ value });
    } catch (error) { call.postMessage({ error: error.message }); }
  };
}

// The bits of a float16 in the place of a float32's give its value, except for the exponents' offset.
function fromHalf(halves) {
  const bits = Uint32Array.from(halves, half => (half & 0x8000) << 16 | (half & 0x7fff) << 13);
  return new Float32Array(bits.buffer).map(value => value * 2 ** 112);
}
