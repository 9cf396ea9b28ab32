// One decoding step of a GPT, from the ids of N new tokens to their logits; `compiled.py` builds and calls it.
//
// One parallel region with five barriers a layer takes the place of some 700 operations. Each weight is read once,
// where `nn.Linear` keeps it. The sums of a row have the same order whatever the other rows are and however many
// threads there are, so its logits depend on neither.
//
// Shapes: N rows, D emb_dim, H heads, K = D / H, V vocab_size, I inputs and O outputs of a layer; T threads.

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

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

// As `CompiledStep` fills them.
struct Norm { const float *weight, *bias; };
struct Linear { const void* weight; const float *scale, *bias; };  // (O, I), (O,) or null, (O,) or null
struct Block { Norm attention_norm; Linear qkv, out; Norm feed_forward_norm; Linear up, down; };
struct Model { const float *tokens, *positions; Norm final_norm; Linear head; Block blocks[]; };
struct Shape {
  int64_t kind, rounds, layers, D, H, V, exact_gelu, threads, N;
  int64_t per_layer, per_part, per_row, per_head;  // strides of the cache (layers, 2, rows, H, columns, K)
};

template <class Vector>
static Vector read(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}
static Floats load(const float* from) { return read<Floats>(from); }
static void store(float* to, Floats vector) { memcpy(to, &vector, sizeof vector); }
static Floats multiply_add(Floats total, Floats a, Floats b) { return total + a * b; }

// What the inputs of a product are stored as, beside weights of a type; bfloat16 is the upper half of a float32.
template <class Type> struct Stored { typedef float Input; };

#ifdef __AVX512BF16__  // two products a lane; int8 fits into bfloat16
template <> struct Stored<uint16_t> { typedef uint16_t Input; };
template <> struct Stored<int8_t> { typedef uint16_t Input; };
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
#else
static Floats load(const uint16_t* from) { return (Floats)(__builtin_convertvector(read<Halves>(from), Ints) << 16); }
static Floats load(const int8_t* from) {  // in two stages: GCC converts at once number by number
  Shorts wide = __builtin_convertvector(read<Bytes>(from), Shorts);
  return __builtin_convertvector(__builtin_convertvector(wide, Ints), Floats);
}
#endif

