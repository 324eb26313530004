// Many rows in bfloat16, by VDPBF16PS with float32 sums.
//
// The effective weight W + sum over levels of alpha s is rounded to bfloat16 only where that leaves
// the delta: where rounding a block's weights changes no output's by more than kLost of what the
// delta is (root mean square over its first inputs; a scale of four spacings of W may lose twice
// that). Elsewhere W is multiplied as it is and the signs are looked up in tables (cpu_tables.h),
// which costs about a third more. Which of the two depends on the weight and the variant alone.

#pragma once

#include "cpu_avx512.h"
#include "cpu_many.h"

#if defined(ZEN_AVX512)

namespace zen {

constexpr float kLost = 0.035f;
constexpr int64_t kPromptBlock = 64;  // outputs that one task takes
constexpr int64_t kWide = 2048;       // inputs that are summed before going on
constexpr int64_t kPairs = 32;        // inputs in a register
constexpr int64_t kTried = 512;       // inputs by which a block is judged

// One output's effective weights, 16 at a time, in float32.
struct Effective {
  const uint16_t* w;
  int64_t inputs, levels;
  const uint8_t* bits[kMostLevels];
  float alpha[kMostLevels];

  Effective(const Problem& p, int32_t slot, int64_t output)
      : w(static_cast<const uint16_t*>(p.w) + output * p.inputs),
        inputs(p.inputs),
        levels(slot < 0 ? 0 : p.levels) {
    for (int64_t l = 0; l < levels; l++) {
      const int64_t at = p.at(slot, l, output);
      bits[l] = p.bits + at * p.bytes;
      alpha[l] = p.scale[at];
    }
  }

