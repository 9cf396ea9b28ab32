// Answers the page's requests in a worker of the browser, with the model in the file: what gpt/serve/ answers
// on a server. A request's name is a method of `Writer`, and its form is that of the server's API.
//
// Shapes: T tokens, L layers, H heads, V vocab_size.

const LIKELIEST = 5;  // alternatives of a token: `ALTERNATIVES` in gpt/serve/requests.py
const SHORTEST_RUN = 12;  // tokens that count as copied: `least` in gpt/evaluation/copied.py
const LONGEST_TURN = 20;  // milliseconds, after which requests that came meanwhile are read

/**
 * What gpt/share/file.py writes before the weights.
 * @typedef {object} ModelFile
 * @property {string} name
 * @property {object} config the fields of GPTConfig
 * @property {object} figures those of gpt/weights/figures.py
 * @property {?Object<string, string>} template of a chat model
 * @property {string} table the tokens, and the words' expressions beside it: see Tokenizer
 * @property {?string} text the training text's ids, each as a letter
 * @property {string} precision int8, float16 or float32
 * @property {Object<string, number[]>} tensors by name: place in a model's bytes, rows, columns
 * @property {{step: ?number, loss: ?number}[]} models the model itself, then its snapshots
 * @property {number} bytes of all models
 * @property {number} blocks in which they come
 */

class Writer {
  /** @param {ModelFile} file */
  constructor(file) {
    this.file = file;
    this.tokenizer = new Tokenizer(file);
    this.model = new Model(file, file.bytes);
    this.modelBytes = file.bytes * this.model.growth / file.models.length;  // of one model in memory
    this.loaded = 0;  // bytes of memory
    this.held = [];  // the ids in the model's cache
    this.resumed = performance.now();  // when requests were last read
  }

  // ---- requests

  // Take the next block of weights, gzip in base64.
  async load({ text }) {
    try {
      const block = await unpacked(text);
      const isHalf = this.file.precision === "float16";
      const weights = isHalf ? new Uint8Array(fromHalf(block)) : new Uint8Array(block);
      this.model.bytes.set(weights, this.loaded);
      this.loaded += weights.length;
    } catch {
      throw new Error("This file is damaged or incomplete: get it again.");
    }
  }

  // The model's name, figures and snapshots, and what the page can do with it.
  about() {
    const { name, figures, template, text, models } = this.file;
    const snapshots = models.slice(1);
    return {
      id: name,
      figures,
      chat: template !== null,
      copied: text !== null,
      snapshots: snapshots.map(({ step }) => step),
      train: snapshots.filter(({ loss }) => loss !== null).map(({ step, loss }) => [step, loss]),
    };
  }

  /**
   * Write a text.
   * @param {object} form as in the server's API
   * @param {function(object): void} take gets the choices, as the server streams them
   * @param {function(): boolean} stopped whether to end early
   */
  async complete(form, take, stopped) {
    const { snapshot, echo, max_tokens, seed = Math.floor(Math.random() * 2 ** 52) } = form;
    if (!Number.isSafeInteger(seed)) {
      throw new Error(`the seed must be a whole number of at most 53 bits, got ${seed}`);
    }
    let drawn = 0;
    const number = () => uniform(seed, drawn++);
    const prompt = await this.prompt(form, number, stopped);
    if (!prompt) return;

    const ids = [...prompt.ids];
    const promptLength = ids.length;
    const text = new TextStream(this.tokenizer, form.stop);
    const begin = echo ? prompt.added : promptLength;
    let finish = null;
    for (let place = begin; !finish; place++) {
      const before = this.window(ids.slice(0, place));
      const logits = place > 0 ? await this.read(before, snapshot, { stopped }) : null;
      if (stopped()) return;
      const isNew = place >= promptLength;
      const isHealed = place === promptLength && prompt.first !== undefined;
      if (isNew) ids.push(isHealed ? prompt.first : draw(logits, form, ids, number()));
      const id = ids[place];
      let piece = "";
      if (!isNew) piece = text.echo(id);
      else if (!isHealed) piece = text.feed(id);
      else piece = (echo ? text.echo(id, prompt.typed) : "") + text.feed(id, prompt.typed);
      if (text.stopped || (isNew && id === this.tokenizer.eot)) finish = "stop";
      else if (place + 1 >= promptLength + max_tokens) finish = "length";
      if (finish) piece += text.close();
      const logprobs = this.scores(id, logits);
      if (place === begin) logprobs.prompt_token_ids = prompt.ids;
      take({ text: piece, logprobs, finish_reason: finish });
    }
  }

