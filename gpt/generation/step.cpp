// Computes a GPT's logits after N tokens: of a prompt, or one new token of each text. `build.py` builds it,
// with GCC or clang, and `compiled.py` calls it.
//
// It computes what `gpt/model.py` and `gpt/attention/multi_head.py` define. One parallel region with five
// barriers a layer takes the place of some 700 operations. Each weight is read once, where `nn.Linear` keeps
// it. The sums of a token have the same order, whatever is read beside it and however many threads there are.
// So its logits depend on neither, nor on whether the tokens before it were read with it.
//
// Shapes: N tokens, D emb_dim, H heads, K = D / H, V vocab_size, I inputs and O outputs of a layer.
// Indices: n token, o output, i input, j token of the cache, k row or lane, u unrolled, c chunk.
//
// From top to bottom: vectors; the structures that `compiled.py` fills; loads and products of each type of
// weight; sums and e^x; tiles, which are the inner loops of products; products of int4; `Worker`, what
// one thread does; `run`, which starts the threads. Last comes `hash`, by which `notes.py` recognises
// weights.

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
// Declared here, because not every compiler has the header.
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
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
struct Layer {
  const void* weight;  // (O, I), or (O,) of a norm; in int4 groups, (O / EIGHT, I / GROUP)
  const float* scale;  // (O,), or null unless the weight is int8 or int4
  const float* bias;  // (O,)
};
struct Block {
  Layer attention_norm, query, key, value, out;
  Layer feed_forward_norm, up, down;
};
struct Model {
  Layer tokens, positions, final_norm, head;
  const Block* blocks;
};
struct Call {
  int64_t kind;  // of the matrices: 0 float32, 1 bfloat16, 2 int8, 3 int4, where the head is int8
  int64_t bfloat16_embeddings;
  int64_t layers, D, H, V;
  int64_t exact_gelu;
  int64_t threads;
  int64_t N;
};
struct Token {
  int64_t id;
  int64_t position;
  float* cache;  // the keys and values of its text, (layers, 2, H, columns, K)
  int64_t per_layer, per_part, per_head;  // strides of the cache
  int64_t scored;  // whether its logits are computed
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

// Puts a vector into a register. Otherwise GCC reads it from memory for each of its products.
template <class Vector>
static Vector in_register(Vector vector) {
#ifdef __AVX__
  asm("" : "+v"(vector));
#endif
  return vector;
}

// The inputs of a product are stored as one type, beside weights of a type, multiplied as another, and their
// products are summed in a third. bfloat16 is the upper half of a float32.
//
// processor                   weight           Input     Factor    Total    why
// AMD with AVX-512 BF16       bfloat16, int8   bfloat16  bfloat16  Floats   two products a lane
// AVX2, and no AVX-512        int8             float32   int16     Ints     two products a lane
// the same, and all others    the rest         float32   float32   Floats
//
// int4 has the Input of int8, because its head is int8. Its factors are `QuantizedInputs` on every
// processor.
template <class Type> struct Stored { typedef float Input, Factor; };
template <class Factor> struct Summed { typedef Floats Total; };

// bfloat16's instruction does twice as many products as float32's on AMD's processors. On Intel's it does
// half as many.
#if defined(__AVX512BF16__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
#define BFLOAT16_PRODUCTS
template <> struct Stored<uint16_t> { typedef uint16_t Input, Factor; };
template <> struct Stored<int8_t> { typedef uint16_t Input, Factor; };  // int8 fits into bfloat16
#elif defined(__AVX2__) && !defined(__AVX512F__)
template <> struct Stored<int8_t> { typedef float Input; typedef int16_t Factor; };
template <> struct Summed<int16_t> { typedef Ints Total; };
#endif
struct Group;  // of int4 weights, see below
template <> struct Stored<Group> : Stored<int8_t> {};

#ifdef BFLOAT16_PRODUCTS
static __m512bh load(const uint16_t* from) { return read<__m512bh>(from); }
static __m512bh load(const int8_t* from) {
  __m512i low = _mm512_cvtepi8_epi32(read<__m128i>(from));
  __m512i high = _mm512_cvtepi8_epi32(read<__m128i>(from + W));
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
static Floats load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from)));
}
#else
#ifdef __AVX2__  // where GCC would take four or eight instructions to make the numbers wider
static Floats load(const uint16_t* from) {
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(from)), 16);
}
// int8 times int16: two products a lane, of twice as many lanes' numbers as there are floats.
static __m256i load(const int16_t* from) { return read<__m256i>(from); }
static __m256i load(const int8_t* from) { return _mm256_cvtepi8_epi16(read<__m128i>(from)); }
static Ints multiply_add(Ints total, __m256i a, __m256i b) { return total + (Ints)_mm256_madd_epi16(a, b); }
#else
static Floats load(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(read<Halves>(from), Ints) << 16);
}
static Floats load(const int8_t* from) {  // in two stages: GCC converts at once number by number
  Shorts wide = __builtin_convertvector(read<Bytes>(from), Shorts);
  return __builtin_convertvector(__builtin_convertvector(wide, Ints), Floats);
}
#endif
#endif