  ZEN_AVX512 __m512 base(int64_t i) const {
    const int64_t left = std::clamp<int64_t>(inputs - i, 0, kLanes);
    const __m256i half = _mm256_maskz_loadu_epi16((1u << left) - 1, w + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  ZEN_AVX512 __m512 at(int64_t i) const {
    __m512 v = base(i);
    const int64_t left = inputs - i;
    if (left <= 0) return v;
    const __mmask16 k = left < kLanes ? (1u << left) - 1 : 0xFFFF;
    for (int64_t l = 0; l < levels; l++) {
      uint16_t plus = bits[l][i / 8];
      if (left > 8) plus |= uint16_t(bits[l][i / 8 + 1] << 8);
      const __m512 up = _mm512_set1_ps(alpha[l]), down = _mm512_set1_ps(-alpha[l]);
      v = _mm512_mask_add_ps(v, k, v, _mm512_mask_blend_ps(plus, down, up));
    }
    return v;
  }
};

// Whether a block's effective weights may be rounded to bfloat16.
ZEN_AVX512_BF16 inline bool roundable(const Problem& p, int32_t slot, int64_t o, int64_t outs) {
  const int64_t size = std::min(kTried, p.inputs);
  for (int64_t a = 0; a < outs; a++) {
    __m512 lost = _mm512_setzero_ps(), delta = _mm512_setzero_ps();
    const Effective own(p, slot, o + a);
    for (int64_t i = 0; i < size; i += kLanes) {
      const __m512 v = own.at(i);
      const __m256i half = (__m256i)_mm512_cvtneps_pbh(v);
      const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      const __m512 off = _mm512_sub_ps(v, back), added = _mm512_sub_ps(v, own.base(i));
      lost = _mm512_fmadd_ps(off, off, lost);
      delta = _mm512_fmadd_ps(added, added, delta);
    }
    if (!(across(lost) <= kLost * kLost * across(delta))) return false;
  }
  return true;
}

// `size` inputs of `outs` outputs in bfloat16, four outputs to a stream: [outs / 4][registers][4][32].
ZEN_AVX512_BF16 inline void bf16_weights(const Problem& p, int32_t slot, int64_t o, int64_t outs,
                                         int64_t from, int64_t size, uint16_t* w) {
  const int64_t registers = (size + kPairs - 1) / kPairs;
  for (int64_t a = 0; a < (outs + 3) / 4 * 4; a++) {
    uint16_t* to = w + a / 4 * 4 * registers * kPairs + a % 4 * kPairs;
    const int64_t output = o + std::min(a, outs - 1);
    const Effective own(p, slot, output);
    for (int64_t i = 0; i < size; i += kPairs) {
      __m512i v;
      if (slot < 0) {
        v = _mm512_maskz_loadu_epi16(size - i < kPairs ? (1u << (size - i)) - 1 : ~0u, own.w + from + i);
      } else {
        v = (__m512i)_mm512_cvtne2ps_pbh(own.at(from + i + kLanes), own.at(from + i));
      }
      _mm512_store_si512(to + i * 4, v);
    }
  }
}

// `count` rows' `size` inputs from `from` on in bfloat16 as one stream: [registers][count][32].
ZEN_AVX512 inline void bf16_rows(const Problem& p, const uint16_t* x, const int64_t* rows,
                                 int64_t count, int64_t from, int64_t size, uint16_t* to) {
  for (int64_t b = 0; b < count; b++) {
    const uint16_t* row = x + rows[b] * p.inputs + from;
    for (int64_t i = 0; i < size; i += kPairs) {
      const __mmask32 k = size - i < kPairs ? (1u << (size - i)) - 1 : ~0u;
      _mm512_store_si512(to + i * count + b * kPairs, _mm512_maskz_loadu_epi16(k, row + i));
    }
  }
}

// Four outputs of ROWS rows over some inputs, added to y unless they are the first.
template <int ROWS>
ZEN_AVX512_BF16 void prompt_tile(const Problem& p, const uint16_t* w, const uint16_t* x,
                                 const int64_t* rows, int64_t o, int64_t outs, int64_t registers,
                                 bool first) {
  __m512 c[4][ROWS];
  for (int b = 0; b < ROWS; b++)
    for (int a = 0; a < 4; a++) c[a][b] = _mm512_setzero_ps();
  for (int64_t i = 0; i < registers; i++, w += 4 * kPairs, x += ROWS * kPairs) {
    __m512i v[4];
#pragma GCC unroll 8
    for (int a = 0; a < 4; a++) {
      v[a] = _mm512_load_si512(w + a * kPairs);
      ZEN_KEEP(v[a]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < ROWS; b++) {
      __m512i row = _mm512_load_si512(x + b * kPairs);
      ZEN_KEEP(row);
#pragma GCC unroll 8
      for (int a = 0; a < 4; a++) c[a][b] = _mm512_dpbf16_ps(c[a][b], (__m512bh)v[a], (__m512bh)row);
    }
  }
  add_sums(p, c, rows, o, outs, first);
}

inline void prompt_rows(const Problem& p, const uint16_t* w, const uint16_t* x, const int64_t* rows,
                        int64_t count, int64_t o, int64_t outs, int64_t registers, bool first) {
  switch (count) {
    case 6: return prompt_tile<6>(p, w, x, rows, o, outs, registers, first);
    case 5: return prompt_tile<5>(p, w, x, rows, o, outs, registers, first);
    case 4: return prompt_tile<4>(p, w, x, rows, o, outs, registers, first);
    case 3: return prompt_tile<3>(p, w, x, rows, o, outs, registers, first);
    case 2: return prompt_tile<2>(p, w, x, rows, o, outs, registers, first);
    default: return prompt_tile<1>(p, w, x, rows, o, outs, registers, first);
  }
}

// Which parties' effective weights may be rounded, block by block.
class Rounding {
 public:
  Rounding(const Problem& p, const std::vector<Party>& all)
      : p_(p), all_(all), blocks_((p.outputs + kPromptBlock - 1) / kPromptBlock),
        may_(all.size() * blocks_) {}

  int64_t count() const { return static_cast<int64_t>(may_.size()); }
  void judge(int64_t i) {
    const int64_t begin = i % blocks_ * kPromptBlock;
    const int64_t outs = std::min(kPromptBlock, p_.outputs - begin);
    const int32_t slot = all_[i / blocks_].slot;
    may_[i] = slot >= 0 && roundable(p_, slot, begin, outs);
  }
  bool may(size_t party, int64_t begin) const { return may_[party * blocks_ + begin / kPromptBlock]; }
  // Whether a variant's signs have to be looked up in any block.
  bool tables(int32_t slot) const {
    for (size_t i = 0; i < may_.size(); i++)
      if (!may_[i] && all_[i / blocks_].slot == slot) return true;
    return false;
  }

 private:
  const Problem& p_;
  const std::vector<Party>& all_;
  int64_t blocks_;
  std::vector<char> may_;
};

// The product of some rows with the weights of a slot (-1: the base's).
inline void prompt_product(const Problem& p, const uint16_t* x, const std::vector<int64_t>& rows,
                           int32_t slot, int64_t begin, int64_t outs) {
  thread_local Scratch weights, inputs;
  uint16_t* w = weights.get<uint16_t>((kPromptBlock + 4) * kWide);
  uint16_t* tile = inputs.get<uint16_t>(kTileRows * kWide);
  const int64_t n = rows.size(), tiles = (n + kTileRows - 1) / kTileRows;
  for (int64_t from = 0; from < p.inputs && n; from += kWide) {
    const int64_t size = std::min(kWide, p.inputs - from);
    const int64_t registers = (size + kPairs - 1) / kPairs;
    bf16_weights(p, slot, begin, outs, from, size, w);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t first = t * n / tiles, count = (t + 1) * n / tiles - first;
      bf16_rows(p, x, rows.data() + first, count, from, size, tile);
      for (int64_t a = 0; a < outs; a += 4)
        prompt_rows(p, w + a * registers * kPairs, tile, rows.data() + first, count, begin + a,
                    std::min<int64_t>(4, outs - a), registers, from == 0);
    }
  }
}

constexpr int kPromptParts = kPromptBlock / kLanes;

// All codes of a block of one variant and level, made once for all of its rows: [words][parts].
ZEN_AVX512 inline void all_codes(const Problem& p, int64_t at, int64_t outs, Codes* to) {
  alignas(64) uint32_t words[kWords * kLanes];
  const uint8_t* rows[kPromptParts][kLanes];
  sign_rows<kPromptParts>(p, at, outs, rows);
  for (int64_t from = 0; from < p.bytes; from += 4 * kWords) {
    const int64_t bytes = std::min(4 * kWords, p.bytes - from);
    for (int g = 0; g < kPromptParts; g++) {
      turn_some(rows[g], from, bytes, words);
      for (int64_t j = 0; j < (bytes + 3) / 4; j++)
        to[(from / 4 + j) * kPromptParts + g] = codes_of(words + j * kLanes);
    }
  }
}

template <int ENTRIES>
ZEN_AVX512 void prompt_signs(const Problem& p, const Entry* entries, int64_t at, int64_t o, int64_t outs,
                             const Codes* codes) {
  __m512i sum[ENTRIES][kPromptParts];
  for (int e = 0; e < ENTRIES; e++)
    for (int g = 0; g < kPromptParts; g++) sum[e][g] = _mm512_setzero_si512();
  for (int64_t word = 0; word < (p.bytes + 3) / 4; word++, codes += kPromptParts) {
    Codes own[kPromptParts];
#pragma GCC unroll 4
    for (int g = 0; g < kPromptParts; g++) own[g] = codes[g];
    look_up<kPromptParts, ENTRIES>(entries, word, own, sum);
  }
  add_terms<kPromptParts, ENTRIES>(p, entries, at, o, outs, sum);
}

// All signs of a variant's rows.
inline void prompt_group(const Problem& p, const Tables& tables, const Group& group, int64_t o,
                         int64_t outs) {
  thread_local Scratch scratch;
  Codes* codes = scratch.get<Codes>((p.bytes + 3) / 4 * kPromptParts);
  for (int64_t level = 0; level < p.levels; level++) {
    const int64_t at = p.at(group.slot, level, o);
    all_codes(p, at, outs, codes);
    for (int64_t e = group.begin; e < group.end; e += 4) {
      const Entry* entries = tables.entries() + e;
      switch (std::min<int64_t>(group.end - e, 4)) {
        case 4: prompt_signs<4>(p, entries, at, o, outs, codes); break;
        case 3: prompt_signs<3>(p, entries, at, o, outs, codes); break;
        case 2: prompt_signs<2>(p, entries, at, o, outs, codes); break;
        default: prompt_signs<1>(p, entries, at, o, outs, codes);
      }
    }
  }
}

// x: the rows in bfloat16 as they came, [rows, inputs].
inline void bf16_prompt(const Problem& p, const uint16_t* x, const std::vector<Party>& all,
                        const Rounding& rounding, const Tables& tables, int64_t begin, int64_t end) {
  const int64_t outs = end - begin;
  std::vector<int64_t> base;  // rows whose product is with W itself
  for (size_t i = 0; i < all.size(); i++) {
    if (rounding.may(i, begin))
      prompt_product(p, x, all[i].rows, all[i].slot, begin, outs);
    else
      base.insert(base.end(), all[i].rows.begin(), all[i].rows.end());
  }
  prompt_product(p, x, base, -1, begin, outs);
  for (size_t i = 0; i < all.size(); i++)
    for (const Group& group : tables.groups())
      if (group.slot == all[i].slot && !rounding.may(i, begin)) prompt_group(p, tables, group, begin, outs);
}

}  // namespace zen
#endif
