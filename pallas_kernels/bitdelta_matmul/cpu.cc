// The fused product on the CPU, through XLA's FFI: y = x W^T + sum over levels of alpha (x S^T).
//
// Rows of x are float32; W is bfloat16 or float32; signs are packed as pallas_kernels/packing.py
// defines them, so that a mask register takes 16 of them as they lie. With p the sum of x where a
// bit is 1, x . s = 2 p - sum(x). Every sum of a row runs in one order, 16 lanes over the input and
// then across the lanes, whatever the other rows are and however rows and outputs are tiled: a row
// has the same bits in any batch.
//
// AVX-512 by hand, chosen at run time; elsewhere the same sums in plain loops, bit for bit.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ZEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kBlock = 64;           // outputs that one task takes
constexpr int64_t kParallelWork = 1 << 17;  // multiplications below which one thread is faster

struct Problem {
  const float* x;        // [rows, padded], zeros after I
  const float* x_sum;    // [rows]
  const void* w;         // [outputs, inputs]
  bool w_bf16;
  const uint8_t* bits;   // [variants, levels, outputs, bytes] or null
  const float* scale;    // [variants, levels, outputs]
  const int32_t* slots;  // [rows / per_slot]
  float* y;              // [rows, outputs]
  int64_t rows, per_slot, inputs, padded, outputs, bytes, variants, levels;
};

// ---- plain: the same order of sums, 16 lanes at a time

float across(const float* lanes) {
  float sum[kLanes];
  std::memcpy(sum, lanes, sizeof(sum));
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t i = 0; i < width; i++) sum[i] += sum[i + width];
  return sum[0];
}

float weight(const Problem& p, int64_t o, int64_t i) {
  if (!p.w_bf16) return static_cast<const float*>(p.w)[o * p.inputs + i];
  uint32_t wide = uint32_t{static_cast<const uint16_t*>(p.w)[o * p.inputs + i]} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

void plain_block(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; o++)
    for (int64_t r = 0; r < p.rows; r++) {
      const float* x = p.x + r * p.padded;
      float lanes[kLanes] = {};
      for (int64_t i = 0; i < p.inputs; i++)
        lanes[i % kLanes] = __builtin_fmaf(weight(p, o, i), x[i], lanes[i % kLanes]);
      float y = across(lanes);
      const int32_t slot = p.bits ? p.slots[r / p.per_slot] : -1;
      if (slot >= 0 && slot < p.variants)
        for (int64_t l = 0; l < p.levels; l++) {
          const int64_t at = (slot * p.levels + l) * p.outputs + o;
          const uint8_t* bits = p.bits + at * p.bytes;
          float plus[kLanes] = {};
          for (int64_t i = 0; i < p.inputs; i++)
            if (bits[i / 8] >> (i % 8) & 1) plus[i % kLanes] += x[i];
          y += p.scale[at] * (2 * across(plus) - p.x_sum[r]);
        }
      p.y[r * p.outputs + o] = y;
    }
}

#if defined(ZEN_AVX512)

ZEN_AVX512 inline float across(__m512 v) {
  float lanes[kLanes];
  _mm512_storeu_ps(lanes, v);
  return across(lanes);
}

