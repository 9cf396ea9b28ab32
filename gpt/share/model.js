// GPT-2's forward for one token at a time, with a cache of keys and values. The file's weights lie in the memory of
// the kernels as they came: a matrix as rows padded to sixteen columns, of int8 with a scale for each row after them,
// or of float32. All models of a file have the same shape; each begins at another address.

const wide = count => Math.ceil(count / 16) * 16;

class Model {
  // `file`: {config, tensors: {name: [place in the file, rows, columns]}, precision}; its weights take `end` bytes.
  constructor(file, end) {
    Object.assign(this, file.config, { tensors: file.tensors, int8: file.precision === "int8", base: 0 });
    this.growth = file.precision === "float16" ? 2 : 1;  // bytes of memory for one of the file
    end *= this.growth;
    const { emb_dim: width, context_length: context } = this;
    const room = count => (end += 4 * wide(count)) - 4 * wide(count);
    this.head_dim = width / this.num_heads;
    for (const name of ["x", "normed", "query", "key", "value", "mixed"]) this[name] = room(width);
    this.hidden = room(4 * width);
    this.logits = room(this.vocab_size);
    this.scores = room(context);
    this.head = room(this.head_dim);
    this.keys = room(this.num_layers * this.num_heads * context * wide(this.head_dim));  // (layers, heads, T, K)
    this.values = room(this.num_layers * width * wide(context));  // (layers, heads, K, T)
    const memory = new WebAssembly.Memory({ initial: Math.ceil(end / 65536) });
    this.floats = new Float32Array(memory.buffer);
    this.bytes = new Int8Array(memory.buffer);
    this.kernels = kernels(memory);
  }

  // The floats at an address.
  at(address, count) { return this.floats.subarray(address / 4, address / 4 + count); }

  tensor(name) {
    const [place, rows, columns] = this.tensors[name] ?? [-1], address = this.base + place * this.growth;
    return { address, rows, columns, scales: address + rows * wide(columns), missing: place < 0 };
  }

  // Add a row of an embedding to `x`.
  addRow(name, row) {
    const { address, columns, scales } = this.tensor(name), x = this.at(this.x, columns);
    const scale = this.int8 ? this.floats[scales / 4 + row] : 1;
    const values = this.int8 ? this.bytes : this.floats, start = (this.int8 ? address : address / 4) + row * wide(columns);
    for (let i = 0; i < columns; i++) x[i] += scale * values[start + i];
  }

  // The weight times the vector at `from`, plus the bias where there is one, to the address `to`.
  linear(name, from, to) {
    const { address, rows, columns, scales } = this.tensor(name + ".weight"), bias = this.tensor(name + ".bias");
    const kernel = this.int8 ? this.kernels.int8 : this.kernels.float32;
    kernel(address, from, to, rows, wide(columns), (this.int8 ? 1 : 4) * wide(columns));
    const y = this.at(to, rows), add = bias.missing ? null : this.at(bias.address, rows), scale = this.at(scales, this.int8 ? rows : 0);
    if (this.int8) for (let i = 0; i < rows; i++) y[i] *= scale[i];
    if (add) for (let i = 0; i < rows; i++) y[i] += add[i];
    return y;
  }

  norm(name, to) {
    const width = this.emb_dim, x = this.at(this.x, width), y = this.at(to, width);
    const weight = this.at(this.tensor(name + ".weight").address, width), bias = this.at(this.tensor(name + ".bias").address, width);
    let mean = 0, variance = 0;
    for (let i = 0; i < width; i++) mean += x[i] / width;
    for (let i = 0; i < width; i++) variance += (x[i] - mean) ** 2 / width;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    for (let i = 0; i < width; i++) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
  }

  // Read a token at its position, after the ones that were read before. The logits (V) of the next token with
  // `predict`; `weights` receives the attention weights of the token, (layers, heads, T).
  forward(token, position, predict, weights = null) {
    const x = this.at(this.x, this.emb_dim).fill(0);
    this.addRow("token_embedding.weight", token);
    this.addRow("position_embedding.weight", position);
    const add = y => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };
    for (let layer = 0; layer < this.num_layers; layer++) {
      const block = `blocks.${layer}.`;
      this.norm(block + "attention_norm", this.normed);
      weights?.push([]);
      this.attend(block, layer, position, weights?.at(-1));
      add(this.linear(block + "attention.out_proj", this.mixed, this.normed));
      this.norm(block + "feed_forward_norm", this.normed);
      activate(this.linear(block + "feed_forward.up", this.normed, this.hidden), this.exact_gelu);
      add(this.linear(block + "feed_forward.down", this.hidden, this.normed));
    }
    if (!predict) return null;
    this.norm("final_norm", this.normed);
    const head = this.tensor("head.weight").missing ? "token_embedding" : "head";
    return this.linear(head, this.normed, this.logits);
  }

  attend(block, layer, position, weights) {
    const { head_dim: size, context_length: context, num_heads: heads } = this, padded = wide(size);
    const [query, key, value] = ["query", "key", "value"].map(part => this.linear(block + "attention.W_" + part, this.normed, this[part]));
    const count = position + 1, scores = this.at(this.scores, wide(count));
    for (let head = 0; head < heads; head++) {
      const first = head * size, place = layer * heads + head;
      const keys = this.keys + 4 * place * context * padded, values = this.values + 4 * place * size * wide(context);
      this.at(keys + 4 * position * padded, size).set(key.subarray(first, first + size));
      for (let i = 0; i < size; i++) this.floats[values / 4 + i * wide(context) + position] = value[first + i];
      this.at(this.head, size).set(query.subarray(first, first + size));
      this.kernels.float32(keys, this.head, this.scores, count, padded, 4 * padded);
      softmax(scores, count, 1 / Math.sqrt(size));
      weights?.push(Array.from(scores.subarray(0, count)));
      this.kernels.float32(values, this.scores, this.mixed + 4 * first, size, wide(count), 4 * wide(context));
    }
  }
}

// Of the first `count` scores times `scale`, in place; the others become 0.
function softmax(scores, count, scale) {
  let most = -Infinity, total = 0;
  for (let i = 0; i < count; i++) most = Math.max(most, scores[i]);
  for (let i = 0; i < count; i++) total += scores[i] = Math.exp((scores[i] - most) * scale);
  for (let i = 0; i < count; i++) scores[i] /= total;
  scores.fill(0, count);
}

// GELU in place, exact by Abramowitz and Stegun's 7.1.26 (to 2e-7) or with a tanh.
function activate(y, exact) {
  for (let i = 0; i < y.length; i++) {
    const x = y[i], z = Math.abs(x) * Math.SQRT1_2, t = 1 / (1 + 0.3275911 * z);
    const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-z * z);
    const share = exact ? Math.sign(x) * (1 - tail) : Math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    y[i] = 0.5 * x * (1 + share);
  }
}