// The sums of pairs of lanes HALF apart: those of `a` in every other half of the lanes, of `b` in the rest.
template <int HALF, size_t... I>
static inline __attribute__((always_inline)) Floats add_halves(Floats a, Floats b,
                                                               std::index_sequence<I...>) {
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
    vectors[i] = add_halves<HALF>(vectors[i], vectors[i + HALF], std::make_index_sequence<W>());
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

// e^x to about 2e-7 of it, for x <= 88: 2^n e^r with |r| <= ln(2) / 2, and e^r by its series. ln(2) is
// subtracted in two parts, so that nothing is lost (Cody and Waite 1980).
static Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  Ints n = __builtin_convertvector(x * 1.44269504f + (x < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
  Floats series = Floats{} + 1 / 720.0f;
  for (float factor : {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) series = series * r + factor;
  return (Floats)((Ints)series + (n << 23));
}

// Inputs whose products are added before others: of some rows, this many fit into the L1 cache. And the sums
// of int16 times int8, of which a lane adds CHUNK / W products, fit into int32.
constexpr int64_t CHUNK = 1024;
static_assert(CHUNK / W * 32767 * 127 <= INT32_MAX);

// Rows that are multiplied with a weight while it is near: this many fit into the L2 cache.
constexpr int64_t MOST_ROWS = 128;

// How far apart the W rows of the weight are that a thin tile multiplies with a single row of x, at most. See
// `one_row`. With AVX-512, int8 is faster with neighbouring rows that are fetched ahead.
template <class Weight>
constexpr int64_t apart_of() {
#ifdef __AVX512F__
  return sizeof(Weight) == 1 ? 1 : 64;
#else
  return 64;
#endif
}

// What to fetch from memory while a tile is computed.
struct Ahead {
  const char* from;
  int bytes;  // in each iteration of the tile
};

// The products of a row of x with W rows of the weight, over `count` inputs; rows are `stride` apart.
template <class Weight, class Factor>
static Floats thin_tile(const Weight* weight, int64_t stride, int64_t outputs, const Factor* x, int64_t count,
                        Ahead ahead) {
  constexpr int FACTORS = 4 * W / sizeof(Factor);
  constexpr int AT_ONCE = apart_of<Weight>() > 1 && FACTORS <= 16 ? 2 : 1;  // the inputs are a multiple of 32
  const Weight* w[W];
  for (int o = 0; o < W; o++) w[o] = weight + std::min<int64_t>(o, outputs - 1) * stride;
  typename Summed<Factor>::Total total[W] = {};
  for (int64_t i = 0; i < count; i += AT_ONCE * FACTORS, ahead.from += AT_ONCE * ahead.bytes) {
    for (int line = 0; line < AT_ONCE * ahead.bytes; line += 64)
      __builtin_prefetch(ahead.from + line, 0, 2);  // into the L2 cache: the L1 is for the inputs
    decltype(load(x)) inputs[AT_ONCE];
    UNROLL
    for (int u = 0; u < AT_ONCE; u++) inputs[u] = in_register(load(x + i + u * FACTORS));
    UNROLL
    for (int o = 0; o < W; o++)
      UNROLL
      for (int u = 0; u < AT_ONCE; u++) {
        total[o] = multiply_add(total[o], inputs[u], load(w[o] + i + u * FACTORS));
      }
  }
  return sums(total);
}

constexpr int ROWS = 4;
constexpr int OUTS = W / ROWS;

// The products of ROWS rows of x, I apart, with OUTS rows of the weight, `stride` apart, over `count` inputs.
template <class Weight, class Factor>
static Floats tile(const Weight* weight, int64_t stride, int64_t outputs, const Factor* x, int64_t rows,
                   int64_t I, int64_t count, Ahead ahead) {
  constexpr int FACTORS = 4 * W / sizeof(Factor);
  const Weight* w[OUTS];
  const Factor* in[ROWS];
  for (int o = 0; o < OUTS; o++) w[o] = weight + std::min<int64_t>(o, outputs - 1) * stride;
  for (int n = 0; n < ROWS; n++) in[n] = x + std::min<int64_t>(n, rows - 1) * I;
  typename Summed<Factor>::Total total[W] = {};
  const int bytes = 8 * ahead.bytes;  // of eight iterations, because one needs a part of a line
  for (int64_t i = 0; i < count; ahead.from += bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead.from + line, 0, 2);
    for (const int64_t end = std::min<int64_t>(count, i + 8 * FACTORS); i < end; i += FACTORS) {
      decltype(load(x)) weights[OUTS];
      UNROLL
      for (int o = 0; o < OUTS; o++) weights[o] = in_register(load(w[o] + i));
      UNROLL
      for (int n = 0; n < ROWS; n++) {
        auto inputs = in_register(load(in[n] + i));
        UNROLL
        for (int o = 0; o < OUTS; o++) {
          total[n * OUTS + o] = multiply_add(total[n * OUTS + o], inputs, weights[o]);
        }
      }
    }
  }
  return sums(total);
}

constexpr int EIGHT = 8;  // outputs whose int4 weights lie together
constexpr int GROUP = 32;  // inputs that share a scale

// int4 weights of EIGHT outputs and GROUP inputs; each is 0 to 15 and stands for 8 less.
struct Group {
  int8_t group_scales[EIGHT];  // of each output, in units of its scale
  // [j][o][u]: in the lower half output o's input 8 j + u, in the upper half its input 8 j + 4 + u
  uint8_t pairs[4][EIGHT][4];
};

// GROUP inputs of a product with int4, as int8.
struct QuantizedInputs {
  float unit;
  int16_t offsets[2];  // 8 times the sums of inputs 0, 1, 4, 5, 8, 9 ... and 2, 3, 6, 7 ...
  int8_t values[GROUP];
};

// In vectors of these types an output has four bytes.
typedef float EightFloats __attribute__((vector_size(4 * EIGHT)));
typedef int32_t EightInts __attribute__((vector_size(4 * EIGHT)));
typedef int16_t EightPairs __attribute__((vector_size(4 * EIGHT)));
typedef uint8_t EightFours __attribute__((vector_size(4 * EIGHT)));
typedef int16_t EightShorts __attribute__((vector_size(2 * EIGHT)));
typedef int8_t EightBytes __attribute__((vector_size(EIGHT)));

// The sums of two neighbours' products: of weights, and of the same four inputs for each output.
static EightPairs multiply_pairs(EightFours weights, const int8_t* inputs) {
  EightInts same = EightInts{} + read<int32_t>(inputs);
#ifdef __AVX2__
  return (EightPairs)_mm256_maddubs_epi16((__m256i)weights, (__m256i)same);
#else
  EightPairs w = (EightPairs)weights, x = (EightPairs)same;
  return (w & 255) * (x << 8 >> 8) + (w >> 8) * (x >> 8);
#endif
}

// The sums of two neighbours.
static EightInts add_pairs(EightPairs pairs) {
#ifdef __AVX2__
  return (EightInts)_mm256_madd_epi16((__m256i)pairs, (__m256i)(EightPairs{} + 1));
#else
  return ((EightInts)pairs << 16 >> 16) + ((EightInts)pairs >> 16);
#endif
}

static EightFloats group_scales_of(const Group* weight) {
#ifdef __AVX2__
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(weight->group_scales)));
#else
  EightShorts wide = __builtin_convertvector(read<EightBytes>(weight->group_scales), EightShorts);
  return __builtin_convertvector(__builtin_convertvector(wide, EightInts), EightFloats);
#endif
}

