// The next token from logits, as gpt/generation/sampling.py draws it: the same settings in the same order,
// with the same random numbers.
//
// Shapes: V vocab_size. Logits are of float32, as there; sums are of float64.
//
// Sources: Keskar et al. 2019, section 4.1 (repetition penalty); Fan et al. 2018, section 5.4 (top-k);
// Holtzman et al. 2020, section 3.1 (top-p); Nguyen et al. 2024, section 3 (min-p); Wellons 2018 (the hash
// function).

/**
 * How a token is drawn. A setting that is missing changes nothing.
 * @typedef {object} Sampling
 * @property {number} [repetition_penalty] lowers the logits of tokens that came before
 * @property {number} [temperature] divides the logits; 0 takes the most likely token
 * @property {number} [top_k] draw from the k most likely tokens, and from any as likely as the last of these
 * @property {number} [top_p] draw from the smallest set of most likely tokens whose probability reaches p
 * @property {number} [min_p] draw from tokens at least p times as likely as the most likely one
 */

/**
 * Draw the next token.
 * @param {ArrayLike<number>} logits (V)
 * @param {Sampling} settings
 * @param {number[]} seen the ids before it
 * @param {number} number a random number in [0, 1)
 * @returns {number} its id
 */
function draw(logits, settings, seen, number) {
  const { repetition_penalty = 1, temperature = 1 } = settings;
  const penalized = penalize(logits, repetition_penalty, seen);
  const largest = maximum(penalized);
  if (!Number.isFinite(largest)) {
    throw new Error("the model's logits are not finite: its weights are damaged");
  }
  if (temperature === 0) return penalized.indexOf(largest);
  // The largest logit becomes 0, so that even a very low temperature gives no infinity.
  const scaled = penalized.map(logit => (logit - largest) / Math.max(temperature, 1e-30));
  return drawIndex(filterLogits(scaled, settings).map(Math.exp), number);
}

// Lower the logits of tokens that came before: (V) -> (V).
function penalize(logits, penalty, seen) {
  const penalized = Float32Array.from(logits);
  for (const id of new Set(seen)) {
    const logit = penalized[id];
    penalized[id] = logit > 0 ? logit / penalty : logit * penalty;
  }
  return penalized;
}

// Set to -Infinity the logits that top-k, top-p and min-p exclude, in this order: (V) -> (V). The largest is
// 0.
function filterLogits(logits, { top_k, top_p = 1, min_p = 0 }) {
  let kept = logits;
  const keepFrom = smallest => {
    kept = kept.map(logit => logit < smallest ? -Infinity : logit);
  };
  if (top_k && top_k < kept.length) keepFrom(kept.toSorted()[kept.length - top_k]);
  if (top_p < 1) keepFrom(nucleusEdge(kept, top_p));
  if (min_p > 0) keepFrom(Math.fround(Math.log(min_p)));
  return kept;
}

// The smallest logit in the smallest set of most likely tokens that reaches a probability.
function nucleusEdge(logits, probability) {
  const sorted = logits.toSorted().reverse();
  const weights = sorted.map(Math.exp);
  let left = probability * sum(weights);
  for (let i = 0; i < weights.length; i++) {
    left -= weights[i];
    if (left <= 0) return sorted[i];
  }
  return sorted.at(-1);
}

// Draw an index of weights (V), each in proportion to its weight.
function drawIndex(weights, number) {
  let left = number * sum(weights);
  for (let i = 0; i < weights.length; i++) {
    left -= weights[i];
    if (left < 0) return i;
  }
  return weights.findLastIndex(weight => weight > 0);  // the sum was rounded up
}

// The log-probabilities (V) of logits (V), in nats.
function logSoftmax(logits) {
  const largest = maximum(logits);
  const total = logits.reduce((total, logit) => total + Math.exp(logit - largest), 0);
  const normalizer = largest + Math.log(total);
  return logits.map(logit => logit - normalizer);
}

/**
 * A random number in [0, 1): a hash of the seed and the number's place, as `uniform` in Python has it for the
 * first text of a seed.
 * @param {number} seed a whole number of at most 53 bits
 * @param {number} place 0 for the first number
 */
function uniform(seed, place) {
  const sample = 0;  // the first text
  let bits = 0;
  for (const part of [seed, Math.floor(seed / 2 ** 32), sample, place]) {
    bits = ((bits ^ part) + 0x9e3779b9) | 0;
    bits = Math.imul(bits ^ (bits >>> 16), 0x7feb352d);
    bits = Math.imul(bits ^ (bits >>> 15), 0x846ca68b);
    bits ^= bits >>> 16;
  }
  return (bits >>> 8) / 2 ** 24;
}

const maximum = values => values.reduce((most, value) => Math.max(most, value), -Infinity);
const sum = values => values.reduce((total, value) => total + value, 0);
