// GPT-2's forward with a cache of keys and values. The file's weights lie in the memory of the kernels as they came: a
// matrix as rows padded to sixteen columns, of int8 with a scale for each row after them, or of float32. All models of
// a file have the same shape; each begins at another address.

const BATCH = 4;  // tokens that are read together
const FINEST = 8191;  // of what a matrix of int8 is multiplied with; the sums of 8,000 products fit into 32 bits
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
    this.input = room(BATCH * wide(4 * width));
    this.output = room(Math.max(BATCH * 4 * width, this.vocab_size));
    [this.keys, this.values] = [0, 1].map(() => new Float32Array(this.num_layers * context * width));  // (layers, T, width)
    const memory = new WebAssembly.Memory({ initial: Math.ceil(end / 65536) });
    this.floats = new Float32Array(memory.buffer);
    this.integers = new Int16Array(memory.buffer);
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
  addRow(name, row, x) {
    const { address, columns, scales } = this.tensor(name);
    const scale = this.int8 ? this.floats[scales / 4 + row] : 1;
    const values = this.int8 ? this.bytes : this.floats, start = (this.int8 ? address : address / 4) + row * wide(columns);
    for (let i = 0; i < columns; i++) x[i] += scale * values[start + i];
  }

  // The weight times each row of x (rows of tokens), plus the bias where there is one; the next product overwrites it.
  linear(name, x) {
    const { address, rows, columns, scales } = this.tensor(name + ".weight"), bias = this.tensor(name + ".bias");
    const padded = wide(columns), count = x.length / columns, steps = [];
    const [values, input] = this.int8 ? [this.integers, this.input / 2] : [this.floats, this.input / 4];
    for (let t = 0; t < count; t++) {
      const row = x.subarray(t * columns, (t + 1) * columns), to = input + t * padded;
      let most = 0;
      if (this.int8) for (let i = 0; i < columns; i++) most = Math.max(most, Math.abs(row[i]));
      steps.push(this.int8 && most ? most / FINEST : 1);
      if (this.int8) for (let i = 0; i < columns; i++) values[to + i] = Math.round(row[i] / steps[t]);
      else values.set(row, to);
      values.fill(0, to + columns, to + padded);
    }
    const kernel = this.kernels[`${this.int8 ? "int8" : "float32"}x${count}`];
    kernel(address, this.input, this.output, rows, padded);
    const y = this.at(this.output, count * rows);
    const add = bias.missing ? null : this.at(bias.address, rows), scale = this.int8 ? this.at(scales, rows) : null;
    for (let t = 0, to = 0; t < count; t++) {
      for (let i = 0; i < rows; i++, to++) y[to] = (scale ? y[to] * scale[i] * steps[t] : y[to]) + (add ? add[i] : 0);
    }
    return y;
  }

  norm(name, x) {
    const width = this.emb_dim, y = new Float32Array(x.length);
    const [weight, bias] = ["weight", "bias"].map(part => this.at(this.tensor(`${name}.${part}`).address, width));
    for (let first = 0; first < x.length; first += width) {
      let mean = 0, variance = 0;
      for (let i = 0; i < width; i++) mean += x[first + i] / width;
      for (let i = 0; i < width; i++) variance += (x[first + i] - mean) ** 2 / width;
      const scale = 1 / Math.sqrt(variance + 1e-5);
      for (let i = 0; i < width; i++) y[first + i] = (x[first + i] - mean) * scale * weight[i] + bias[i];
    }
    return y;
  }

  // Read one token or BATCH of them from a position on, after what was read before. `weights` receives the attention
  // weights, (layers, heads, T) of one token.
  forward(tokens, position, weights = null) {
    const width = this.emb_dim, x = new Float32Array(tokens.length * width);
    for (const [t, token] of tokens.entries()) {
      this.addRow("token_embedding.weight", token, x.subarray(t * width));
      this.addRow("position_embedding.weight", position + t, x.subarray(t * width));
    }
    const add = y => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };
    for (let layer = 0; layer < this.num_layers; layer++) {
      const block = `blocks.${layer}.`;
      weights?.push([]);
      const mixed = this.attend(block, layer, position, this.norm(block + "attention_norm", x), weights?.at(-1));
      add(this.linear(block + "attention.out_proj", mixed));
      const hidden = this.linear(block + "feed_forward.up", this.norm(block + "feed_forward_norm", x));
      activate(hidden, this.exact_gelu);
      add(this.linear(block + "feed_forward.down", hidden));
    }
    this.last = x.subarray(x.length - width);
  }

  // The logits (V) of the token after the last one read.
  predict() {
    return this.linear(this.tensor("head.weight").missing ? "token_embedding" : "head", this.norm("final_norm", this.last));
  }

  attend(block, layer, position, x, weights) {
    const { emb_dim: width, head_dim: size, context_length: context } = this, mixed = new Float32Array(x.length);
    const keys = this.keys.subarray(layer * context * width), values = this.values.subarray(layer * context * width);
    keys.set(this.linear(block + "attention.W_key", x), position * width);
    values.set(this.linear(block + "attention.W_value", x), position * width);
    const query = this.linear(block + "attention.W_query", x);
    for (let at = 0; at < x.length; at += size) {  // each head of each token
      const first = at % width, scores = new Float32Array(position + 1 + (at - first) / width);
      for (let j = 0; j < scores.length; j++) {
        for (let i = 0; i < size; i++) scores[j] += query[at + i] * keys[j * width + first + i];
      }
      softmax(scores, 1 / Math.sqrt(size));
      weights?.push(Array.from(scores));
      for (let j = 0; j < scores.length; j++) {
        for (let i = 0; i < size; i++) mixed[at + i] += scores[j] * values[j * width + first + i];
      }
    }
    return mixed;
  }
}

// The softmax of scores times `scale`, in place.
function softmax(scores, scale) {
  const most = scores.reduce((one, other) => Math.max(one, other), -Infinity);
  let total = 0;
  for (let i = 0; i < scores.length; i++) total += scores[i] = Math.exp((scores[i] - most) * scale);
  for (let i = 0; i < scores.length; i++) scores[i] /= total;
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