// The sums of W vectors, in the lanes of one: at each stage halves of two vectors are added side by side.
template <int HALF = W / 2>
static inline __attribute__((always_inline)) Floats sums(Floats* vectors) {
  Ints lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  Ints low = (lane & HALF) ? lane - HALF + W : lane, high = low + HALF;
#pragma GCC unroll 16
  for (int i = 0; i < HALF; i++) {
    Floats a = vectors[i], b = vectors[i + HALF];
    vectors[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  }
  if constexpr (HALF > 1) return sums<HALF / 2>(vectors);
  else return vectors[0];
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

// The products of ROWS rows of x with W / ROWS rows of the weight (count, I each).
template <int ROWS, class Type, class Input>
static Floats tile(const Type* weight, int64_t outputs, const Input* x, int64_t rows, int64_t I) {
  constexpr int OUTS = W / ROWS, STEP = 4 * W / sizeof(Input);
  const Type* w[OUTS];
  const Input* in[ROWS];
  for (int o = 0; o < OUTS; o++) w[o] = weight + std::min<int64_t>(o, outputs - 1) * I;
  for (int n = 0; n < ROWS; n++) in[n] = x + std::min<int64_t>(n, rows - 1) * I;
  Floats total[W] = {};
  for (int64_t i = 0; i < I; i += STEP) {
    decltype(load(x)) inputs[ROWS];
#pragma GCC unroll 16
    for (int n = 0; n < ROWS; n++) inputs[n] = load(in[n] + i);
#pragma GCC unroll 16
    for (int o = 0; o < OUTS; o++) {
      auto weights = load(w[o] + i);
      if (sizeof(Type) < 4 && o * STEP * sizeof(Type) % 64 == 0)  // the next tile: processors foresee only long rows
        __builtin_prefetch(weight + (I + i) * OUTS + o * STEP);
#pragma GCC unroll 16
      for (int n = 0; n < ROWS; n++) total[n * OUTS + o] = multiply_add(total[n * OUTS + o], inputs[n], weights);
    }
  }
  return sums(total);
}

struct Range { int64_t begin, end; };

// Type: that of the weights, float, int8_t, or uint16_t for bfloat16.
template <class Type>
struct Step {
  typedef typename Stored<Type>::Input Input;
  const Model& model;
  const Shape& s;
  int64_t t, T;  // this thread, and how many there are

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

  // Call write(row, output, values) for each row of x (N, I) and each W of this thread's outputs (N, O).
  template <class Write>
  void product(const Linear& linear, const Input* x, int64_t I, int64_t O, Write write) const {
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += W) {
      const Type* weight = (const Type*)linear.weight + o * I;
      Floats bias = linear.bias ? load(linear.bias + o) : Floats{}, scale = linear.scale ? load(linear.scale + o) : Floats{};
      auto finish = [&](int64_t n, Floats values) {
        write(n, o, linear.scale ? narrow(values * scale) + bias : narrow(values + bias));
      };
      if (s.N == 1) finish(0, tile<1>(weight, own.end - o, x, 1, I));
      else
        for (int64_t n = 0; n < s.N; n += 4) {
          Floats rows[4];
          for (int k = 0; k < W && k < own.end - o; k += W / 4) {
            Floats values = tile<4>(weight + k * I, own.end - o - k, x + n * I, s.N - n, I);
            for (int row = 0; row < 4; row++) memcpy((float*)(rows + row) + k, (float*)&values + W / 4 * row, W);
          }
          for (int row = 0; row < 4 && row < s.N - n; row++) finish(n + row, rows[row]);
        }
    }
  }

  // x (N, D) -> out (N, D)
  void normalise(const Norm& norm, const float* x, Input* out) const {
    for (const float* end = x + s.N * s.D; x < end; x += s.D, out += s.D) {
      Floats total = {}, squares = {};
      for (int64_t i = 0; i < s.D; i += W) total += load(x + i);
      float mean = sum(total) / s.D;
      for (int64_t i = 0; i < s.D; i += W) squares += (load(x + i) - mean) * (load(x + i) - mean);
      float factor = 1 / std::sqrt(sum(squares) / s.D + 1e-5f);
      for (int64_t i = 0; i < s.D; i += W)
        store(out + i, narrow((load(x + i) - mean) * factor * load(norm.weight + i) + load(norm.bias + i)));
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
    for (int64_t i = 0; i < K; i += W) {
      Floats context[4] = {};  // several sums, because one would wait for itself
      for (int64_t j = 0; j < count; j++) context[j % 4] += scores[j] * load(values + j * K + i);
      store(out + i, narrow((context[0] + context[1] + (context[2] + context[3])) / divisor));
    }
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
static void run(const Model& model, const Shape& s, const int64_t* tokens, const int64_t* lengths, float* cache, float* logits) {
  typedef typename Step<Type>::Input Input;
  const int64_t N = s.N, D = s.D, K = s.D / s.H, longest = 1 + *std::max_element(lengths, lengths + N);
  std::vector<Line> shared(N * D / W * 7);
  float *x = shared[0].values, *queries = x + N * D;
  Input *context = (Input*)(queries + N * D), *inner = context + N * D;
  std::atomic<int64_t> arrived = 0;

#pragma omp parallel num_threads((int)s.threads)
  {
    const Step<Type> step{model, s, omp_get_thread_num(), omp_get_num_threads()};
    std::vector<Line> own(N * D / W + longest / W + 1);
    float* scores = own[N * D / W].values;
    Input* h = (Input*)own[0].values;
    int64_t expected = 0;
    // Wait for the other threads. OpenMP's barrier sleeps where several threads of a process use it, as in a server.
    auto meet = [&] {
      arrived++, expected += step.T;
      for (int64_t spins = 1; arrived < expected; spins++)
        if (spins % 1024 == 0) std::this_thread::yield();
    };
    auto add = [&](int64_t n, int64_t o, Floats values) { store(x + n * D + o, load(x + n * D + o) + values); };

    for (int64_t n = step.t; n < N; n += step.T)
      for (int64_t i = 0; i < D; i++)
        x[n * D + i] = model.tokens[tokens[n] * D + i] + model.positions[lengths[n] * D + i];
    meet();
    for (int64_t layer = 0; layer < s.layers; layer++) {
      const Block& block = model.blocks[layer];
      auto column = [&](int64_t part, int64_t n, int64_t head) {
        return cache + layer * s.per_layer + part * s.per_part + n * s.per_row + head * s.per_head;
      };
      step.normalise(block.attention_norm, x, h);
      step.product(block.qkv, h, D, 3 * D, [&](int64_t n, int64_t o, Floats values) {
        store(o < D ? queries + n * D + o : column(o / D - 1, n, o % D / K) + lengths[n] * K + o % K, values);
      });
      meet();
      for (int64_t i = step.t; i < N * s.H; i += step.T) {
        int64_t n = i / s.H, head = i % s.H, at = n * D + head * K;
        step.attend(queries + at, column(0, n, head), column(1, n, head), lengths[n] + 1, scores, context + at);
      }
      meet();
      step.product(block.out, context, D, D, add);
      meet();
      step.normalise(block.feed_forward_norm, x, h);
      step.product(block.up, h, D, 4 * D, [&](int64_t n, int64_t o, Floats values) {
        store(inner + n * 4 * D + o, step.activate(values));
      });
      meet();
      step.product(block.down, inner, 4 * D, D, add);
      meet();
    }
    step.normalise(model.final_norm, x, h);
    step.product(model.head, h, D, s.V, [&](int64_t n, int64_t o, Floats values) {
      memcpy(logits + n * s.V + o, &values, 4 * std::min<int64_t>(W, s.V - o));
    });
  }
}

// tokens (N,) and lengths (N,), the tokens of each row before this one; the cache gets their keys and values.
extern "C" void step(const Model* model, const Shape* shape, const int64_t* tokens, const int64_t* lengths, float* cache, float* logits) {
  auto typed = shape->kind == 0 ? run<float> : shape->kind == 1 ? run<uint16_t> : run<int8_t>;
  typed(*model, *shape, tokens, lengths, cache, logits);
}
