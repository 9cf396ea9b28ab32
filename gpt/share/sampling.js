// From logits to the next token, with the settings and the random numbers of gpt/generation/.

// The id drawn from logits (V); `seen` are the ids before it, `number` is uniform in [0, 1).
function draw(logits, settings, seen, number) {
  const { repetition_penalty = 1, temperature = 1, top_k, top_p = 1, min_p = 0 } = settings;
  logits = Float32Array.from(logits);
  for (const id of new Set(seen)) logits[id] = logits[id] > 0 ? logits[id] / repetition_penalty : logits[id] * repetition_penalty;
  const most = logits.reduce((one, other) => Math.max(one, other), -Infinity);
  if (!Number.isFinite(most)) throw new Error("the model's logits are not finite: its weights are damaged");
  if (temperature === 0) return logits.indexOf(most);
  logits = logits.map(logit => (logit - most) / Math.max(temperature, 1e-30));
  const keep = least => logits.forEach((logit, id) => { if (logit < least) logits[id] = -Infinity; });
  if (top_k < logits.length) keep(logits.slice().sort()[logits.length - top_k]);
  if (top_p < 1) keep(nucleusEdge(logits, top_p));
  if (min_p > 0) keep(Math.fround(Math.log(min_p)));
  const mass = logits.map(Math.exp);
  let left = number * mass.reduce((one, other) => one + other, 0);
  const drawn = mass.findIndex(one => (left -= one) < 0);
  return drawn < 0 ? mass.findLastIndex(one => one > 0) : drawn;
}

// The log-probabilities (V) of logits (V), in nats.
function logSoftmax(logits) {
  const most = logits.reduce((one, other) => Math.max(one, other), -Infinity);
  const total = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
  return logits.map(logit => logit - total);
}

// The smallest logit in the smallest set of likeliest ids that reaches the probability.
function nucleusEdge(logits, probability) {
  const sorted = logits.slice().sort().reverse(), mass = sorted.map(Math.exp);
  let left = probability * mass.reduce((one, other) => one + other, 0);
  const last = mass.findIndex(one => (left -= one) <= 0);
  return sorted[last < 0 ? sorted.length - 1 : last];
}

// Number `count` in [0, 1) of a seed's only text, the same as `uniform` in gpt/generation/sampling.py.
function uniform(seed, count) {
  let bits = 0;
  for (const part of [seed, Math.floor(seed / 2 ** 32), 0, count]) {
    bits = (bits ^ part) + 0x9e3779b9 | 0;
    bits = Math.imul(bits ^ bits >>> 16, 0x7feb352d);
    bits = Math.imul(bits ^ bits >>> 15, 0x846ca68b);
    bits ^= bits >>> 16;
  }
  return (bits >>> 8) / 2 ** 24;
}