template <bool kBf16>
ZEN_AVX512 inline __m512 load_weight(const void* w, int64_t at, __mmask16 k) {
  if (!kBf16) return _mm512_maskz_loadu_ps(k, static_cast<const float*>(w) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(k, static_cast<const uint16_t*>(w) + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The first level's signs of one row with OUT outputs, or none for a row of the base.
struct Signs {
  const uint8_t* bits = nullptr;  // of the tile's first output
  const float* scale = nullptr;
};

inline Signs signs_of(const Problem& p, int64_t r, int64_t o, int64_t level) {
  const int32_t slot = p.bits ? p.slots[r / p.per_slot] : -1;
  if (slot < 0 || slot >= p.variants || level >= p.levels) return {};
  const int64_t at = (slot * p.levels + level) * p.outputs + o;
  return {p.bits + at * p.bytes, p.scale + at};
}

inline uint16_t mask_at(const uint8_t* bits, int64_t i) {
  uint16_t k;
  std::memcpy(&k, bits + i / 8, 2);
  return k;
}

// The last bits of a row of signs, which may end after one byte.
inline uint16_t last_mask(const Problem& p, const uint8_t* bits, int64_t i) {
  uint16_t k = bits[i / 8];
  if (p.bytes - i / 8 > 1) k |= uint16_t(bits[i / 8 + 1] << 8);
  return k;
}

// OUT outputs x ROWS rows in registers, the first level's signs in the same loop, so that their
// additions are done while weights are on their way; the last chunk is masked.
template <bool kBf16, bool kSigns, int OUT, int ROWS>
ZEN_AVX512 void tile(const Problem& p, int64_t o, int64_t r) {
  __m512 c[OUT][ROWS], plus[kSigns ? OUT : 1][kSigns ? ROWS : 1];
  Signs signs[ROWS];
  for (int b = 0; b < ROWS; b++) {
    if (kSigns) signs[b] = signs_of(p, r + b, o, 0);
    for (int a = 0; a < OUT; a++) {
      c[a][b] = _mm512_setzero_ps();
      if (kSigns) plus[a][b] = _mm512_setzero_ps();
    }
  }
  // A row of the base reads some signs too, and does not use them.
  const uint8_t* bits[ROWS];
  for (int b = 0; b < ROWS; b++)
    bits[b] = signs[b].bits ? signs[b].bits : p.bits + (kSigns ? o * p.bytes : 0);
  const float* x = p.x + r * p.padded;
  const int64_t whole = p.inputs / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    __m512 w[OUT];
#pragma GCC unroll 8
    for (int a = 0; a < OUT; a++) w[a] = load_weight<kBf16>(p.w, (o + a) * p.inputs + i, 0xFFFF);
#pragma GCC unroll 8
    for (int b = 0; b < ROWS; b++) {
      const __m512 v = _mm512_loadu_ps(x + b * p.padded + i);
#pragma GCC unroll 8
      for (int a = 0; a < OUT; a++) {
        c[a][b] = _mm512_fmadd_ps(w[a], v, c[a][b]);
        if (kSigns) {
          const __mmask16 k = mask_at(bits[b] + a * p.bytes, i);
          plus[a][b] = _mm512_mask_add_ps(plus[a][b], k, plus[a][b], v);
        }
      }
    }
  }
  if (whole < p.inputs) {
    const __mmask16 k = (1u << (p.inputs - whole)) - 1;
    for (int a = 0; a < OUT; a++) {
      const __m512 w = load_weight<kBf16>(p.w, (o + a) * p.inputs + whole, k);
      for (int b = 0; b < ROWS; b++) {
        const __m512 v = _mm512_loadu_ps(x + b * p.padded + whole);
        c[a][b] = _mm512_fmadd_ps(w, v, c[a][b]);
        if (kSigns) {
          const __mmask16 m = last_mask(p, bits[b] + a * p.bytes, whole);
          plus[a][b] = _mm512_mask_add_ps(plus[a][b], m, plus[a][b], v);
        }
      }
    }
  }
  for (int b = 0; b < ROWS; b++)
    for (int a = 0; a < OUT; a++) {
      float y = across(c[a][b]);
      if (kSigns && signs[b].bits)
        y += signs[b].scale[a] * (2 * across(plus[a][b]) - p.x_sum[r + b]);
      p.y[(r + b) * p.outputs + o + a] = y;
    }
}

// Three rows with signs, or four without, are what 32 registers hold.
template <bool kBf16, bool kSigns, int OUT>
ZEN_AVX512 void tile_rows(const Problem& p, int64_t o) {
  constexpr int kRows = kSigns ? 3 : 4;
  int64_t r = 0;
  for (; r + kRows <= p.rows; r += kRows) tile<kBf16, kSigns, OUT, kRows>(p, o, r);
  switch (p.rows - r) {
    case 3: tile<kBf16, kSigns, OUT, 3>(p, o, r); break;
    case 2: tile<kBf16, kSigns, OUT, 2>(p, o, r); break;
    case 1: tile<kBf16, kSigns, OUT, 1>(p, o, r); break;
  }
}

// One row's signs of a further level with OUT outputs: each x is loaded once for all of them.
template <int OUT>
ZEN_AVX512 void sign_tile(const Problem& p, int64_t o, int64_t r, const Signs& signs) {
  const float* x = p.x + r * p.padded;
  __m512 plus[OUT];
  for (int a = 0; a < OUT; a++) plus[a] = _mm512_setzero_ps();
  const int64_t whole = p.inputs / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + i);
#pragma GCC unroll 8
    for (int a = 0; a < OUT; a++)
      plus[a] = _mm512_mask_add_ps(plus[a], mask_at(signs.bits + a * p.bytes, i), plus[a], v);
  }
  if (whole < p.inputs) {
    const __m512 v = _mm512_loadu_ps(x + whole);  // zeros after the end
    for (int a = 0; a < OUT; a++) {
      const __mmask16 k = last_mask(p, signs.bits + a * p.bytes, whole);
      plus[a] = _mm512_mask_add_ps(plus[a], k, plus[a], v);
    }
  }
  for (int a = 0; a < OUT; a++)
    p.y[r * p.outputs + o + a] += signs.scale[a] * (2 * across(plus[a]) - p.x_sum[r]);
}