// The products of a row of x, in `count` groups, with EIGHT rows of a weight. Each output has two lanes of
// int16, so in a group a lane adds 16 products, of 15 and 127 at most.
static_assert(GROUP / 2 * 15 * 127 <= INT16_MAX);
static EightFloats int4_tile(const Group* weight, const QuantizedInputs* x, int64_t count) {
  EightFloats total = {};
  for (const QuantizedInputs* end = x + count; x < end; x++, weight++) {
    // What follows in memory is fetched ahead, as the processor by itself is late.
    for (int line = 0; line < 192; line += 64) __builtin_prefetch((const char*)(weight + 32) + line, 0, 3);
    EightPairs pairs = {};
    UNROLL
    for (int j = 0; j < 4; j++) {
      EightFours both = read<EightFours>(weight->pairs[j]);
      pairs += multiply_pairs(both & 15, x->values + 8 * j);
      pairs += multiply_pairs(both >> 4, x->values + 8 * j + 4);
    }
    EightInts sums = add_pairs(pairs - (EightPairs)(EightInts{} + read<int32_t>(x->offsets)));
    total += __builtin_convertvector(sums, EightFloats) * (group_scales_of(weight) * x->unit);
  }
  return total;
}

struct Range { int64_t begin, end; };

// W numbers, float32 or bfloat16, from number `at` on.
static Floats load_numbers(const void* from, bool is_bfloat16, int64_t at) {
  if (!is_bfloat16) return load((const float*)from + at);
  return (Floats)(__builtin_convertvector(read<Halves>((const uint16_t*)from + at), Ints) << 16);
}

