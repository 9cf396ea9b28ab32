// A GPT from N tokens to their logits: a prompt, or one new token of each text; `build.py` builds it, with GCC or clang,
// and `compiled.py` calls it.
//
// One parallel region with five barriers a layer takes the place of some 700 operations. Each weight is read once,
// where `nn.Linear` keeps it. The sums of a token have the same order whatever is read beside it and however many
// threads there are. So its logits depend on neither, nor on whether the tokens before it were read with it.
//
// Shapes: N tokens, D emb_dim, H heads, K = D / H, V vocab_size, I inputs and O outputs of a layer; T threads.

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#ifdef _OPENMP
extern "C" int omp_get_thread_num(), omp_get_num_threads();  // without its header, which not every compiler has
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#ifdef __AVX512F__
constexpr int W = 16;  // the lanes of a vector; K is a multiple of it, and D of 2 * W
#else
constexpr int W = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef int16_t Shorts __attribute__((vector_size(2 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef int8_t Bytes __attribute__((vector_size(W)));
struct alignas(4 * W) Line { float values[W]; };

// `compiled.py` declares the same structures, with the same fields in the same order.
struct Layer { const void* weight; const float *scale, *bias; };  // (O, I) or (O,), (O,) or null, (O,)
struct Block { Layer attention_norm, query, key, value, out, feed_forward_norm, up, down; };
struct Model { Layer tokens, positions, final_norm, head; const Block* blocks; };
// kind: of the weights of products; narrow: whether embeddings are bfloat16; rounds: whether inputs and outputs of
// products are.
struct Shape { int64_t kind, narrow, rounds, layers, D, H, V, exact_gelu, threads, N; };
// `cache` holds the keys and values of its text, with these strides (layers, 2, H, columns, K).
struct Token { int64_t id, position; float* cache; int64_t per_layer, per_part, per_head, scored; };

template <class Vector>
static Vector read(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}
static Floats load(const float* from) { return read<Floats>(from); }
static void store(float* to, Floats vector) { memcpy(to, &vector, sizeof vector); }
static Floats multiply_add(Floats total, Floats a, Floats b) { return total + a * b; }

// Puts a vector into a register. Otherwise GCC reads it from memory for each of its products.
template <class Vector>
static Vector keep(Vector vector) {
#ifdef __AVX__
  asm("" : "+v"(vector));
#endif
  return vector;
}

// What the inputs of a product are stored as, beside weights of a type, and what they are multiplied as; bfloat16 is the
// upper half of a float32.
template <class Type> struct Stored { typedef float Input, Factor; };
template <class Factor> struct Summed { typedef Floats Total; };

// On AMD's processors bfloat16's instruction does twice as many products as float32's, on Intel's half as many.
#if defined(__AVX512BF16__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
// Two products a lane; int8 fits into bfloat16.
template <> struct Stored<uint16_t> { typedef uint16_t Input, Factor; };
template <> struct Stored<int8_t> { typedef uint16_t Input, Factor; };
static __m512bh load(const uint16_t* from) { return read<__m512bh>(from); }
static __m512bh load(const int8_t* from) {
  __m512i low = _mm512_cvtepi8_epi32(read<__m128i>(from)), high = _mm512_cvtepi8_epi32(read<__m128i>(from + W));
  return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}
static Floats multiply_add(Floats total, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(total, a, b); }
static void store(uint16_t* to, Floats vector) {
  __m256bh halves = _mm512_cvtneps_pbh(vector);
  memcpy(to, &halves, sizeof halves);
}
#elif defined(__AVX512F__)
static Floats load(const uint16_t* from) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(from)), 16);
}
static Floats load(const int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from))); }
#else
#ifdef __AVX2__  // where GCC would take four or eight instructions to make the numbers wider
static Floats load(const uint16_t* from) {
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(from)), 16);
}
// int8 times int16: two products a lane, of twice as many lanes' numbers as there are floats.
template <> struct Stored<int8_t> { typedef float Input; typedef int16_t Factor; };
template <> struct Summed<int16_t> { typedef Ints Total; };
static __m256i load(const int16_t* from) { return read<__m256i>(from); }
static __m256i load(const int8_t* from) { return _mm256_cvtepi8_epi16(read<__m128i>(from)); }
static Ints multiply_add(Ints total, __m256i a, __m256i b) { return total + (Ints)_mm256_madd_epi16(a, b); }
#else
static Floats load(const uint16_t* from) { return (Floats)(__builtin_convertvector(read<Halves>(from), Ints) << 16); }
static Floats load(const int8_t* from) {  // in two stages: GCC converts at once number by number
  Shorts wide = __builtin_convertvector(read<Bytes>(from), Shorts);
  return __builtin_convertvector(__builtin_convertvector(wide, Ints), Floats);
}
#endif
#endif

