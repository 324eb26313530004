// Many rows: a tile of the effective weight W + sum over levels of alpha s is made in float32, where
// no alpha is lost, for each variant in turn, and multiplied with all of its rows.
//
// A register holds one input's weights of 16 outputs and meets that input of a row: no sum runs
// across a register. An output's sum runs over the inputs of a chunk in turn, and over the chunks.

#pragma once

#include <numeric>
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

// What one task computes: some outputs of a share of each party's rows.
struct ManyTask {
  int64_t begin, end;  // outputs
  int64_t share, shares;

  // Where this task's share of so many begins, and the next one's.
  int64_t first(int64_t count) const { return share * count / shares; }
  int64_t last(int64_t count) const { return (share + 1) * count / shares; }
};

// The tasks: whole blocks, and so that threads end together those left over share by share.
class ManyTasks {
 public:
  explicit ManyTasks(const Problem& p) : outputs_(p.outputs), blocks_((p.outputs + kBlock - 1) / kBlock) {
    const int64_t left = blocks_ % p.threads;
    shares_ = left && p.rows >= 64 ? p.threads / std::gcd(left, p.threads) : 1;
    whole_ = shares_ > 1 ? blocks_ - left : blocks_;
  }
  int64_t count() const { return whole_ + (blocks_ - whole_) * shares_; }
  ManyTask operator[](int64_t i) const {
    const int64_t part = std::max<int64_t>(i - whole_, 0), shares = i < whole_ ? 1 : shares_;
    const int64_t begin = (std::min(i, whole_) + part / shares) * kBlock;
    return {begin, std::min(begin + kBlock, outputs_), part % shares, shares};
  }

 private:
  int64_t outputs_, blocks_, shares_, whole_;
};

inline float effective(const Problem& p, int32_t slot, int64_t o, int64_t i) {
  float w = weight(p, o, i);
  for (int64_t level = 0; slot >= 0 && level < p.levels; level++) {
    const int64_t at = p.at(slot, level, o);
    const bool plus = p.bits[at * p.bytes + i / 8] >> (i % 8) & 1;
    w += plus ? p.scale[at] : -p.scale[at];
  }
  return w;
}

// `size` inputs of one row and 16 outputs: w [size][16]. Sums of the first `outs` go to y.
ZEN_INLINE void plain_sums(const float* w, const float* x, int64_t size, int64_t outs, bool first, float* y) {
  float sum[kLanes] = {};
  for (int64_t i = 0; i < size; i++, w += kLanes)
    for (int l = 0; l < kLanes; l++) sum[l] = __builtin_fmaf(w[l], x[i], sum[l]);
  for (int64_t l = 0; l < outs; l++) y[l] = first ? sum[l] : y[l] + sum[l];
}

ZEN_INLINE void plain_many_body(const Problem& p, const std::vector<Party>& all, const ManyTask& task) {
  std::vector<float> w(kChunk * kLanes);
  for (const Party& party : all)
    for (int64_t o = task.begin; o < task.end; o += kLanes)
      for (int64_t from = 0; from < p.inputs; from += kChunk) {
        const int64_t size = std::min(kChunk, p.inputs - from), outs = std::min(kLanes, task.end - o);
        for (int64_t l = 0; l < outs; l++)
          for (int64_t i = 0; i < size; i++) w[i * kLanes + l] = effective(p, party.slot, o + l, from + i);
        const int64_t n = party.rows.size();
        for (int64_t k = task.first(n); k < task.last(n); k++) {
          const int64_t r = party.rows[k];
          plain_sums(w.data(), p.x + r * p.inputs + from, size, outs, from == 0, p.y + r * p.outputs + o);
        }
      }
}

inline void plain_many(const Problem& p, const std::vector<Party>& all, const ManyTask& task) {
  plain_many_body(p, all, task);
}

#if defined(ZEN_AVX2)
ZEN_AVX2 inline void avx2_many(const Problem& p, const std::vector<Party>& all, const ManyTask& task) {
  plain_many_body(p, all, task);
}
#endif

#if defined(ZEN_AVX512)

constexpr int64_t kMostLevels = 8;  // checked where a product is asked for