template <bool kBf16, bool kSigns>
ZEN_AVX512 void avx512_block(const Problem& p, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + 4 <= end; o += 4) tile_rows<kBf16, kSigns, 4>(p, o);
  for (; o < end; o++) tile_rows<kBf16, kSigns, 1>(p, o);
  for (int64_t level = 1; level < p.levels; level++)
    for (int64_t r = 0; r < p.rows; r++) {
      if (!signs_of(p, r, begin, level).bits) continue;
      for (o = begin; o + 8 <= end; o += 8) sign_tile<8>(p, o, r, signs_of(p, r, o, level));
      for (; o < end; o++) sign_tile<1>(p, o, r, signs_of(p, r, o, level));
    }
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

using Block = void (*)(const Problem&, int64_t, int64_t);

Block choose(bool bf16, bool signs, bool portable) {
#if defined(ZEN_AVX512)
  static const bool avx512 = has_avx512();
  if (avx512 && !portable) {
    if (bf16) return signs ? avx512_block<true, true> : avx512_block<true, false>;
    return signs ? avx512_block<false, true> : avx512_block<false, false>;
  }
#endif
  return plain_block;
}

// Blocks of outputs are taken by whoever is free, this thread too; it waits only for blocks that
// another thread has begun, so a pool without a free thread holds nothing up.
struct Work {
  std::atomic<int64_t> next{0}, done{0};
};

void run(const Problem& p, ffi::ThreadPool& pool, bool portable) {
  const Block block = choose(p.w_bf16, p.levels > 0, portable);
  const int64_t blocks = (p.outputs + kBlock - 1) / kBlock;
  auto take = [&p, block, blocks](Work& work) {
    for (int64_t b; (b = work.next.fetch_add(1)) < blocks;) {
      block(p, b * kBlock, std::min(p.outputs, (b + 1) * kBlock));
      work.done.fetch_add(1, std::memory_order_release);
    }
  };
  auto work = std::make_shared<Work>();
  const int64_t helpers = std::min(pool.num_threads(), blocks) - 1;
  if (p.rows * p.inputs * p.outputs > kParallelWork)
    for (int64_t i = 0; i < helpers; i++)
      pool.Schedule([work, take, blocks] {
        if (work->next.load() < blocks) take(*work);
      });
  take(*work);
  while (work->done.load(std::memory_order_acquire) < blocks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// x [B, T, I] -> rows padded to whole lanes, and their sums.
void prepare(Problem& p, const float* x, std::vector<float>& rows, std::vector<float>& sums) {
  p.padded = (p.inputs + kLanes - 1) / kLanes * kLanes;
  rows.assign(p.rows * p.padded, 0.0f);
  sums.assign(p.rows, 0.0f);
  for (int64_t r = 0; r < p.rows; r++) {
    float* row = rows.data() + r * p.padded;
    std::memcpy(row, x + r * p.inputs, p.inputs * sizeof(float));
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < p.padded; i += kLanes)
      for (int64_t j = 0; j < kLanes; j++) lanes[j] += row[i + j];
    sums[r] = across(lanes);
  }
  p.x = rows.data();
  p.x_sum = sums.data();
}

ffi::Error base_impl(ffi::ThreadPool pool, bool portable, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                     ffi::ResultBuffer<ffi::F32> y) {
  Problem p{};
  const auto xd = x.dimensions(), wd = w.dimensions();
  p.rows = x.element_count() / xd.back();
  p.per_slot = 1;
  p.inputs = xd.back();
  p.outputs = wd[0];
  p.w = w.untyped_data();
  p.w_bf16 = w.element_type() == ffi::BF16;
  p.y = y->typed_data();
  std::vector<float> rows, sums;
  prepare(p, x.typed_data(), rows, sums);
  run(p, pool, portable);
  return ffi::Error::Success();
}

ffi::Error mixed_impl(ffi::ThreadPool pool, bool portable, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                      ffi::Buffer<ffi::U8> bits, ffi::Buffer<ffi::F32> scale,
                      ffi::Buffer<ffi::S32> slots, ffi::ResultBuffer<ffi::F32> y) {
  Problem p{};
  const auto xd = x.dimensions(), bd = bits.dimensions();
  p.rows = xd[0] * xd[1];
  p.per_slot = xd[1];
  p.inputs = xd[2];
  p.variants = bd[0];
  p.levels = bd[1];
  p.outputs = bd[2];
  p.bytes = bd[3];
  p.w = w.untyped_data();
  p.w_bf16 = w.element_type() == ffi::BF16;
  p.bits = bits.typed_data();
  p.scale = scale.typed_data();
  p.slots = slots.typed_data();
  p.y = y->typed_data();
  std::vector<float> rows, sums;
  prepare(p, x.typed_data(), rows, sums);
  run(p, pool, portable);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenBaseMatmul, base_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("portable")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenBitdeltaMatmul, mixed_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("portable")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