// The sums of pairs of lanes HALF apart: those of `a` in every other half of the lanes, of `b` in the rest.
template <int HALF, size_t... I>
static inline __attribute__((always_inline)) Floats fold(Floats a, Floats b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I & HALF ? I - HALF + W : I)...) +
         __builtin_shufflevector(a, b, (I & HALF ? I + W : I + HALF)...);
#else
  Ints low = {(int)(I & HALF ? I - HALF + W : I)...}, high = low + HALF;
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}

// The sums of W vectors, in the lanes of one: at each stage halves of two vectors are added side by side.
template <int HALF = W / 2>
static inline __attribute__((always_inline)) Floats sums(Floats* vectors) {
  UNROLL
  for (int i = 0; i < HALF; i++)
    vectors[i] = fold<HALF>(vectors[i], vectors[i + HALF], std::make_index_sequence<W>());
  if constexpr (HALF > 1) return sums<HALF / 2>(vectors);
  else return vectors[0];
}

static Floats sums(Ints* vectors) {
  Floats floats[W];
  for (int i = 0; i < W; i++) floats[i] = __builtin_convertvector(vectors[i], Floats);
  return sums(floats);
}

static float sum(Floats vector) {
  Floats vectors[W] = {vector};
  return sums(vectors)[0];
}