// A row of inputs (I,), float32 or bfloat16, for products with int4 -> to (I / GROUP,). A group's largest
// becomes 127.
static void round_groups(const void* row, bool is_bfloat16, int64_t I, QuantizedInputs* to) {
  for (int64_t begin = 0; begin < I; begin += GROUP, to++) {
    Floats values[GROUP / W];
    Floats largest = {};  // absolute values
    Floats nothing = {};  // zeros, but NaN where an input is not finite
    for (int k = 0; k < GROUP / W; k++) {
      Floats value = values[k] = load_numbers(row, is_bfloat16, begin + k * W);
      Floats size = value < 0.0f ? -value : value;
      largest = largest < size ? size : largest;
      nothing += value * 0.0f;
    }
    float most = 1e-30f;
    for (int lane = 0; lane < W; lane++) most = std::max(most, largest[lane]);
    Ints pairs = {};  // sums
    for (int k = 0; k < GROUP / W; k++) {
      Floats value = values[k] * (127 / most);
      Ints whole = __builtin_convertvector(value + (value < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
      Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Shorts), Bytes);
      memcpy(to->values + k * W, &bytes, sizeof bytes);
      pairs += whole;
    }
    to->unit = most / 127 + sum(nothing);
    to->offsets[0] = to->offsets[1] = 0;
    for (int lane = 0; lane < W; lane++) to->offsets[lane / 2 % 2] += 8 * pairs[lane];
  }
}

// What all threads read and write. Input: the type in which inputs of products are stored.
template <class Input>
struct Shared {
  float* x;  // (N, D), what the blocks add to
  float* queries;  // (N, D)
  Input* context;  // (N, D), of all heads
  Input* inner;  // (N, 4 D), of the feed-forward network
  std::atomic<int64_t> arrived = 0;  // at a barrier, counted over all barriers
};

// What one thread does. Type: that of the blocks' weights, float, int8_t, Group, or uint16_t for bfloat16.
template <class Type>
struct Worker {
  typedef typename Stored<Type>::Input Input;
  typedef typename Stored<Type>::Factor Factor;
  typedef std::conditional_t<std::is_same_v<Type, Group>, int8_t, Type> Head;
  const Model& model;
  const Call& s;
  const Token* tokens;
  Shared<Input>& shared;
  int64_t thread, num_threads;
  Input* h;  // (N, D), normalised
  void* factors_at;  // memory for MOST_ROWS rows of 4 D factors, where factors are not the inputs themselves
  float* scores;  // memory for those of one query
  int64_t expected = 0;  // of `arrived`, at the next barrier

  // Reads the tokens, and writes the logits of those scored.
  void forward(float* logits) {
    embed();
    barrier();
    for (int64_t layer = 0; layer < s.layers; layer++) {
      attention(model.blocks[layer], layer);
      feed_forward(model.blocks[layer]);
    }
    score(logits);
  }

  // Waits for the other threads. OpenMP's barrier would sleep where several threads of a process use it, as
  // in a server.
  void barrier() {
    shared.arrived++;
    expected += num_threads;
    for (int64_t spins = 1; shared.arrived < expected; spins++)
      if (spins % 1024 == 0) std::this_thread::yield();
  }

  // tokens (N,) -> x (N, D)
  void embed() const {
    const int64_t D = s.D;
    for (int64_t n = thread; n < s.N; n += num_threads) {
      for (int64_t i = 0; i < D; i += W) {
        auto numbers = [&](const Layer& table, int64_t row) {
          return load_numbers(table.weight, s.bfloat16_embeddings, row * D + i);
        };
        Floats token = numbers(model.tokens, tokens[n].id);
        Floats position = numbers(model.positions, tokens[n].position);
        store(shared.x + n * D + i, token + position);
      }
    }
  }

