// The one loop that takes time, y[t][r] = sum of w[r][c] * x[t][c], as WebAssembly with 128-bit vectors.
//
// `kernels` writes the program's bytes (webassembly.github.io/spec/core/binary), so that nothing has to be
// compiled before. Its functions are called (w, x, y, rows, columns): three addresses in `memory` and two
// counts. There are four: a matrix of int8 with x of int16, or both of float32; for one row of x, or for four
// that share what is loaded of w. Columns are a multiple of 16; y is of float32. Each function, for `inputs`
// rows of x, is
//
//   for each row r of w:
//     sums = 0
//     for each sixteen columns:
//       for each vector of them: for t < inputs: sums[t] += w[r][vector] * x[t][vector]
//     for t < inputs: y[t][r] = the sum of the lanes of sums[t]
"use strict";

const kernels = (() => {  // which keeps these names to itself
// Instructions by the names of the specification.
const LOOP = [0x03, 0x40];  // loop, without a result
const END = [0x0b];
const branchIf = depth => [0x0d, depth];  // br_if, to the start of the loop that is so many levels out
const get = local => [0x20, local];  // local.get
const set = local => [0x21, local];  // local.set
const setAndKeep = local => [0x22, local];  // local.tee
const F32_STORE = [0x38, 2, 0];  // aligned to 2^2 bytes, at no offset
const I32_LESS = [0x49];  // i32.lt_u
const I32_ADD = [0x6a];
const I32_SUBTRACT = [0x6b];
const I32_SHIFT_LEFT = [0x74];
const F32_ADD = [0x92];
const F32_FROM_I32 = [0xb2];  // f32.convert_i32_s
const i32 = value => [0x41, ...(value < 64 ? [value] : [value | 0x80, 0])];  // a constant up to 127

const vector = (...code) => [0xfd, ...code];  // the prefix of all instructions of vectors
const ZERO_VECTOR = vector(0x0c, ...Array(16).fill(0));
const LOAD = 0x00;  // v128.load: sixteen bytes as they are
const LOAD_8_AS_16 = 0x01;  // v128.load8x8_s: eight numbers of int8 as int16
const loadVector = (address, offset, kind = LOAD) => [...get(address), ...vector(kind, 0, offset)];
const DOT_I16 = vector(0xba, 1);  // i32x4.dot_i16x8_s: products of int16, added in pairs
const ADD_I32 = vector(0xae, 1);
const MULTIPLY_F32 = vector(0xe6, 1);
const ADD_F32 = vector(0xe4, 1);
const laneOfI32 = k => vector(0x1b, k);
const laneOfF32 = k => vector(0x1f, k);

// Longer pieces: local += by; local << by; the code of several k, one after another.
const addTo = (local, by) => [...get(local), ...by, ...I32_ADD, ...set(local)];
const shifted = (local, by) => [...get(local), ...i32(by), ...I32_SHIFT_LEFT];
const repeat = (count, code) => Array.from({ length: count }, (_, k) => code(k)).flat();

// How sixteen columns are read and multiplied, for each type of w.
const KINDS = {
  int8: {
    vectors: 2,  // in sixteen columns
    vectorBytes: 8,  // of w in one of them
    weightShift: 0,  // log2 of the bytes of a number of w, then of x
    inputShift: 1,
    load: LOAD_8_AS_16,
    multiply: DOT_I16,
    add: ADD_I32,
    lane: k => [...laneOfI32(k), ...F32_FROM_I32],
  },
  float32: {
    vectors: 4,
    vectorBytes: 16,
    weightShift: 2,
    inputShift: 2,
    load: LOAD,
    multiply: MULTIPLY_F32,
    add: ADD_F32,
    lane: laneOfF32,
  },
};

// The parameters of a function, then its other integers, then its vectors.
const W = 0;
const X = 1;
const Y = 2;
const ROWS = 3;
const COLUMNS = 4;
const AT = 5;  // the address in w
const ROW_END = 6;  // where this row of w ends
const OUT = 7;  // the address in y
const Y_ROW = 8;  // bytes of a row of y
const INPUT = 9;  // the addresses in up to four rows of x
const WEIGHTS = 13;  // sixteen columns' part of w
const SUM = 14;  // four vectors of sums

// One function, for a kind and for so many rows of x.
function multiply(kind, inputs) {
  return [
    ...shifted(ROWS, 2), ...set(Y_ROW),
    ...LOOP,  // for each row of w
    ...beginRow(kind, inputs),
    ...LOOP,  // for each sixteen columns
    ...multiplyColumns(kind, inputs),
    ...get(AT), ...get(ROW_END), ...I32_LESS, ...branchIf(0), ...END,
    ...writeSums(kind, inputs),
    ...get(ROW_END), ...set(W), ...addTo(Y, i32(4)),
    ...get(ROWS), ...i32(1), ...I32_SUBTRACT, ...setAndKeep(ROWS), ...branchIf(0), ...END,
    ...END,
  ];
}

// Set the addresses of a row of w and of the rows of x, and the sums to zero.
function beginRow({ weightShift, inputShift }, inputs) {
  return [
    ...get(W), ...set(AT),
    ...get(W), ...shifted(COLUMNS, weightShift), ...I32_ADD, ...set(ROW_END),
    ...get(X), ...set(INPUT),
    ...repeat(inputs - 1, t => [
      ...get(INPUT + t), ...shifted(COLUMNS, inputShift), ...I32_ADD, ...set(INPUT + t + 1),
    ]),
    ...repeat(4, k => [...ZERO_VECTOR, ...set(SUM + k)]),
  ];
}

// Add the products of sixteen columns to the sums, and go on to the next sixteen.
function multiplyColumns({ vectors, vectorBytes, load, multiply, add }, inputs) {
  // A single row of x has several sums as well: an addition would wait for the one before it.
  const sum = (k, t) => SUM + (inputs === 1 ? k : t);
  return [
    ...repeat(vectors, k => [
      ...loadVector(AT, vectorBytes * k, load), ...set(WEIGHTS),
      ...repeat(inputs, t => [
        ...get(sum(k, t)),
        ...get(WEIGHTS), ...loadVector(INPUT + t, 16 * k), ...multiply,
        ...add, ...set(sum(k, t)),
      ]),
    ]),
    ...addTo(AT, i32(vectorBytes * vectors)),
    ...repeat(inputs, t => addTo(INPUT + t, i32(16 * vectors))),
  ];
}

// Write the sum of the lanes for each row of x.
function writeSums({ add, lane }, inputs) {
  return [
    ...(inputs > 1 ? [] : repeat(3, k => [...get(SUM), ...get(SUM + k + 1), ...add, ...set(SUM)])),
    ...get(Y), ...set(OUT),
    ...repeat(inputs, t => [
      ...get(OUT), ...repeat(4, k => [...get(SUM + t), ...lane(k), ...(k ? F32_ADD : [])]), ...F32_STORE,
      ...addTo(OUT, get(Y_ROW)),
    ]),
  ];
}

// The program: sections with numbers, each with its size.
const I32 = 0x7f;
const V128 = 0x7b;
const FUNCTION = 0x60;
const LOCALS = [2, 8, I32, 5, V128];  // two groups: eight integers, five vectors
const sized = bytes => [(bytes.length & 127) | 128, bytes.length >> 7, ...bytes];
const section = (number, ...bytes) => [number, ...sized(bytes)];
const name = text => [text.length, ...[...text].map(character => character.charCodeAt(0))];

function program() {
  const functions = ["int8x1", "int8x4", "float32x1", "float32x4"];
  const codeOf = called => {
    const [kind, inputs] = called.split("x");
    return multiply(KINDS[kind], Number(inputs));
  };
  return new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,  // "\0asm", version 1
    ...section(1, 1, FUNCTION, 5, ...Array(5).fill(I32), 0),  // one type: five integers, no result
    ...section(2, 1, ...name("here"), ...name("memory"), 2, 0, 1),  // imports the memory
    ...section(3, 4, 0, 0, 0, 0),  // four functions of the first type
    ...section(7, 4, ...functions.flatMap((called, index) => [...name(called), 0, index])),  // their names
    ...section(10, 4, ...functions.flatMap(called => sized([...LOCALS, ...codeOf(called)]))),
  ]);
}

// The functions, by names such as int8x4: the kind, and how many rows of x.
return memory => {
  const instance = new WebAssembly.Instance(new WebAssembly.Module(program()), { here: { memory } });
  return instance.exports;
};
})();
