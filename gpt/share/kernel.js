// The one loop that takes time, y[r] = sum of w[r][c] * x[c], as WebAssembly with 128-bit vectors. The
// instructions are written here by their numbers (webassembly.github.io/spec/core/binary), so nothing compiles it.
"use strict";

// {int8, float32}: functions (w, x, y, rows, columns, stride) of addresses in `memory` and of counts. A row of w
// begins `stride` bytes after the one before; columns are a multiple of 16, x and y are of float32.
function kernels(memory) {
  const [W, X, Y, ROWS, COLUMNS, STRIDE, P, Q, END, HALF, SUM] = Array(11).keys();  // parameters, then locals
  const get = local => [0x20, local], set = local => [0x21, local];
  const integer = value => [0x41, ...(value < 64 ? [value] : [value | 0x80, 0])];  // up to 127
  const add = [0x6a], vector = (...code) => [0xfd, ...code];
  const load = (address, offset, code = 0) => [...get(address), ...vector(code, 0, offset)];
  const move = (local, by) => [...get(local), ...by, ...add, ...set(local)];
  const times = [...vector(0xe6, 1)], plus = [...vector(0xe4, 1)];  // f32x4.mul, f32x4.add
  const toFloat = part => [...get(HALF), ...vector(part, 1), ...vector(0xfa, 1)];  // of half of eight int16

  const accumulate = (k, weights) => [...get(SUM + k), ...weights, ...load(Q, 16 * k), ...times, ...plus, ...set(SUM + k)];
  const eight = k => [  // v128.load8x8_s, then the low and the high four
    ...load(P, 8 * k, 1), ...set(HALF), ...accumulate(2 * k, toFloat(0xa7)), ...accumulate(2 * k + 1, toFloat(0xa8)),
  ];
  const four = k => accumulate(k, load(P, 16 * k));

  const rowLoop = (sixteen, bytes) => [
    ...get(X), ...get(COLUMNS), ...integer(2), 0x74, ...add, ...set(END),  // shifted left: four bytes each
    0x03, 0x40,  // for each row
    ...get(W), ...set(P), ...get(X), ...set(Q),
    ...[0, 1, 2, 3].flatMap(k => [...vector(0x0c, ...Array(16).fill(0)), ...set(SUM + k)]),
    0x03, 0x40,  // for each sixteen columns
    ...sixteen, ...move(P, integer(bytes)), ...move(Q, integer(64)),
    ...get(Q), ...get(END), 0x49, 0x0d, 0, 0x0b,  // again while Q < END
    ...get(SUM), ...[1, 2, 3].flatMap(k => [...get(SUM + k), ...plus]), ...set(SUM),
    ...get(Y),
    ...[0, 1, 2, 3].flatMap(lane => [...get(SUM), ...vector(0x1f, lane), ...(lane ? [0x92] : [])]), 0x38, 2, 0,
    ...move(W, get(STRIDE)), ...move(Y, integer(4)),
    ...get(ROWS), ...integer(1), 0x6b, 0x22, ROWS, 0x0d, 0, 0x0b, 0x0b,
  ];
  const sized = bytes => [(bytes.length & 127) | 128, bytes.length >> 7, ...bytes];
  const body = code => sized([2, 3, 0x7f, 5, 0x7b, ...code]);  // locals: three i32, five v128
  const section = (number, ...bytes) => [number, ...sized(bytes)];
  const name = text => [text.length, ...[...text].map(letter => letter.charCodeAt(0))];
  const module = new WebAssembly.Module(new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, 1, 0x60, 6, ...Array(6).fill(0x7f), 0),
    ...section(2, 1, ...name("here"), ...name("memory"), 2, 0, 1),
    ...section(3, 2, 0, 0),
    ...section(7, 2, ...name("int8"), 0, 0, ...name("float32"), 0, 1),
    ...section(10, 2, ...body(rowLoop([0, 1].flatMap(eight), 16)), ...body(rowLoop([0, 1, 2, 3].flatMap(four), 64))),
  ]));
  return new WebAssembly.Instance(module, { here: { memory } }).exports;
}