  // The attention weights (L, H, T) of the last of T tokens, and the texts of all.
  async attention(form) {
    const ids = this.window([...this.ids(form), ...form.tokens]);
    const weights = [];
    await this.read(ids, form.snapshot, { weights });
    const decoder = newDecoder();
    return { tokens: ids.map(id => decoder.decode(this.tokenizer.bytes(id))), weights };
  }

  // Which of the tokens stand verbatim in the training text.
  copied({ tokens }) {
    return { runs: copiedRuns(this.file.text, tokens) };
  }

  // ---- prompts

  // The ids of a prompt, text or ids, or of a chat.
  ids({ prompt, messages }) {
    if (messages) return this.tokenizer.conversation(this.file.template, messages);
    const ids = typeof prompt === "string" ? this.tokenizer.encode(prompt) : [...prompt];
    return ids.length ? ids : [this.tokenizer.eot];
  }

  // The prompt's `ids`, of which those of a typed text's last word are drawn again; how many of them are
  // `added` before the prompt; and the `first` new id, if its first `typed` bytes belong to the prompt. Null
  // if it is `stopped` before. The names are those of `Sample` in gpt/generation/samples.py.
  async prompt(form, number, stopped) {
    const { tokenizer } = this;
    const all = this.ids(form);
    const isTyped = typeof form.prompt === "string" && !form.messages && form.max_tokens > 0;
    const healed = isTyped ? tokensOfLastWord(tokenizer, form.prompt, all) : 0;
    const ids = all.slice(0, all.length - healed);
    let rest = all.slice(ids.length).map(id => tokenizer.tokens[id]).join("");  // the bytes still to be drawn
    const added = ids.length ? 0 : 1;
    if (!ids.length) ids.push(tokenizer.eot);
    while (rest) {
      const logits = await this.read(this.window(ids), form.snapshot, { stopped });
      if (stopped()) return null;
      const agreeing = new Set(agreeingIds(tokenizer, rest));
      const allowed = logits.map((logit, id) => agreeing.has(id) ? logit : -Infinity);
      const id = draw(allowed, form, [], number());
      const length = tokenizer.tokens[id].length;
      if (length > rest.length) return { ids, added, first: id, typed: rest.length };
      ids.push(id);
      rest = rest.slice(length);
    }
    return { ids, added };
  }

  // ---- the model

  /**
   * Read ids, of which those in the cache need no work.
   * @param {number[]} ids
   * @param {?number} snapshot the step of the model that reads; the model itself if there is none
   * @param {object} options
   * @param {number[][][]} [options.weights] receives the attention weights (L, H, T) of the last id. Then all
   *     is read at once; else other requests come in between.
   * @param {function(): boolean} [options.stopped] whether to end early
   * @returns {Promise<?Float32Array>} the logits (V) of the next token; null if it was stopped
   */
  async read(ids, snapshot, { weights, stopped } = {}) {
    const { model } = this;
    const base = this.modelBytes * this.file.models.findIndex(({ step }) => step === (snapshot ?? null));
    const last = ids.length - 1;
    for (let place = 0; place <= last;) {
      if (!weights) await this.letOthersRun();
      if (stopped?.()) return null;
      if (model.base !== base) this.held = [];
      model.base = base;
      place = ids.findIndex((id, i) => id !== this.held[i] || i === last);
      const count = last - place < BATCH ? 1 : BATCH;
      const part = ids.slice(place, place + count);
      model.forward(part, place, place === last ? weights : null);
      this.held = [...this.held.slice(0, place), ...part];
      place += count;
    }
    return model.predict().slice();
  }

