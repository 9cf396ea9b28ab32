// The one loop that takes time, y[t][r] = sum of w[r][c] * x[t][c], as WebAssembly with 128-bit vectors. The
// instructions are written here by their numbers (webassembly.github.io/spec/core/binary), so nothing compiles it.
"use strict";

// Functions (w, x, y, rows, columns) of addresses in `memory` and of counts: int8 with x of int16 and float32, for one
// row of x and for four, which share what is loaded of w. Columns are a multiple of 16; y is of float32.
function kernels(memory) {
  const [W, X, Y, ROWS, COLUMNS, P, END, OUT, STEP, Q] = Array(10).keys();  // parameters, then locals
  const PART = Q + 4, SUM = PART + 1;
  const get = local => [0x20, local], set = local => [0x21, local];
  const integer = value => [0x41, ...(value < 64 ? [value] : [value | 0x80, 0])];  // up to 127
  const add = [0x6a], vector = (...code) => [0xfd, ...code];
  const load = (address, offset, code = 0) => [...get(address), ...vector(code, 0, offset)];
  const move = (local, by) => [...get(local), ...by, ...add, ...set(local)];
  const shifted = (local, by) => [...get(local), ...integer(by), 0x74];
  const each = (count, code) => Array.from({ length: count }, (_, k) => code(k)).flat();
  const kinds = {  // how many vectors are 16 columns, their bytes, log2 of a number's, how they are loaded and computed
    int8: { parts: 2, bytes: 8, w: 0, x: 1, from: 1, times: [0xba, 1], plus: [0xae, 1], lane: k => [...vector(0x1b, k), 0xb2] },
    float32: { parts: 4, bytes: 16, w: 2, x: 2, from: 0, times: [0xe6, 1], plus: [0xe4, 1], lane: k => vector(0x1f, k) },
  };

  const rowLoop = ({ parts, bytes, w, x, from, times, plus, lane }, count) => {
    const sum = (k, t) => SUM + (count === 1 ? k : t);  // several in either case, as one waits for itself
    return [
      ...shifted(ROWS, 2), ...set(STEP),  // bytes of a row of y
      0x03, 0x40,  // for each row of w
      ...get(W), ...set(P), ...get(W), ...shifted(COLUMNS, w), ...add, ...set(END), ...get(X), ...set(Q),
      ...each(count - 1, t => [...get(Q + t), ...shifted(COLUMNS, x), ...add, ...set(Q + t + 1)]),
      ...each(4, k => [...vector(0x0c, ...Array(16).fill(0)), ...set(SUM + k)]),
      0x03, 0x40,  // for each sixteen columns
      ...each(parts, k => [...load(P, bytes * k, from), ...set(PART), ...each(count, t =>
        [...get(sum(k, t)), ...get(PART), ...load(Q + t, 16 * k), ...vector(...times), ...vector(...plus), ...set(sum(k, t))])]),
      ...move(P, integer(bytes * parts)), ...each(count, t => move(Q + t, integer(16 * parts))),
      ...get(P), ...get(END), 0x49, 0x0d, 0, 0x0b,  // again while P < END
      ...(count > 1 ? [] : each(3, k => [...get(SUM), ...get(SUM + k + 1), ...vector(...plus), ...set(SUM)])),
      ...get(Y), ...set(OUT),
      ...each(count, t => [
        ...get(OUT), ...each(4, k => [...get(SUM + t), ...lane(k), ...(k ? [0x92] : [])]), 0x38, 2, 0,
        ...move(OUT, get(STEP)),
      ]),
      ...get(END), ...set(W), ...move(Y, integer(4)),
      ...get(ROWS), ...integer(1), 0x6b, 0x22, ROWS, 0x0d, 0, 0x0b, 0x0b,
    ];
  };
  const sized = bytes => [(bytes.length & 127) | 128, bytes.length >> 7, ...bytes];
  const body = code => sized([2, 8, 0x7f, 5, 0x7b, ...code]);  // locals: eight i32, five v128
  const section = (number, ...bytes) => [number, ...sized(bytes)];
  const name = text => [text.length, ...[...text].map(letter => letter.charCodeAt(0))];
  const made = Object.keys(kinds).flatMap(kind => [1, 4].map(count => [`${kind}x${count}`, rowLoop(kinds[kind], count)]));
  const module = new WebAssembly.Module(new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, 1, 0x60, 5, ...Array(5).fill(0x7f), 0),
    ...section(2, 1, ...name("here"), ...name("memory"), 2, 0, 1),
    ...section(3, 4, 0, 0, 0, 0),
    ...section(7, 4, ...made.flatMap(([called], index) => [...name(called), 0, index])),
    ...section(10, 4, ...made.flatMap(([, code]) => body(code))),
  ]));
  return new WebAssembly.Instance(module, { here: { memory } }).exports;
}
