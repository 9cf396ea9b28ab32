// GPT-2's forward with a cache of keys and values: what gpt/model.py and gpt/attention/multi_head.py define.
//
// The file's weights lie in the memory of the kernels as they came: a matrix as rows padded to sixteen
// columns, of int8 with a scale for each row after them, or of float32. All models of a file have the same
// shape; each begins at another address. An address counts bytes of that memory.
//
// Shapes: T tokens, D emb_dim, H heads, K = D / H, L layers, V vocab_size; rows and columns of a matrix as
// PyTorch's nn.Linear has them, (outputs, inputs). Every array is flat.

const BATCH = 4;  // tokens that are read together
// Inputs of int8 matrices become whole numbers up to this one: sums of 8,000 products then fit into 32 bits.
const LARGEST_INPUT = 8191;
const LANES = 16;  // numbers that a kernel takes at a time, as in kernel.js
const SQRT_2_OVER_PI = 0.7978845608028654;
const padded = count => Math.ceil(count / LANES) * LANES;

class Model {
  /**
   * @param {ModelFile} file see worker.js
   * @param {number} size bytes of all weights in the file
   */
  constructor(file, size) {
    Object.assign(this, file.config);
    this.tensors = file.tensors;
    this.int8 = file.precision === "int8";
    this.growth = file.precision === "float16" ? 2 : 1;  // bytes of memory for one of the file
    this.base = 0;  // where the present model begins
    this.head_dim = this.emb_dim / this.num_heads;

    let end = size * this.growth;
    const reserve = count => {
      const address = end;
      end += 4 * padded(count);
      return address;
    };
    this.input = reserve(BATCH * padded(4 * this.emb_dim));  // of a product, (T, columns)
    this.output = reserve(Math.max(BATCH * 4 * this.emb_dim, this.vocab_size));  // (T, rows)

    const cached = this.num_layers * this.context_length * this.emb_dim;
    this.keys = new Float32Array(cached);  // (L, context_length, D)
    this.values = new Float32Array(cached);

    const memory = new WebAssembly.Memory({ initial: Math.ceil(end / 65536) });  // in pages of 64 KiB
    this.floats = new Float32Array(memory.buffer);
    this.integers = new Int16Array(memory.buffer);
    this.bytes = new Int8Array(memory.buffer);
    this.kernels = kernels(memory);
  }

  // The floats at an address.
  at(address, count) { return this.floats.subarray(address / 4, address / 4 + count); }

  // Where a tensor of the present model lies; null if there is none of that name.
  tensor(name) {
    if (!this.tensors[name]) return null;
    const [place, rows, columns] = this.tensors[name];
    const address = this.base + place * this.growth;
    return { address, rows, columns, scales: address + rows * padded(columns) };
  }

  // Add a row of an embedding to `x` (D).
  addRow(name, row, x) {
    const { address, columns, scales } = this.tensor(name);
    const scale = this.int8 ? this.floats[scales / 4 + row] : 1;
    const values = this.int8 ? this.bytes : this.floats;
    const start = (this.int8 ? address : address / 4) + row * padded(columns);
    for (let i = 0; i < columns; i++) x[i] += scale * values[start + i];
  }

  // The product of x and a matrix, plus the bias if there is one: (T, columns) -> (T, rows), T = 1 or BATCH.
  // The next product overwrites it.
  linear(name, x) {
    const { address, rows, columns, scales } = this.tensor(name + ".weight");
    const count = x.length / columns;
    const units = this.writeInput(x, columns);
    const kernel = this.kernels[`${this.int8 ? "int8" : "float32"}x${count}`];
    kernel(address, this.input, this.output, rows, padded(columns));

    const y = this.at(this.output, count * rows);
    const scale = this.int8 ? this.at(scales, rows) : null;
    const biasPlace = this.tensor(name + ".bias");
    const bias = biasPlace ? this.at(biasPlace.address, rows) : null;
    for (let t = 0; t < count; t++) {
      for (let i = 0; i < rows; i++) {
        let value = y[t * rows + i];
        if (scale) value = value * scale[i] * units[t];
        if (bias) value += bias[i];
        y[t * rows + i] = value;
      }
    }
    return y;
  }

  // Write x (T, columns) to the kernels' input, padded. Return the unit of each row's numbers.
  writeInput(x, columns) {
    const width = padded(columns);
    const units = [];
    for (let t = 0; t < x.length / columns; t++) {
      const row = x.subarray(t * columns, (t + 1) * columns);
      if (this.int8) {
        const to = this.input / 2 + t * width;
        units.push(unitOf(row));
        for (let i = 0; i < columns; i++) this.integers[to + i] = Math.round(row[i] / units[t]);
        this.integers.fill(0, to + columns, to + width);
      } else {
        const to = this.input / 4 + t * width;
        units.push(1);
        this.floats.set(row, to);
        this.floats.fill(0, to + columns, to + width);
      }
    }
    return units;
  }