// e^x to about 2e-7 of it, for x <= 88: 2^n e^r with |r| <= ln(2) / 2, and e^r by its series.
static Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  Ints n = __builtin_convertvector(x * 1.44269504f + (x < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
  Floats whole = __builtin_convertvector(n, Floats), r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
  Floats series = Floats{} + 1 / 720.0f;
  for (float factor : {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) series = series * r + factor;
  return (Floats)((Ints)series + (n << 23));
}

constexpr int64_t CHUNK = 1024;  // inputs whose products are added first: so many of some rows fit into the L1 cache

constexpr int64_t MOST = 128;  // rows that are multiplied with a weight while it is near: so many fit into the L2 cache

// If x has one row, it is multiplied with rows of the weight that are so many apart, unless there are fewer. Each of the W
// rows of a tile then goes on where one of the tile before ended: W long streams, which the processor fetches by itself,
// while it is late for short rows. With AVX-512, int8 is faster with neighbouring rows that are fetched ahead.
template <class Weight>
constexpr int64_t apart_of() {
#ifdef __AVX512F__
  return sizeof(Weight) == 1 ? 1 : 64;
#else
  return 64;
#endif
}

// What to fetch from memory while a tile is computed: so many bytes in each of its steps.
struct Ahead { const char* from; int bytes; };

// The products of a row of x with W rows of the weight, over `count` inputs; rows are `stride` apart.
template <class Weight, class Factor>
static Floats thin_tile(const Weight* weight, int64_t stride, int64_t outputs, const Factor* x, int64_t count,
                        Ahead ahead) {
  constexpr int STEP = 4 * W / sizeof(Factor);
  constexpr int AT_ONCE = apart_of<Weight>() > 1 && STEP <= 16 ? 2 : 1;  // the inputs are a multiple of 32
  const Weight* w[W];
  for (int o = 0; o < W; o++) w[o] = weight + std::min<int64_t>(o, outputs - 1) * stride;
  typename Summed<Factor>::Total total[W] = {};
  for (int64_t i = 0; i < count; i += AT_ONCE * STEP, ahead.from += AT_ONCE * ahead.bytes) {
    for (int line = 0; line < AT_ONCE * ahead.bytes; line += 64)
      __builtin_prefetch(ahead.from + line, 0, 2);  // into the L2 cache: the L1 is for the inputs
    decltype(load(x)) inputs[AT_ONCE];
    UNROLL
    for (int u = 0; u < AT_ONCE; u++) inputs[u] = keep(load(x + i + u * STEP));
    UNROLL
    for (int o = 0; o < W; o++)
      UNROLL
      for (int u = 0; u < AT_ONCE; u++) total[o] = multiply_add(total[o], inputs[u], load(w[o] + i + u * STEP));
  }
  return sums(total);
}

constexpr int ROWS = 4, OUTS = W / ROWS;

// The products of ROWS rows of x with OUTS rows of the weight, over `count` inputs; rows are `stride` and I apart.
template <class Weight, class Factor>
static Floats tile(const Weight* weight, int64_t stride, int64_t outputs, const Factor* x, int64_t rows, int64_t I,
                   int64_t count, Ahead ahead) {
  constexpr int STEP = 4 * W / sizeof(Factor);
  const Weight* w[OUTS];
  const Factor* in[ROWS];
  for (int o = 0; o < OUTS; o++) w[o] = weight + std::min<int64_t>(o, outputs - 1) * stride;
  for (int n = 0; n < ROWS; n++) in[n] = x + std::min<int64_t>(n, rows - 1) * I;
  typename Summed<Factor>::Total total[W] = {};
  const int bytes = 8 * ahead.bytes;  // of eight steps, because one needs a part of a line
  for (int64_t i = 0; i < count; ahead.from += bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead.from + line, 0, 2);
    for (const int64_t end = std::min<int64_t>(count, i + 8 * STEP); i < end; i += STEP) {
      decltype(load(x)) weights[OUTS];
      UNROLL
      for (int o = 0; o < OUTS; o++) weights[o] = keep(load(w[o] + i));
      UNROLL
      for (int n = 0; n < ROWS; n++) {
        auto inputs = keep(load(in[n] + i));
        UNROLL
        for (int o = 0; o < OUTS; o++) total[n * OUTS + o] = multiply_add(total[n * OUTS + o], inputs, weights[o]);
      }
    }
  }
  return sums(total);
}

struct Range { int64_t begin, end; };

// W numbers of an embedding, float32 or bfloat16.
static Floats embedded(const void* table, bool narrow, int64_t at) {
  if (!narrow) return load((const float*)table + at);
  return (Floats)(__builtin_convertvector(read<Halves>((const uint16_t*)table + at), Ints) << 16);
}

// Type: that of the weights, float, int8_t, or uint16_t for bfloat16.
template <class Type>
struct Step {
  typedef typename Stored<Type>::Input Input;
  typedef typename Stored<Type>::Factor Factor;
  const Model& model;
  const Shape& s;
  int64_t t, T;  // this thread, and how many there are
  Factor* rounded;  // place for MOST rows of 4 D, where inputs are multiplied as another type

  // The nearest bfloat16, where PyTorch's products in bfloat16 and int8 take and give it.
  Floats narrow(Floats value) const {
    Ints bits = (Ints)value;
    return s.rounds ? (Floats)(value == value ? (bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff : bits) : value;
  }

  // This thread's part, in whole vectors.
  Range part(int64_t count) const {
    auto edge = [&](int64_t i) { return std::min(count, (count + W - 1) / W * i / T * W); };
    return {edge(t), edge(t + 1)};
  }

  // The factors of N rows of inputs, (N, I) both, and the unit of each row.
  const Factor* factors(const Input* x, int64_t N, int64_t I, float* units) const {
    std::fill(units, units + N, 1.0f);
    if constexpr (std::is_same_v<Input, Factor>) return x;
    else {
      for (int64_t n = 0; n < N; n++) {
        const float* row = x + n * I;
        Floats most = {}, nothing = {};
        for (int64_t i = 0; i < I; i += W) {
          Floats value = load(row + i), size = value < 0.0f ? -value : value;
          most = most < size ? size : most;
          nothing += value * 0.0f;  // not a number, where one is none
        }
        float top = 1e-30f;
        for (int lane = 0; lane < W; lane++) top = std::max(top, most[lane]);
        for (int64_t i = 0; i < I; i += W) {
          Floats value = load(row + i) * (32767 / top);
          Ints whole = __builtin_convertvector(value + (value < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
          Shorts shorts = __builtin_convertvector(whole, Shorts);
          memcpy(rounded + n * I + i, &shorts, sizeof shorts);
        }
        units[n] = top / 32767 + sum(nothing);
      }
      return rounded;
    }
  }

  // What turns the sums of W outputs from `o` on into outputs: their scales and biases.
  auto finish(const Layer& linear, int64_t o, int64_t O) const {
    Floats bias = {}, scale = {};
    const size_t bytes = 4 * std::min<int64_t>(W, O - o);
    memcpy(&bias, linear.bias + o, bytes);
    if (linear.scale) memcpy(&scale, linear.scale + o, bytes);
    return [=](Floats total, float unit) {
      return linear.scale ? narrow(total * (scale * unit)) + bias : narrow(total + bias);
    };
  }

  // Call write(row, output, values) for each row of x (N, I) and each W of this thread's outputs (N, O).
  template <class Write>
  void product(const Layer& linear, const Input* x, int64_t N, int64_t I, int64_t O, Write write) const {
    float units[MOST];
    for (int64_t n = 0; n < N; n += MOST) {
      const int64_t rows = std::min(MOST, N - n);
      const Factor* some = factors(x + n * I, rows, I, units);
      if (N == 1) return one_row(linear, some, units[0], I, O, write);
      some_rows(linear, some, units, rows, I, O, [&](int64_t row, int64_t o, Floats values) {
        write(n + row, o, values);
      });
    }
  }

  template <class Write>
  void one_row(const Layer& linear, const Factor* x, float unit, int64_t I, int64_t O, Write write) const {
    constexpr int STEP = 4 * W / sizeof(Factor);
    constexpr int64_t APART = apart_of<Type>();
    constexpr int BYTES = APART == 1 ? W * STEP * sizeof(Type) : 0;
    Line totals[APART];
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += APART * W) {
      const int64_t outputs = std::min(APART * W, own.end - o), apart = (outputs + W - 1) / W;
      for (int64_t k = 0; k < apart; k++) {
        const Type* weight = (const Type*)linear.weight + (o + k) * I;
        Floats total = {};
        for (int64_t c = 0, count; c < I; c += count) {
          count = std::min(CHUNK, I - c);
          const Ahead ahead{(const char*)(weight + W * I + W * c), BYTES};
          Floats values = thin_tile(weight + c, apart * I, (outputs - k + apart - 1) / apart, x + c, count, ahead);
          total = c ? total + values : values;
        }
        for (int lane = 0; lane < W; lane++) totals[0].values[lane * apart + k] = total[lane];
      }
      for (int64_t k = 0; k < apart; k++) write(0, o + k * W, finish(linear, o + k * W, O)(load(totals[k].values), unit));
    }
  }

  template <class Write>
  void some_rows(const Layer& linear, const Factor* x, const float* units, int64_t N, int64_t I, int64_t O,
                 Write write) const {
    constexpr int STEP = 4 * W / sizeof(Factor);
    constexpr int NEAR = std::max(4, OUTS);  // rows of the weight that stay in the L1 cache beside those of x
    constexpr int64_t WIDTH = CHUNK + STEP;  // a power of two would put all rows into the same lines of the cache
    const int64_t panels = (N + ROWS - 1) / ROWS;
    Line partial[MOST];
    alignas(64) Factor wide[NEAR * WIDTH];
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += W) {
      const Type* weight = (const Type*)linear.weight + o * I;
      for (int64_t c = 0, count; c < I; c += count) {
        count = std::min(CHUNK, I - c);
        for (int64_t k = 0; k < W && k < own.end - o; k += NEAR) {
          const Type* some = weight + k * I + c;
          const int64_t outputs = std::min<int64_t>(NEAR, own.end - o - k);
          const bool widen = sizeof(Type) != sizeof(Factor) && panels > 1;
          if (widen)
            for (int64_t u = 0; u < outputs; u++)
              for (int64_t i = 0; i < count; i += STEP) {
                auto vector = load(some + u * I + i);
                memcpy(wide + u * WIDTH + i, &vector, sizeof vector);
              }
          // All tiles fetch a part of the weights that follow.
          Ahead ahead{(const char*)(weight + (W + k) * I + c * NEAR), int(OUTS * STEP * sizeof(Type) / panels)};
          for (int64_t p = 0; p < panels; p++)
            for (int64_t u = 0; u < outputs; u += OUTS, ahead.from += ahead.bytes * (count / STEP)) {
              const Factor* rows = x + p * ROWS * I + c;
              Floats values = widen ? tile(wide + u * WIDTH, WIDTH, outputs - u, rows, N - p * ROWS, I, count, ahead)
                                    : tile(some + u * I, I, outputs - u, rows, N - p * ROWS, I, count, ahead);
              for (int row = 0; row < ROWS; row++)
                for (int lane = 0; lane < OUTS; lane++) {
                  float &to = partial[p * ROWS + row].values[k + u + lane], value = values[row * OUTS + lane];
                  to = c ? to + value : value;
                }
            }
        }
      }
      const auto finished = finish(linear, o, O);
      for (int64_t n = 0; n < N; n++) write(n, o, finished(load(partial[n].values), units[n]));
    }
  }

  // x (N, D) -> out (N, D)
  void normalise(const Layer& norm, const float* x, int64_t N, Input* out) const {
    for (const float* end = x + N * s.D; x < end; x += s.D, out += s.D) {
      Floats total = {}, squares = {};
      for (int64_t i = 0; i < s.D; i += W) total += load(x + i);
      float mean = sum(total) / s.D;
      for (int64_t i = 0; i < s.D; i += W) squares += (load(x + i) - mean) * (load(x + i) - mean);
      float factor = 1 / std::sqrt(sum(squares) / s.D + 1e-5f);
      for (int64_t i = 0; i < s.D; i += W)
        store(out + i, narrow((load(x + i) - mean) * factor * load((const float*)norm.weight + i) + load(norm.bias + i)));
    }
  }

  // A query (K,) with keys and values (count, K) -> out (K,); scores has place for count and W - 1 more.
  void attend(const float* query, const float* keys, const float* values, int64_t count, float* scores, Input* out) const {
    const int64_t K = s.D / s.H;
    float scale = 1 / std::sqrt((float)K), top = -INFINITY;
    for (int64_t j = 0; j < count; j += W) {
      Floats totals[W] = {};
      for (int u = 0; u < W; u++)
        for (int64_t i = 0; i < K; i += W) totals[u] += load(query + i) * load(keys + std::min(j + u, count - 1) * K + i);
      store(scores + j, sums(totals) * scale);
    }
    for (int64_t j = 0; j < count; j++) top = std::max(top, scores[j]);
    Floats total = {};
    for (int64_t j = 0; j < count; j += W) {
      std::fill(scores + std::min(count, j + W), scores + j + W, -INFINITY);
      Floats weights = exponential(load(scores + j) - top);
      store(scores + j, weights);
      total += weights;
    }
    float divisor = sum(total);
    constexpr int SOME = W / 4;  // with four sums each there are registers for so many vectors
    int64_t i = 0;
    for (; i + SOME * W <= K; i += SOME * W) weigh<SOME>(values + i, count, scores, divisor, out + i);
    for (; i < K; i += W) weigh<1>(values + i, count, scores, divisor, out + i);
  }

  // VECTORS vectors of the weighted mean of the values.
  template <int VECTORS>
  void weigh(const float* values, int64_t count, const float* weights, float divisor, Input* out) const {
    const int64_t K = s.D / s.H;
    Floats context[VECTORS][4] = {};  // several sums, because one would wait for itself
    for (int64_t j = 0; j < count; j += 4)
      UNROLL
      for (int u = 0; u < 4; u++)
        if (j + u < count)
      UNROLL
          for (int v = 0; v < VECTORS; v++) context[v][u] += weights[j + u] * load(values + (j + u) * K + v * W);
    for (int v = 0; v < VECTORS; v++)
      store(out + v * W, narrow((context[v][0] + context[v][1] + (context[v][2] + context[v][3])) / divisor));
  }

  // GELU; with tanh(z) = 2 / (1 + e^-2z) - 1 its approximation is x / (1 + e^-2z).
  Floats activate(Floats x) const {
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    Floats result = x / (1.0f + exponential(-2.0f * (z < -40.0f ? Floats{} - 40.0f : z)));
    if (s.exact_gelu)
      for (int k = 0; k < W; k++) result[k] = x[k] * 0.5f * (1 + std::erf(x[k] * 0.70710678f));
    return narrow(result);
  }
};

template <class Type>
static void run(const Model& model, const Shape& s, const Token* tokens, float* logits) {
  typedef typename Step<Type>::Input Input;
  const int64_t N = s.N, D = s.D, K = s.D / s.H;
  int64_t longest = 1;
  for (int64_t n = 0; n < N; n++) longest = std::max(longest, tokens[n].position + 1);
  std::vector<Line> shared(N * D / W * 7);
  float *x = shared[0].values, *queries = x + N * D;
  Input *context = (Input*)(queries + N * D), *inner = context + N * D;
  typedef typename Step<Type>::Factor Factor;
  const int64_t rounded = std::is_same_v<Input, Factor> ? 0 : std::min(N, MOST) * 4 * D / W;
  // Memory of a thread; there is no way out of a parallel region.
  const int64_t each = N * D / W + rounded + longest / W + 1;
  std::vector<Line> scratch(each * s.threads);
  std::atomic<int64_t> arrived = 0;

#pragma omp parallel num_threads((int)s.threads)
  {
    Line* own = scratch.data() + omp_get_thread_num() * each;
    Input* h = (Input*)own[0].values;
    float* scores = own[N * D / W + rounded].values;
    const Step<Type> step{model, s, omp_get_thread_num(), omp_get_num_threads(), (Factor*)own[N * D / W].values};
    int64_t expected = 0;
    // Wait for the other threads. OpenMP's barrier sleeps where several threads of a process use it, as in a server.
    auto meet = [&] {
      arrived++, expected += step.T;
      for (int64_t spins = 1; arrived < expected; spins++)
        if (spins % 1024 == 0) std::this_thread::yield();
    };
    auto add = [&](int64_t n, int64_t o, Floats values) { store(x + n * D + o, load(x + n * D + o) + values); };

    for (int64_t n = step.t; n < N; n += step.T)
      for (int64_t i = 0; i < D; i += W)
        store(x + n * D + i, embedded(model.tokens.weight, s.narrow, tokens[n].id * D + i) +
                                 embedded(model.positions.weight, s.narrow, tokens[n].position * D + i));
    meet();
    for (int64_t layer = 0; layer < s.layers; layer++) {
      const Block& block = model.blocks[layer];
      auto column = [&](int64_t part, int64_t n, int64_t head) {
        const Token& token = tokens[n];
        return token.cache + layer * token.per_layer + part * token.per_part + head * token.per_head;
      };
      step.normalise(block.attention_norm, x, N, h);
      step.product(block.query, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
        store(queries + n * D + o, values);
      });
      step.product(block.key, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
        store(column(0, n, o / K) + tokens[n].position * K + o % K, values);
      });
      step.product(block.value, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
        store(column(1, n, o / K) + tokens[n].position * K + o % K, values);
      });
      meet();
      for (int64_t i = step.t; i < N * s.H; i += step.T) {  // head by head: its keys stay in the cache
        int64_t n = i % N, head = i / N, at = n * D + head * K;
        step.attend(queries + at, column(0, n, head), column(1, n, head), tokens[n].position + 1, scores, context + at);
      }
      meet();
      step.product(block.out, context, N, D, D, add);
      meet();
      step.normalise(block.feed_forward_norm, x, N, h);
      step.product(block.up, h, N, D, 4 * D, [&](int64_t n, int64_t o, Floats values) {
        store(inner + n * 4 * D + o, step.activate(values));
      });
      meet();
      step.product(block.down, inner, N, 4 * D, D, add);
      meet();
    }
    int64_t scored = 0;
    for (int64_t n = 0; n < N; n++)
      if (tokens[n].scored) step.normalise(model.final_norm, x + n * D, 1, h + scored++ * D);
    step.product(model.head, h, scored, D, s.V, [&](int64_t n, int64_t o, Floats values) {
      memcpy(logits + n * s.V + o, &values, 4 * std::min<int64_t>(W, s.V - o));
    });
  }
}

// Writes the keys and values of the tokens to their caches, and the logits of those `scored`, in their order.
// Returns 1 where there is no memory.
extern "C" int step(const Model* model, const Shape* shape, const Token* tokens, float* logits) {
  auto typed = shape->kind == 0 ? run<float> : shape->kind == 1 ? run<uint16_t> : run<int8_t>;
  try {
    typed(*model, *shape, tokens, logits);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
