// Many rows: a tile of the effective weight W + sum over levels of alpha s is made in float32, where
// no alpha is lost, for each variant in turn, and multiplied with all of its rows.
//
// A row's sums run over chunks of inputs in turn, each in 16 lanes and then across them.

#pragma once

#include <vector>

#include "cpu_problem.h"
#include "cpu_rows.h"

#if defined(__x86_64__)
#include "cpu_avx512.h"
#endif

namespace zen {

// Rows of one variant, or of the base (slot -1).
struct Party {
  int32_t slot;
  std::vector<int64_t> rows;
};

inline std::vector<Party> parties(const Problem& p) {
  std::vector<std::vector<int64_t>> of(p.variants + 1);
  for (int64_t r = 0; r < p.rows; r++) of[p.slot(r) + 1].push_back(r);
  std::vector<Party> found;
  for (size_t s = 0; s < of.size(); s++)
    if (!of[s].empty()) found.push_back({static_cast<int32_t>(s) - 1, std::move(of[s])});
  return found;
}

inline float effective(const Problem& p, int32_t slot, int64_t o, int64_t i) {
  float w = weight(p, o, i);
  for (int64_t level = 0; slot >= 0 && level < p.levels; level++) {
    const int64_t at = p.at(slot, level, o);
    const bool plus = p.bits[at * p.bytes + i / 8] >> (i % 8) & 1;
    w += plus ? p.scale[at] : -p.scale[at];
  }
  return w;
}

ZEN_INLINE void plain_many_body(const Problem& p, const std::vector<Party>& all, int64_t begin, int64_t end) {
  std::vector<float> w(kChunk);
  for (const Party& party : all)
    for (int64_t o = begin; o < end; o++)
      for (int64_t from = 0; from < p.inputs; from += kChunk) {
        const int64_t size = std::min(kChunk, p.inputs - from);
        for (int64_t i = 0; i < size; i++) w[i] = effective(p, party.slot, o, from + i);
        for (const int64_t r : party.rows) {
          const float* x = p.x + r * p.inputs + from;
          float lanes[kLanes] = {};
          for (int64_t i = 0; i < size; i++)
            lanes[i % kLanes] = __builtin_fmaf(w[i], x[i], lanes[i % kLanes]);
          float* y = p.y + r * p.outputs + o;
          *y = (from ? *y : 0.0f) + across(lanes);
        }
      }
}

inline void plain_many(const Problem& p, const std::vector<Party>& all, int64_t begin, int64_t end) {
  plain_many_body(p, all, begin, end);
}

#if defined(ZEN_AVX2)
ZEN_AVX2 inline void avx2_many(const Problem& p, const std::vector<Party>& all, int64_t begin,
                               int64_t end) {
  plain_many_body(p, all, begin, end);
}
#endif

#if defined(ZEN_AVX512)

constexpr int64_t kMostLevels = 8;  // checked where a product is asked for

// 16 inputs of the base's weight from `i` on, k says which exist.
template <bool kBf16>
ZEN_AVX512 inline __m512 base16(const Problem& p, int64_t at, __mmask16 k) {
  if (!kBf16) return _mm512_maskz_loadu_ps(k, static_cast<const float*>(p.w) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(k, static_cast<const uint16_t*>(p.w) + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// `size` inputs of `outs` outputs, four outputs to a stream: [outs / 4][registers][4][16], zeros up
// to whole registers and to whole fours.
template <bool kBf16>
ZEN_AVX512 void effective_tile(const Problem& p, int32_t slot, int64_t o, int64_t outs, int64_t from,
                               int64_t size, float* w) {
  const int64_t levels = slot < 0 ? 0 : p.levels, registers = (size + kLanes - 1) / kLanes;
  for (int64_t a = 0; a < (outs + 3) / 4 * 4; a++) {
    float* to = w + a / 4 * 4 * registers * kLanes + a % 4 * kLanes;
    const int64_t output = o + std::min(a, outs - 1);
    const uint8_t* bits[kMostLevels];
    float alpha[kMostLevels];
    for (int64_t l = 0; l < levels; l++) {
      const int64_t at = p.at(slot, l, output);
      bits[l] = p.bits + at * p.bytes + from / 8;
      alpha[l] = p.scale[at];
    }
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t left = std::min(kLanes, size - i);
      const __mmask16 k = (1u << left) - 1;
      __m512 v = base16<kBf16>(p, output * p.inputs + from + i, k);
      for (int64_t l = 0; l < levels; l++) {
        uint16_t plus = bits[l][i / 8];
        if (left > 8) plus |= uint16_t(bits[l][i / 8 + 1] << 8);
        const __m512 up = _mm512_set1_ps(alpha[l]), down = _mm512_set1_ps(-alpha[l]);
        v = _mm512_mask_add_ps(v, k, v, _mm512_mask_blend_ps(plus, down, up));
      }
      _mm512_store_ps(to + i * 4, v);
    }
  }
}

// `count` rows' `size` inputs from `from` on as one stream: [registers][count][16].
ZEN_AVX512 inline void row_tile(const Problem& p, const int64_t* rows, int64_t count, int64_t from,
                                int64_t size, float* x) {
  for (int64_t b = 0; b < count; b++) {
    const float* row = p.x + rows[b] * p.inputs + from;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 k = (1u << std::min(kLanes, size - i)) - 1;
      _mm512_store_ps(x + i * count + b * kLanes, _mm512_maskz_loadu_ps(k, row + i));
    }
  }
}

// The sums of four outputs of some rows, added to y unless they are the first; `outs` of the four
// exist.
template <int ROWS>
ZEN_AVX512 inline void add_sums(const Problem& p, const __m512 (&c)[4][ROWS], const int64_t* rows,
                                int64_t o, int64_t outs, bool first) {
  const __mmask8 k = (1u << outs) - 1;
  for (int b = 0; b < ROWS; b++) {
    float* y = p.y + rows[b] * p.outputs + o;
    __m128 sum = across(c[0][b], c[1][b], c[2][b], c[3][b]);
    if (!first) sum = _mm_add_ps(_mm_maskz_loadu_ps(k, y), sum);
    _mm_mask_storeu_ps(y, k, sum);
  }
}

// Four outputs of ROWS rows over one chunk, added to y unless it is the first; `outs` of the four
// exist.
template <int ROWS>
ZEN_AVX512 void many_tile(const Problem& p, const float* w, const float* x, const int64_t* rows,
                          int64_t o, int64_t outs, int64_t registers, bool first) {
  __m512 c[4][ROWS];
  for (int b = 0; b < ROWS; b++)
    for (int a = 0; a < 4; a++) c[a][b] = _mm512_setzero_ps();
  for (int64_t i = 0; i < registers; i++, w += 4 * kLanes, x += ROWS * kLanes) {
    __m512 v[4];
#pragma GCC unroll 8
    for (int a = 0; a < 4; a++) v[a] = _mm512_load_ps(w + a * kLanes);
#pragma GCC unroll 8
    for (int b = 0; b < ROWS; b++) {
      __m512 row = _mm512_load_ps(x + b * kLanes);
      ZEN_KEEP(row);
#pragma GCC unroll 8
      for (int a = 0; a < 4; a++) c[a][b] = _mm512_fmadd_ps(v[a], row, c[a][b]);
    }
  }
  add_sums(p, c, rows, o, outs, first);
}

inline void many_rows(const Problem& p, const float* w, const float* x, const int64_t* rows,
                      int64_t count, int64_t o, int64_t outs, int64_t registers, bool first) {
  switch (count) {
    case 6: return many_tile<6>(p, w, x, rows, o, outs, registers, first);
    case 5: return many_tile<5>(p, w, x, rows, o, outs, registers, first);
    case 4: return many_tile<4>(p, w, x, rows, o, outs, registers, first);
    case 3: return many_tile<3>(p, w, x, rows, o, outs, registers, first);
    case 2: return many_tile<2>(p, w, x, rows, o, outs, registers, first);
    default: return many_tile<1>(p, w, x, rows, o, outs, registers, first);
  }
}

template <bool kBf16>
void avx512_many(const Problem& p, const std::vector<Party>& all, int64_t begin, int64_t end) {
  thread_local Scratch weights, inputs;
  float* w = weights.get<float>(kBlock * kChunk);
  float* x = inputs.get<float>(kTileRows * kChunk);
  for (const Party& party : all)
    for (int64_t from = 0; from < p.inputs; from += kChunk) {
      const int64_t size = std::min(kChunk, p.inputs - from), outs = end - begin;
      const int64_t registers = (size + kLanes - 1) / kLanes;
      effective_tile<kBf16>(p, party.slot, begin, outs, from, size, w);
      const int64_t n = party.rows.size(), tiles = (n + kTileRows - 1) / kTileRows;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = t * n / tiles, count = (t + 1) * n / tiles - first;
        const int64_t* rows = party.rows.data() + first;
        row_tile(p, rows, count, from, size, x);
        for (int64_t a = 0; a < outs; a += 4)
          many_rows(p, w + a * registers * kLanes, x, rows, count, begin + a,
                    std::min<int64_t>(4, outs - a), registers, from == 0);
      }
    }
}
#endif

}  // namespace zen