  // Let requests be read that came meanwhile, from time to time.
  async letOthersRun() {
    if (performance.now() - this.resumed <= LONGEST_TURN) return;
    await new Promise(resume => setTimeout(resume));
    this.resumed = performance.now();
  }

  // The ids of a text that the model sees. Beyond the context the window moves by half of it, so that the
  // cache serves many tokens.
  window(ids) {
    const context = this.model.context_length;
    const shift = Math.max(1, context >> 1);
    const shifts = Math.max(0, Math.ceil((ids.length - context) / shift));
    return ids.slice(shifts * shift);
  }

  // The log-probabilities of a token and of the likeliest ones, in the form of the server.
  scores(id, logits) {
    const name = this.tokenizer.name(id);
    const token = { tokens: [name], token_ids: [id] };
    if (!logits) return { ...token, token_logprobs: [null], top_logprobs: [null] };
    const values = logSoftmax(logits);
    const smallest = logits.toSorted()[Math.max(0, logits.length - LIKELIEST)];
    const likeliest = [...logits.keys()].filter(other => logits[other] >= smallest);
    likeliest.sort((a, b) => logits[b] - logits[a]);
    const shown = [...likeliest.slice(0, LIKELIEST), id];
    const top = Object.fromEntries(shown.map(other => [this.tokenizer.name(other), values[other]]));
    return { ...token, token_logprobs: [values[id]], top_logprobs: [top] };
  }
}

// Answer each request of the page on the port that comes with it: choices of a completion, then a value or an
// error.
function answer(port, file) {
  let writer;
  port.onmessage = async ({ data: { path, form }, ports: [call] }) => {
    let stopped = false;
    call.onmessage = () => {
      stopped = true;
    };
    try {
      writer ??= new Writer(file);
      const take = choice => call.postMessage({ choice });
      const value = await writer[path](form, take, () => stopped);
      call.postMessage({ value });
    } catch (error) {
      call.postMessage({ error: error.message });
    }
  };
}

// The longest runs [start, end) of ids that stand in a text and are long enough. `Copied.runs` in
// gpt/evaluation/copied.py finds the same. The text has a letter for each id, and no letter is half of a
// surrogate pair: `_letters` in gpt/share/file.py.
function copiedRuns(text, ids) {
  const letters = String.fromCharCode(...ids.map(id => id < 0xd800 ? id : id + 0x800));
  const runs = [];
  let last = 0;  // the end of the run before
  for (let start = 0; start + SHORTEST_RUN <= letters.length; start++) {
    let end = Math.max(last, start + SHORTEST_RUN - 1);
    while (end < letters.length && text.includes(letters.slice(start, end + 1))) end++;
    if (end > last && end >= start + SHORTEST_RUN) {
      runs.push([start, end]);
      last = end;
    }
  }
  return runs;
}

// The bytes of gzip in base64, an ArrayBuffer.
async function unpacked(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  // Uint8Array.from takes ten times as long.
  for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
  // A worker of Safari's engine cannot read a Blob in a page from the disk, but a Response.
  const stream = new Response(packed).body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// A buffer of float16 as one of float32. The bits in the places of a float32's give the value, except for the
// offset of the exponents.
function fromHalf(buffer) {
  const halves = new Uint16Array(buffer);
  const bits = Uint32Array.from(halves, half => (half & 0x8000) << 16 | (half & 0x7fff) << 13);
  return new Float32Array(bits.buffer).map(value => value * 2 ** 112).buffer;
}