// 16 outputs, whose weights are made 32 inputs at a time, outputs side by side.
template <bool kBf16>
class ManyOutputs {
 public:
  // words: room for [levels][16][16].
  ManyOutputs(const Problem& p, int32_t slot, int64_t begin, int64_t count, uint32_t* words)
      : p_(p), slot_(slot), begin_(begin), count_(count), levels_(slot < 0 ? 0 : p.levels), words_(words) {}

  // Turns the signs of 512 inputs from `i` on.
  ZEN_AVX512 void turn_signs(int64_t i) {
    for (int64_t l = 0; l < levels_; l++) {
      const uint8_t* rows[1][kLanes];
      const int64_t at = p_.at(slot_, l, begin_);
      sign_rows<1>(p_, at, count_, rows);
      turn_some(rows[0], i / 8, std::min(4 * kWords, p_.bytes - i / 8), words_ + l * kWords * kLanes);
      _mm512_storeu_ps(alpha_[l], _mm512_maskz_loadu_ps((1u << count_) - 1, p_.scale + at));
    }
  }

  // Inputs [i, i + 32), of which `word` says where their signs are: an input every `stride` floats.
  ZEN_AVX512 void make(int64_t i, int64_t word, float* to, int64_t stride) const {
    const uint32_t* words = words_ + word * kLanes;
    const int64_t left = p_.inputs - i;
    __m512i r[kLanes], turned[kLanes];
    for (int half = 0; half < (kBf16 ? 1 : 2); half++) {
      for (int64_t a = 0; a < kLanes; a++) {
        const int64_t at = (begin_ + std::min(a, count_ - 1)) * p_.inputs + i;
        if constexpr (kBf16)
          r[a] = _mm512_maskz_loadu_epi16(left < kStep ? (1u << left) - 1 : ~0u, static_cast<const uint16_t*>(p_.w) + at);
        else
          r[a] = _mm512_maskz_loadu_epi32((1u << std::clamp<int64_t>(left - half * kLanes, 0, kLanes)) - 1,
                                          static_cast<const float*>(p_.w) + at + half * kLanes);
      }
      turn(r, turned);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) {
        if constexpr (kBf16) {
          put(words, _mm512_slli_epi32(turned[k], 16), 2 * k, to + 2 * k * stride);
          const __m512i upper = _mm512_and_si512(turned[k], _mm512_set1_epi32(0xFFFF0000));
          put(words, upper, 2 * k + 1, to + (2 * k + 1) * stride);
        } else {
          put(words, turned[k], half * kLanes + k, to + (half * kLanes + k) * stride);
        }
      }
    }
  }

 private:
  // Adds alpha s, whose signs are bit `bit` of the words, level after level.
  ZEN_AVX512 __attribute__((always_inline)) void put(const uint32_t* words, __m512i w, int bit, float* to) const {
    const __m512i top = _mm512_set1_epi32(0x80000000);
    __m512 v = _mm512_castsi512_ps(w);
    for (int64_t l = 0; l < levels_; l++) {
      const __m512i signs = _mm512_slli_epi32(_mm512_load_si512(words + l * kWords * kLanes), 31 - bit);
      const __m512i alpha = _mm512_loadu_si512(alpha_[l]);  // alpha ^ (~signs & top)
      v = _mm512_add_ps(v, _mm512_castsi512_ps(_mm512_ternarylogic_epi32(alpha, signs, top, 0xD2)));
    }
    _mm512_store_ps(to, v);
  }

  const Problem& p_;
  int32_t slot_;
  int64_t begin_, count_, levels_;
  uint32_t* words_;
  float alpha_[kMostLevels][kLanes];
};

// The effective weights of `size` inputs of the outputs [o, o + outs) as tiles want them:
// [size, to whole words][parts][16]; what is behind the last output repeats it.
template <bool kBf16>
ZEN_AVX512 void many_weights(const Problem& p, int32_t slot, int64_t o, int64_t outs, int64_t parts,
                             int64_t from, int64_t size, float* w) {
  thread_local Scratch room;
  uint32_t* words = room.get<uint32_t>(kBlock / kLanes * kMostLevels * kWords * kLanes);
  std::vector<ManyOutputs<kBf16>> own;
  for (int64_t part = 0; part < parts; part++) {
    const int64_t begin = o + std::min(part * kLanes, outs - 1), count = std::min(kLanes, o + outs - begin);
    own.emplace_back(p, slot, begin, count, words + part * kMostLevels * kWords * kLanes);
  }
  for (int64_t i = 0; i < size; i += kStep)
    for (int64_t part = 0; part < parts; part++) {
      const int64_t word = i / kStep % kWords;
      if (!word) own[part].turn_signs(from + i);
      own[part].make(from + i, word, w + (i * parts + part) * kLanes, parts * kLanes);
    }
}