  // Adds the attention of a block to x (N, D); its keys and values go into the caches.
  void attention(const Block& block, int64_t layer) {
    const int64_t N = s.N;
    const int64_t D = s.D;
    const int64_t K = s.D / s.H;
    // The keys (part 0) or values (part 1) of a token's text, (columns, K).
    auto cached = [&](int64_t part, int64_t n, int64_t head) {
      const Token& token = tokens[n];
      return token.cache + layer * token.per_layer + part * token.per_part + head * token.per_head;
    };
    normalise(block.attention_norm, shared.x, N, h);  // all of it in each thread, which saves a barrier
    product<Type>(block.query, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
      store(shared.queries + n * D + o, values);
    });
    product<Type>(block.key, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
      store(cached(0, n, o / K) + tokens[n].position * K + o % K, values);
    });
    product<Type>(block.value, h, N, D, D, [&](int64_t n, int64_t o, Floats values) {
      store(cached(1, n, o / K) + tokens[n].position * K + o % K, values);
    });
    barrier();
    // Head by head, so that its keys stay in the processor's cache.
    for (int64_t i = thread; i < N * s.H; i += num_threads) {
      const int64_t n = i % N;
      const int64_t head = i / N;
      const int64_t at = n * D + head * K;
      const int64_t count = tokens[n].position + 1;
      attend(shared.queries + at, cached(0, n, head), cached(1, n, head), count, shared.context + at);
    }
    barrier();
    add_product(block.out, shared.context, D);
    barrier();
  }

  // Adds the feed-forward network of a block to x (N, D).
  void feed_forward(const Block& block) {
    const int64_t N = s.N;
    const int64_t D = s.D;
    normalise(block.feed_forward_norm, shared.x, N, h);
    product<Type>(block.up, h, N, D, 4 * D, [&](int64_t n, int64_t o, Floats values) {
      store(shared.inner + n * 4 * D + o, activate(values));
    });
    barrier();
    add_product(block.down, shared.inner, 4 * D);
    barrier();
  }

  // Writes the logits (scored, V) of the tokens scored, from x (N, D).
  void score(float* logits) const {
    int64_t scored = 0;
    for (int64_t n = 0; n < s.N; n++) {
      if (!tokens[n].scored) continue;
      normalise(model.final_norm, shared.x + n * s.D, 1, h + scored * s.D);
      scored++;
    }
    product<Head>(model.head, h, scored, s.D, s.V, [&](int64_t n, int64_t o, Floats values) {
      memcpy(logits + n * s.V + o, &values, 4 * std::min<int64_t>(W, s.V - o));
    });
  }

  // Adds a product of inputs (N, I) to x (N, D).
  void add_product(const Layer& linear, const Input* inputs, int64_t I) const {
    product<Type>(linear, inputs, s.N, I, s.D, [&](int64_t n, int64_t o, Floats values) {
      float* to = shared.x + n * s.D + o;
      store(to, load(to) + values);
    });
  }

  // The nearest bfloat16, unless the weights are float32: PyTorch's products in bfloat16 and int8 take and
  // give it.
  Floats to_bfloat16(Floats value) const {
    if (s.kind == 0) return value;
    Ints bits = (Ints)value;
    Ints nearest = (bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff;
    return (Floats)(value == value ? nearest : bits);  // NaN stays NaN
  }

  // This thread's part, in whole vectors.
  Range part(int64_t count) const {
    auto edge = [&](int64_t i) { return std::min(count, (count + W - 1) / W * i / num_threads * W); };
    return {edge(thread), edge(thread + 1)};
  }

  // The factors of N rows of inputs, (N, I) both, and the unit of each row.
  const Factor* factors(const Input* x, int64_t N, int64_t I, float* units) const {
    std::fill(units, units + N, 1.0f);
    if constexpr (std::is_same_v<Input, Factor>) {
      return x;
    } else {
      Factor* to = (Factor*)factors_at;
      for (int64_t n = 0; n < N; n++) units[n] = round_row(x + n * I, I, to + n * I);
      return to;
    }
  }

  // A row of inputs (I,) as int16 -> to (I,). Returns the unit of `to`, or NaN if an input is not finite.
  static float round_row(const float* row, int64_t I, Factor* to) {
    Floats largest = {};  // absolute values
    Floats nothing = {};  // zeros, but NaN where an input is not finite
    for (int64_t i = 0; i < I; i += W) {
      Floats value = load(row + i);
      Floats size = value < 0.0f ? -value : value;
      largest = largest < size ? size : largest;
      nothing += value * 0.0f;
    }
    float most = 1e-30f;
    for (int lane = 0; lane < W; lane++) most = std::max(most, largest[lane]);
    for (int64_t i = 0; i < I; i += W) {
      Floats value = load(row + i) * (32767 / most);
      Ints whole = __builtin_convertvector(value + (value < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
      Shorts shorts = __builtin_convertvector(whole, Shorts);
      memcpy(to + i, &shorts, sizeof shorts);
    }
    return most / 32767 + sum(nothing);
  }

  // What turns the sums of W outputs from `o` on into outputs: their scales and biases.
  //
  // In bfloat16 PyTorch's `linear` adds the bias before it rounds. Its product with int8 has no bias and
  // gives bfloat16, to which the bias is added afterwards. int4 does as int8.
  auto finish(const Layer& linear, int64_t o, int64_t O) const {
    Floats bias = {}, scale = {};
    const size_t bytes = 4 * std::min<int64_t>(W, O - o);
    memcpy(&bias, linear.bias + o, bytes);
    if (linear.scale) memcpy(&scale, linear.scale + o, bytes);
    return [=](Floats total, float unit) {
      return linear.scale ? to_bfloat16(total * (scale * unit)) + bias : to_bfloat16(total + bias);
    };
  }

  // Call write(row, output, values) for each row of x (N, I) and each W of this thread's outputs (N, O).
  // Weight: the type of this layer's.
  template <class Weight, class Write>
  void product(const Layer& linear, const Input* x, int64_t N, int64_t I, int64_t O, Write write) const {
    float units[MOST_ROWS];
    for (int64_t n = 0; n < N; n += MOST_ROWS) {
      const int64_t rows = std::min(MOST_ROWS, N - n);
      auto write_some = [&](int64_t row, int64_t o, Floats values) { write(n + row, o, values); };
      if constexpr (std::is_same_v<Weight, Group>) {
        int4_rows(linear, x + n * I, rows, I, O, write_some);
      } else {
        const Factor* some = factors(x + n * I, rows, I, units);
        if (N == 1) return one_row<Weight>(linear, some, units[0], I, O, write);
        some_rows<Weight>(linear, some, units, rows, I, O, write_some);
      }
    }
  }

  // For up to MOST_ROWS rows of x and a weight in int4, which stays in the L1 cache for all of them.
  template <class Write>
  void int4_rows(const Layer& linear, const Input* x, int64_t N, int64_t I, int64_t O, Write write) const {
    const int64_t groups = I / GROUP;
    QuantizedInputs* inputs = (QuantizedInputs*)factors_at;
    for (int64_t n = 0; n < N; n++) round_groups(x + n * I, sizeof(Input) == 2, I, inputs + n * groups);
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += W) {
      const Group* weight = (const Group*)linear.weight + o / EIGHT * groups;
      const auto finished = finish(linear, o, O);
      for (int64_t n = 0; n < N; n++) {
        Line totals;
        for (int k = 0; k < W / EIGHT; k++) {
          EightFloats total = int4_tile(weight + k * groups, inputs + n * groups, groups);
          memcpy(totals.values + k * EIGHT, &total, sizeof total);
        }
        write(n, o, finished(load(totals.values), 1));
      }
    }
  }

  // For one row of x: write(0, output, values) for each W of this thread's outputs.
  //
  // At a time it computes a span of up to APART * W outputs, by thin tiles of up to W outputs each. There are
  // `apart` tiles, and the outputs of a tile are `apart` apart. For a span of 4 W outputs from o on, `apart`
  // is 4, and these are the outputs, less o:
  //
  //             lane 0   lane 1   lane 2   lane 3 ...
  //   tile 0       0        4        8       12
  //   tile 1       1        5        9       13
  //   tile 2       2        6       10       14
  //   tile 3       3        7       11       15
  //
  // So totals[lane * apart + tile] is output o + lane * apart + tile. In a lane, each tile's row of the
  // weight begins where that of the tile before ended. So there are W long streams, which the processor
  // fetches by itself; for short rows it is late.
  template <class Weight, class Write>
  void one_row(const Layer& linear, const Factor* x, float unit, int64_t I, int64_t O, Write write) const {
    constexpr int FACTORS = 4 * W / sizeof(Factor);
    constexpr int64_t APART = apart_of<Weight>();
    constexpr int BYTES = APART == 1 ? W * FACTORS * sizeof(Weight) : 0;
    alignas(4 * W) float totals[APART * W];
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += APART * W) {
      const int64_t span = std::min(APART * W, own.end - o);
      const int64_t apart = (span + W - 1) / W;
      for (int64_t tile = 0; tile < apart; tile++) {
        const Weight* weight = (const Weight*)linear.weight + (o + tile) * I;
        Floats total = {};
        for (int64_t c = 0; c < I; c += CHUNK) {
          const int64_t count = std::min(CHUNK, I - c);
          const Ahead ahead{(const char*)(weight + W * I + W * c), BYTES};
          const int64_t outputs = (span - tile + apart - 1) / apart;  // of this tile
          Floats values = thin_tile(weight + c, apart * I, outputs, x + c, count, ahead);
          total = c ? total + values : values;
        }
        for (int lane = 0; lane < W; lane++) totals[lane * apart + tile] = total[lane];
      }
      for (int64_t vector = 0; vector < apart; vector++) {
        const auto finished = finish(linear, o + vector * W, O);
        write(0, o + vector * W, finished(load(totals + vector * W), unit));
      }
    }
  }

  // Rows of the weight that stay in the L1 cache beside those of x.
  static constexpr int NEAR = std::max(4, OUTS);
  // Where these rows are widened; with a power of two all of them would go to the same lines of the cache.
  static constexpr int64_t WIDTH = CHUNK + 4 * W / sizeof(Factor);

  // The same for up to MOST_ROWS rows of x, which share what is loaded of the weight.
  template <class Weight, class Write>
  void some_rows(const Layer& linear, const Factor* x, const float* units, int64_t N, int64_t I, int64_t O,
                 Write write) const {
    Line totals[MOST_ROWS];
    const Range own = part(O);
    for (int64_t o = own.begin; o < own.end; o += W) {
      const Weight* weight = (const Weight*)linear.weight + o * I;
      for (int64_t c = 0; c < I; c += CHUNK) {
        for (int64_t k = 0; k < W && k < own.end - o; k += NEAR) {
          const int64_t outputs = std::min<int64_t>(NEAR, own.end - o - k);
          const char* ahead = (const char*)(weight + (W + k) * I + c * NEAR);
          add_chunk(weight + k * I, outputs, x, N, I, c, ahead, totals, k);
        }
      }
      const auto finished = finish(linear, o, O);
      for (int64_t n = 0; n < N; n++) write(n, o, finished(load(totals[n].values), units[n]));
    }
  }

  // Products of N rows of x with up to NEAR rows of the weight, over inputs c to c + CHUNK, for lanes from
  // `lane` on of the totals. The first chunk sets them, the others add to them.
  template <class Weight>
  void add_chunk(const Weight* weight, int64_t outputs, const Factor* x, int64_t N, int64_t I, int64_t c,
                 const char* next, Line* totals, int64_t lane) const {
    constexpr int FACTORS = 4 * W / sizeof(Factor);
    const int64_t count = std::min(CHUNK, I - c);
    const int64_t panels = (N + ROWS - 1) / ROWS;  // of ROWS rows of x
    alignas(64) Factor wide[NEAR * WIDTH];
    const bool widened = sizeof(Weight) != sizeof(Factor) && panels > 1;  // once for all panels
    if (widened) widen(weight + c, outputs, I, count, wide);
    // All tiles fetch a part of the weights that follow.
    Ahead ahead{next, int(OUTS * FACTORS * sizeof(Weight) / panels)};
    for (int64_t p = 0; p < panels; p++) {
      const Factor* rows = x + p * ROWS * I + c;
      const int64_t left = N - p * ROWS;
      for (int64_t u = 0; u < outputs; u += OUTS) {
        Floats values = widened ? tile(wide + u * WIDTH, WIDTH, outputs - u, rows, left, I, count, ahead)
                                : tile(weight + u * I + c, I, outputs - u, rows, left, I, count, ahead);
        for (int row = 0; row < ROWS; row++) {
          for (int k = 0; k < OUTS; k++) {
            float& total = totals[p * ROWS + row].values[lane + u + k];
            float value = values[row * OUTS + k];
            total = c ? total + value : value;
          }
        }
        ahead.from += ahead.bytes * (count / FACTORS);
      }
    }
  }

  // Rows of the weight, I apart, as factors, WIDTH apart.
  template <class Weight>
  static void widen(const Weight* weight, int64_t outputs, int64_t I, int64_t count, Factor* wide) {
    for (int64_t u = 0; u < outputs; u++) {
      for (int64_t i = 0; i < count; i += 4 * W / sizeof(Factor)) {
        auto vector = load(weight + u * I + i);
        memcpy(wide + u * WIDTH + i, &vector, sizeof vector);
      }
    }
  }

  // Layer normalisation: x (N, D) -> out (N, D).
  void normalise(const Layer& norm, const float* x, int64_t N, Input* out) const {
    const float* weight = (const float*)norm.weight;
    for (const float* end = x + N * s.D; x < end; x += s.D, out += s.D) {
      Floats total = {};
      for (int64_t i = 0; i < s.D; i += W) total += load(x + i);
      float mean = sum(total) / s.D;
      Floats squares = {};
      for (int64_t i = 0; i < s.D; i += W) squares += (load(x + i) - mean) * (load(x + i) - mean);
      float factor = 1 / std::sqrt(sum(squares) / s.D + 1e-5f);
      for (int64_t i = 0; i < s.D; i += W) {
        store(out + i, to_bfloat16((load(x + i) - mean) * factor * load(weight + i) + load(norm.bias + i)));
      }
    }
  }

  // The attention of a query (K,) to keys and values (count, K) -> out (K,).
  void attend(const float* query, const float* keys, const float* values, int64_t count, Input* out) const {
    const int64_t K = s.D / s.H;
    score_keys(query, keys, count);
    float divisor = exponentiate_scores(count);
    constexpr int SOME = W / 4;  // with four sums each there are registers for so many vectors
    int64_t i = 0;
    for (; i + SOME * W <= K; i += SOME * W) weigh<SOME>(values + i, count, scores, divisor, out + i);
    for (; i < K; i += W) weigh<1>(values + i, count, scores, divisor, out + i);
  }

  // Writes the scaled scores of the keys (count, K) to `scores`, which has place for count and W - 1 more.
  void score_keys(const float* query, const float* keys, int64_t count) const {
    const int64_t K = s.D / s.H;
    const float scale = 1 / std::sqrt((float)K);
    for (int64_t j = 0; j < count; j += W) {
      Floats totals[W] = {};
      for (int u = 0; u < W; u++) {
        const float* key = keys + std::min(j + u, count - 1) * K;
        for (int64_t i = 0; i < K; i += W) totals[u] += load(query + i) * load(key + i);
      }
      store(scores + j, sums(totals) * scale);
    }
  }

  // Replaces `scores` by e to their power, of which the largest is 1. Returns their sum: softmax divides by
  // it.
  float exponentiate_scores(int64_t count) const {
    float largest = -INFINITY;
    for (int64_t j = 0; j < count; j++) largest = std::max(largest, scores[j]);
    Floats total = {};
    for (int64_t j = 0; j < count; j += W) {
      std::fill(scores + std::min(count, j + W), scores + j + W, -INFINITY);
      Floats weights = exponential(load(scores + j) - largest);
      store(scores + j, weights);
      total += weights;
    }
    return sum(total);
  }

  // VECTORS vectors of the weighted mean of the values.
  template <int VECTORS>
  void weigh(const float* values, int64_t count, const float* weights, float divisor, Input* out) const {
    const int64_t K = s.D / s.H;
    Floats context[VECTORS][4] = {};  // several sums, because one would wait for itself
    for (int64_t j = 0; j < count; j += 4) {
      UNROLL
      for (int u = 0; u < 4; u++) {
        if (j + u < count) {
          UNROLL
          for (int v = 0; v < VECTORS; v++) {
            context[v][u] += weights[j + u] * load(values + (j + u) * K + v * W);
          }
        }
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      Floats total = context[v][0] + context[v][1] + (context[v][2] + context[v][3]);
      store(out + v * W, to_bfloat16(total / divisor));
    }
  }

  Floats activate(Floats x) const { return to_bfloat16(s.exact_gelu ? exact_gelu(x) : gpt2_gelu(x)); }

  static Floats exact_gelu(Floats x) {
    Floats result;
    for (int k = 0; k < W; k++) result[k] = x[k] * 0.5f * (1 + std::erf(x[k] * 0.70710678f));
    return result;
  }

  // GPT-2's approximation of GELU with tanh (Hendrycks and Gimpel 2016). As tanh(z) is 2 / (1 + e^-2z) - 1,
  // it is x / (1 + e^-2z).
  static Floats gpt2_gelu(Floats x) {
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * (z < -40.0f ? Floats{} - 40.0f : z)));
  }
};