  // x (T, D) -> (T, D)
  norm(name, x) {
    const width = this.emb_dim;
    const weight = this.at(this.tensor(name + ".weight").address, width);
    const bias = this.at(this.tensor(name + ".bias").address, width);
    const y = new Float32Array(x.length);
    for (let first = 0; first < x.length; first += width) {
      let mean = 0;
      for (let i = 0; i < width; i++) mean += x[first + i] / width;
      let variance = 0;
      for (let i = 0; i < width; i++) variance += (x[first + i] - mean) ** 2 / width;
      const scale = 1 / Math.sqrt(variance + 1e-5);
      for (let i = 0; i < width; i++) y[first + i] = (x[first + i] - mean) * scale * weight[i] + bias[i];
    }
    return y;
  }

  /**
   * Read tokens after those that were read before.
   * @param {number[]} tokens one, or BATCH of them
   * @param {number} position of the first
   * @param {?number[][][]} weights receives the attention weights (L, H, position + 1), if it is one token
   */
  forward(tokens, position, weights = null) {
    const width = this.emb_dim;
    const x = new Float32Array(tokens.length * width);
    for (const [t, token] of tokens.entries()) {
      this.addRow("token_embedding.weight", token, x.subarray(t * width));
      this.addRow("position_embedding.weight", position + t, x.subarray(t * width));
    }
    const add = y => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };
    for (let layer = 0; layer < this.num_layers; layer++) {
      const block = `blocks.${layer}.`;
      weights?.push([]);
      const context = this.attend(layer, position, this.norm(block + "attention_norm", x), weights?.at(-1));
      add(this.linear(block + "attention.out_proj", context));
      const hidden = this.linear(block + "feed_forward.up", this.norm(block + "feed_forward_norm", x));
      gelu(hidden, this.exact_gelu);
      add(this.linear(block + "feed_forward.down", hidden));
    }
    this.last = x.subarray(x.length - width);
  }

  // The logits (V) of the token after the last one read.
  predict() {
    const head = this.tensor("head.weight") ? "head" : "token_embedding";  // a tied head is not stored
    return this.linear(head, this.norm("final_norm", this.last));
  }

  // x (T, D) -> the heads' context vectors (T, D). The keys and values of x go into the cache.
  attend(layer, position, x, weights) {
    const { emb_dim: width, head_dim: size, context_length } = this;
    const attention = `blocks.${layer}.attention.`;
    const keys = this.keys.subarray(layer * context_length * width);
    const values = this.values.subarray(layer * context_length * width);
    keys.set(this.linear(attention + "W_key", x), position * width);
    values.set(this.linear(attention + "W_value", x), position * width);
    const queries = this.linear(attention + "W_query", x);
    const context = new Float32Array(x.length);
    for (let at = 0; at < x.length; at += size) {  // each head of each token
      const first = at % width;  // of the head's columns
      const token = (at - first) / width;
      const scores = new Float32Array(position + token + 1);  // causal: of this token and those before it
      for (let j = 0; j < scores.length; j++) {
        for (let i = 0; i < size; i++) scores[j] += queries[at + i] * keys[j * width + first + i];
      }
      softmax(scores, 1 / Math.sqrt(size));
      weights?.push(Array.from(scores));
      for (let j = 0; j < scores.length; j++) {
        for (let i = 0; i < size; i++) context[at + i] += scores[j] * values[j * width + first + i];
      }
    }
    return context;
  }
}

// The unit in which the largest number of a row is LARGEST_INPUT; 1 for a row of zeros.
function unitOf(row) {
  let most = 0;
  for (const value of row) most = Math.max(most, Math.abs(value));
  return most ? most / LARGEST_INPUT : 1;
}

// Softmax of scores times `scale`, in place.
function softmax(scores, scale) {
  const most = maximum(scores);  // see sampling.js
  let total = 0;
  for (let i = 0; i < scores.length; i++) {
    const weight = Math.exp((scores[i] - most) * scale);
    scores[i] = weight;
    total += weight;
  }
  for (let i = 0; i < scores.length; i++) scores[i] /= total;
}

// GELU in place: x times the share of a normal distribution below x, exact or by GPT-2's approximation with
// tanh (Hendrycks and Gimpel 2016).
function gelu(y, exact) {
  for (let i = 0; i < y.length; i++) {
    const x = y[i];
    const z = exact ? erf(x * Math.SQRT1_2) : Math.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x));
    y[i] = 0.5 * x * (1 + z);
  }
}

// The error function to 2e-7: Abramowitz and Stegun, 7.1.26.
function erf(x) {
  const z = Math.abs(x);
  const t = 1 / (1 + 0.3275911 * z);
  const series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)));
  return Math.sign(x) * (1 - t * series * Math.exp(-z * z));
}