// What a tile of a party's rows is multiplied with: `size` inputs from `from` on, all of one chunk.
struct ManyPart {
  const float* w;  // as many_weights leaves them
  int64_t from, size, o, outs;
};

// 16 PARTS outputs of ROWS rows; the rows from `next` on are wanted after these.
template <int ROWS, int PARTS>
ZEN_AVX512 void many_tile(const Problem& p, const ManyPart& part, const int64_t* rows, const int64_t* next) {
  __m512 c[ROWS][PARTS];
  const float *x[ROWS], *ahead[ROWS], *w = part.w;
  for (int b = 0; b < ROWS; b++) {
    x[b] = p.x + rows[b] * p.inputs + part.from;
    ahead[b] = p.x + next[b] * p.inputs + part.from;
    for (int g = 0; g < PARTS; g++) c[b][g] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < part.size; i++, w += PARTS * kLanes) {
    if (i % kLanes == 0)
      for (int b = 0; b < ROWS; b++) __builtin_prefetch(ahead[b] + i, 0, 2);
    __m512 v[PARTS];
#pragma GCC unroll 4
    for (int g = 0; g < PARTS; g++) {
      v[g] = _mm512_load_ps(w + g * kLanes);
      ZEN_KEEP(v[g]);
    }
#pragma GCC unroll 6
    for (int b = 0; b < ROWS; b++) {
      __m512 input = _mm512_set1_ps(x[b][i]);
      ZEN_KEEP(input);
#pragma GCC unroll 4
      for (int g = 0; g < PARTS; g++) c[b][g] = _mm512_fmadd_ps(v[g], input, c[b][g]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < PARTS; g++) {
    const __mmask16 k = (1u << std::clamp<int64_t>(part.outs - g * kLanes, 0, kLanes)) - 1;
#pragma GCC unroll 6
    for (int b = 0; b < ROWS; b++) {
      float* y = p.y + rows[b] * p.outputs + part.o + g * kLanes;
      if (part.from) c[b][g] = _mm512_add_ps(_mm512_maskz_loadu_ps(k, y), c[b][g]);
      _mm512_mask_storeu_ps(y, k, c[b][g]);
    }
  }
}

template <int PARTS>
void many_rows(const Problem& p, const ManyPart& part, const int64_t* rows, int64_t count, const int64_t* next) {
  switch (count) {
    case 6: return many_tile<6, PARTS>(p, part, rows, next);
    case 5: return many_tile<5, PARTS>(p, part, rows, next);
    case 4: return many_tile<4, PARTS>(p, part, rows, next);
    case 3: return many_tile<3, PARTS>(p, part, rows, next);
    case 2: return many_tile<2, PARTS>(p, part, rows, next);
    default: return many_tile<1, PARTS>(p, part, rows, next);
  }
}

template <bool kBf16>
void avx512_many(const Problem& p, const std::vector<Party>& all, const ManyTask& task) {
  thread_local Scratch weights;
  float* w = weights.get<float>(kBlock * kChunk);
  const int64_t outs = task.end - task.begin, parts = outs > kBlock / 2 ? 4 : 2;
  for (const Party& party : all)
    for (int64_t from = 0; from < p.inputs; from += kChunk) {
      const ManyPart part{w, from, std::min(kChunk, p.inputs - from), task.begin, outs};
      const int64_t total = party.rows.size(), begin = task.first(total), n = task.last(total) - begin;
      if (!n) continue;
      many_weights<kBf16>(p, party.slot, task.begin, outs, parts, from, part.size, w);
      const int64_t tiles = (n + kTileRows - 1) / kTileRows;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = t * n / tiles, count = (t + 1) * n / tiles - first;
        const int64_t* rows = party.rows.data() + begin + first;
        const int64_t* next = first + 2 * count <= n ? rows + count : rows;
        if (parts == 4)
          many_rows<4>(p, part, rows, count, next);
        else
          many_rows<2>(p, part, rows, count, next);
      }
    }
}
#endif

}  // namespace zen