// Starts the threads. Raises std::bad_alloc before them, because there is no way out of a parallel region.
template <class Type>
static void run(const Model& model, const Call& s, const Token* tokens, float* logits) {
  typedef typename Worker<Type>::Input Input;
  typedef typename Worker<Type>::Factor Factor;
  const int64_t N = s.N;
  const int64_t D = s.D;
  int64_t longest = 1;
  for (int64_t n = 0; n < N; n++) longest = std::max(longest, tokens[n].position + 1);

  std::vector<Line> memory(N * D / W * 7);  // x, queries, context, and `inner`, which is as large as four
  Shared<Input> shared;
  shared.x = memory[0].values;
  shared.queries = shared.x + N * D;
  shared.context = (Input*)(shared.queries + N * D);
  shared.inner = shared.context + N * D;

  // Lines of each thread: `h`, `factors_at` and `scores`.
  const int64_t normalised = N * D / W;
  const bool needs_factors = !std::is_same_v<Input, Factor> || std::is_same_v<Type, Group>;
  const int64_t factors = needs_factors ? std::min(N, MOST_ROWS) * 4 * D / W : 0;
  const int64_t each = normalised + factors + longest / W + 1;
  std::vector<Line> scratch(each * s.threads);

#pragma omp parallel num_threads((int)s.threads)
  {
    const int64_t thread = omp_get_thread_num();
    Line* own = scratch.data() + thread * each;
    Worker<Type> worker{model, s, tokens, shared, thread, omp_get_num_threads(), (Input*)own[0].values,
                        own[normalised].values, own[normalised + factors].values};
    worker.forward(logits);
  }
}

// Writes the keys and values of the tokens to their caches, and the logits of those `scored`, in their order.
// Returns 1 where there is no memory.
extern "C" int forward(const Model* model, const Call* call, const Token* tokens, float* logits) {
  constexpr decltype(&run<float>) KINDS[] = {run<float>, run<uint16_t>, run<int8_t>, run<Group>};
  try {
    KINDS[call->kind](*model, *call, tokens, logits);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

constexpr int HASHES = 8;  // hashes of a piece; `notes.py` has this number too

struct Piece {
  const char* bytes;
  int64_t size;
};

// Changes the hashes of a piece by the next words of 8 bytes, one for each. The change is a bijection of
// the hash for a fixed word, and of the word for a fixed hash. So one changed word always changes the
// result. Two changed words cancel with a probability of about 2^-64.
static void hash_words(const char* bytes, int64_t size, uint64_t* own) {
  uint64_t words[HASHES] = {};
  memcpy(words, bytes, size);
  for (int k = 0; k < HASHES; k++) {
    const uint64_t mixed = (own[k] ^ words[k]) * 0x9e3779b97f4a7c15;  // odd: 2^64 / the golden ratio
    own[k] = mixed << 31 | mixed >> 33;  // because a product carries no bit downwards
  }
}

// Writes HASHES hashes of each piece. They do not depend on the number of threads.
extern "C" void hash(const Piece* pieces, int64_t count, uint64_t* hashes, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic)
  for (int64_t p = 0; p < count; p++) {
    constexpr int64_t LINE = sizeof(uint64_t) * HASHES;
    uint64_t own[HASHES];
    for (int k = 0; k < HASHES; k++) own[k] = k + 1;
    int64_t i = 0;
    for (; i + LINE <= pieces[p].size; i += LINE) hash_words(pieces[p].bytes + i, LINE, own);
    if (i < pieces[p].size) hash_words(pieces[p].bytes + i, pieces[p].size - i, own);
    memcpy(hashes + p * HASHES, own, LINE);
  }
}
