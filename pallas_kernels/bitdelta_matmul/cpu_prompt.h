// Many rows in bfloat16, by VDPBF16PS with float32 sums.
//
// The effective weight W + sum over levels of alpha s is rounded to bfloat16 only where that leaves
// the delta: where rounding a block's weights changes no output's by more than kLost of what the
// delta is (root mean square over its first inputs; a scale of four spacings of W may lose twice
// that). Elsewhere W is multiplied as it is and the signs are looked up in tables (cpu_tables.h)
// between the products, since the two need different parts of the processor: a tenth more time,
// where one after the other would cost a fifth. Which of the two depends on the weight and the
// variant alone.
//
// A register holds 16 outputs, with two inputs of each for the products, and meets a pair of inputs
// of a row: no sum runs across a register. An output's sum runs over the pairs of inputs in turn.

#pragma once

#include "cpu_avx512.h"
#include "cpu_many.h"

#if defined(ZEN_AVX512)

namespace zen {

constexpr float kLost = 0.035f;
constexpr int64_t kWide = 2048;       // inputs that are summed before going on
constexpr int64_t kTried = 128;       // inputs by which a block is judged
constexpr int kHalf = 2;              // registers of outputs in a tile
constexpr int kPromptParts = kBlock / kLanes;

// One output's effective weights, 16 at a time, in float32.
struct Effective {
  const uint16_t* w;
  int64_t inputs, levels;
  const uint8_t* bits[kMostLevels];
  float alpha[kMostLevels];

  Effective() = default;
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
    const __m512i sign = _mm512_set1_epi32(0x80000000);
    for (int64_t l = 0; l < levels; l++) {
      uint16_t plus = bits[l][i / 8];
      if (left > 8) std::memcpy(&plus, bits[l] + i / 8, 2);
      const __m512i up = _mm512_castps_si512(_mm512_set1_ps(alpha[l]));
      const __m512i term = _mm512_mask_xor_epi32(up, ~plus, up, sign);
      v = _mm512_mask_add_ps(v, k, v, _mm512_castsi512_ps(term));
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

// `size` inputs of `outs` outputs in bfloat16 as tiles want them: [halves][words][16 pairs][2][16][2].
ZEN_AVX512_BF16 inline void prompt_weights(const Problem& p, int32_t slot, int64_t o, int64_t outs,
                                           int64_t from, int64_t size, uint16_t* w) {
  const int64_t words = (size + kStep - 1) / kStep, pair = kHalf * kStep;
  for (int64_t part = 0; part * kLanes < outs; part++) {
    uint16_t* to = w + part / kHalf * words * kLanes * pair + part % kHalf * kStep;
    Effective own[kLanes];
    for (int64_t i = 0; i < kLanes; i++) own[i] = Effective(p, slot, o + std::min(part * kLanes + i, outs - 1));
    for (int64_t word = 0; word < words; word++) {
      const int64_t at = from + word * kStep, left = std::min(kStep, p.inputs - at);
      const __mmask32 k = left < kStep ? (1u << left) - 1 : ~0u;
      __m512i r[kLanes], turned[kLanes];
      if (slot < 0)
        for (int64_t i = 0; i < kLanes; i++) r[i] = _mm512_maskz_loadu_epi16(k, own[i].w + at);
      else
        for (int64_t i = 0; i < kLanes; i++)
          r[i] = (__m512i)_mm512_cvtne2ps_pbh(own[i].at(at + kLanes), own[i].at(at));
      turn(r, turned);
#pragma GCC unroll 16
      for (int64_t k = 0; k < kLanes; k++) _mm512_store_si512(to + (word * kLanes + k) * pair, turned[k]);
    }
  }
}

// All codes of a block of one variant and level, from byte `begin` on: [halves][words of size][2].
ZEN_AVX512 inline void prompt_codes(const Problem& p, int64_t at, int64_t outs, int64_t begin, int64_t size,
                                    Codes* to) {
  alignas(64) uint32_t words[kWords * kLanes];
  const uint8_t* rows[kPromptParts][kLanes];
  sign_rows<kPromptParts>(p, at, outs, rows);
  const int64_t count = (size + kStep - 1) / kStep, end = begin + (size + 7) / 8;
  for (int64_t from = begin; from < end; from += 4 * kWords) {
    const int64_t bytes = std::min(4 * kWords, end - from), first = (from - begin) / 4;
    for (int g = 0; g < kPromptParts; g++) {
      turn_some(rows[g], from, bytes, words);
      for (int64_t j = 0; j < (bytes + 3) / 4; j++)
        to[(g / kHalf * count + first + j) * kHalf + g % kHalf] = codes_of(words + j * kLanes);
    }
  }
}

// Up to six rows of one party: their inputs as one stream [words][count][32], and their tables.
struct PromptTile {
  size_t party;
  const int64_t* rows;
  int64_t count;
  uint16_t* x;
  int64_t entry;  // of the first row, whose the others' follow; -1 where there are none
};

// All rows, laid out for the tiles.
class PromptTiles {
 public:
  PromptTiles(const Problem& p, const std::vector<Party>& all, const Tables& tables, Scratch& scratch) : p_(p) {
    uint16_t* x = scratch.get<uint16_t>(p.rows * p.steps() * kStep);
    for (size_t i = 0; i < all.size(); i++) {
      int64_t entry = -1;
      for (const Group& group : tables.groups())
        if (group.slot == all[i].slot) entry = group.begin;
      const int64_t n = all[i].rows.size(), tiles = (n + kTileRows - 1) / kTileRows;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = t * n / tiles, count = (t + 1) * n / tiles - first;
        tiles_.push_back({i, all[i].rows.data() + first, count, x, entry < 0 ? -1 : entry + first});
        x += count * p.steps() * kStep;
      }
    }
  }

  int64_t count() const { return static_cast<int64_t>(tiles_.size()); }
  const PromptTile& operator[](int64_t i) const { return tiles_[i]; }

  ZEN_AVX512 void fill(int64_t i, Tables& tables) const {
    const PromptTile& tile = tiles_[i];
    for (int64_t b = 0; b < tile.count; b++) {
      const uint16_t* x = p_.x16 + tile.rows[b] * p_.inputs;
      for (int64_t s = 0; s < p_.steps(); s++) {
        const int64_t left = p_.inputs - s * kStep;
        const __mmask32 k = left < kStep ? (1u << left) - 1 : ~0u;
        _mm512_store_si512(tile.x + (s * tile.count + b) * kStep, _mm512_maskz_loadu_epi16(k, x + s * kStep));
      }
      if (tile.entry >= 0) tables.fill(tile.entry + b);
    }
  }

 private:
  const Problem& p_;
  std::vector<PromptTile> tiles_;
};

// What a tile is multiplied with: `words` of 32 inputs from word `from` on.
struct PromptPart {
  const uint16_t* w;     // as prompt_weights leaves them, of one half
  const Codes* codes;    // as prompt_codes does
  const Entry* entries;  // of the tile's rows
  int64_t from, words;
  int64_t at, o, outs;  // where the outputs' scales begin, the outputs, and how many exist
  bool first;           // nothing has been added to y yet
  Ahead ahead;          // what is wanted after this
};

template <int ROWS>
ZEN_AVX512 inline __attribute__((always_inline)) void write_tile(const Problem& p, const PromptTile& tile,
                                                                 const PromptPart& part,
                                                                 const __m512 (&c)[ROWS][kHalf],
                                                                 const __m512i (&sum)[ROWS][kHalf], bool signs) {
#pragma GCC unroll 2
  for (int g = 0; g < kHalf; g++) {
    const int64_t count = std::clamp<int64_t>(part.outs - g * kLanes, 0, kLanes);
    const __mmask16 k = (1u << count) - 1;
    const __m512 alpha = signs ? _mm512_maskz_loadu_ps(k, p.scale + part.at + g * kLanes) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int b = 0; b < ROWS; b++) {
      float* y = p.y + tile.rows[b] * p.outputs + part.o + g * kLanes;
      __m512 v = c[b][g];
      if (signs) {
        const __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[b][g]), _mm512_set1_ps(part.entries[b].scale));
        v = _mm512_add_ps(v, _mm512_mul_ps(term, alpha));
      }
      if (!part.first) v = _mm512_add_ps(_mm512_maskz_loadu_ps(k, y), v);
      _mm512_mask_storeu_ps(y, k, v);
    }
  }
}

// What the coarse tables of the tile's rows add.
template <int ROWS>
ZEN_AVX512 inline __attribute__((always_inline)) void coarse_words(const PromptPart& part,
                                                                   __m512i (&sum)[ROWS][kHalf]) {
  const __m512i many = _mm512_set1_epi8(kCoarse);
  const int64_t end = part.from + part.words;
#pragma GCC unroll 6
  for (int b = 0; b < ROWS; b++) {
    const Entry& entry = part.entries[b];
    const int32_t* last = entry.words + entry.count;
    for (const int32_t* w = std::lower_bound(entry.words, last, part.from); w < last && *w < end; w++)
      look_up<kHalf>(entry.coarse + *w * kTable, many, part.codes + (*w - part.from) * kHalf, sum[b]);
  }
}

// 32 outputs of ROWS rows: the base's product, with a row's look-ups after some of the pairs of
// inputs, or one of the two.
template <int ROWS, bool kBase, bool kSigns>
ZEN_AVX512_BF16 void prompt_tile(const Problem& p, const PromptTile& tile, const PromptPart& part) {
  constexpr int kEvery = kLanes / ROWS;
  const __m512i one = _mm512_set1_epi8(1);
  __m512 c[ROWS][kHalf];
  __m512i sum[ROWS][kHalf], coarse[ROWS][kHalf] = {};
  if (kSigns) coarse_words<ROWS>(part, coarse);
#pragma GCC unroll 6
  for (int b = 0; b < ROWS; b++)
    for (int g = 0; g < kHalf; g++) c[b][g] = _mm512_setzero_ps(), sum[b][g] = coarse[b][g];
  const uint16_t *w = part.w, *x = tile.x + part.from * ROWS * kStep;
  const Codes* codes = part.codes;
  const int64_t each = part.ahead.each(part.words);
  const int8_t* tables = kSigns ? part.entries[0].fine + part.from * kTable : nullptr;
  const int64_t next = kSigns && ROWS > 1 ? part.entries[1].fine - part.entries[0].fine : 0;
  for (int64_t word = 0; word < part.words; word++, x += ROWS * kStep, codes += kHalf, tables += kTable) {
    part.ahead.fetch(word * each, each);
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) {
      if (kBase) {
        __m512i v[kHalf];
#pragma GCC unroll 2
        for (int g = 0; g < kHalf; g++, w += kStep) {
          v[g] = _mm512_load_si512(w);
          ZEN_KEEP(v[g]);
        }
#pragma GCC unroll 6
        for (int b = 0; b < ROWS; b++) {
          int32_t two;
          std::memcpy(&two, x + b * kStep + 2 * k, sizeof(two));
          __m512i pair = _mm512_set1_epi32(two);
          ZEN_KEEP(pair);
#pragma GCC unroll 2
          for (int g = 0; g < kHalf; g++)
            c[b][g] = _mm512_dpbf16_ps(c[b][g], (__m512bh)v[g], (__m512bh)pair);
        }
      }
      if (kSigns && k % kEvery == kEvery - 1 && k / kEvery < ROWS) {
#pragma GCC unroll 2
        for (int g = 0; g < kHalf; g++)
          sum[k / kEvery][g] =
              _mm512_dpbusd_epi32(sum[k / kEvery][g], one, found(tables + k / kEvery * next, codes[g]));
      }
    }
  }
  write_tile<ROWS>(p, tile, part, c, sum, kSigns);
}

template <bool kBase, bool kSigns>
void prompt_rows(const Problem& p, const PromptTile& tile, const PromptPart& part) {
  switch (tile.count) {
    case 6: return prompt_tile<6, kBase, kSigns>(p, tile, part);
    case 5: return prompt_tile<5, kBase, kSigns>(p, tile, part);
    case 4: return prompt_tile<4, kBase, kSigns>(p, tile, part);
    case 3: return prompt_tile<3, kBase, kSigns>(p, tile, part);
    case 2: return prompt_tile<2, kBase, kSigns>(p, tile, part);
    default: return prompt_tile<1, kBase, kSigns>(p, tile, part);
  }
}

// Which parties' effective weights may be rounded, block by block.
class Rounding {
 public:
  Rounding(const Problem& p, const std::vector<Party>& all)
      : p_(p), all_(all), blocks_((p.outputs + kBlock - 1) / kBlock),
        may_(all.size() * blocks_) {}

  int64_t count() const { return static_cast<int64_t>(may_.size()); }
  void judge(int64_t i) {
    const int64_t begin = i % blocks_ * kBlock;
    const int64_t outs = std::min(kBlock, p_.outputs - begin);
    const int32_t slot = all_[i / blocks_].slot;
    may_[i] = slot >= 0 && roundable(p_, slot, begin, outs);
  }
  bool may(size_t party, int64_t begin) const { return may_[party * blocks_ + begin / kBlock]; }
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

// One block of outputs and some inputs: weights and codes are made once for all tiles that want them.
class PromptBlock {
 public:
  PromptBlock(const Problem& p, int64_t begin, int64_t outs, int64_t from)
      : p_(p), begin_(begin), outs_(outs), from_(from), size_(std::min(kWide, p.inputs - from)),
        words_((size_ + kStep - 1) / kStep) {}

  // slot: whose effective weights are meant, or -1. signs: whose signs are looked up, or -1.
  void multiply(const PromptTiles& tiles, const Tables& tables, int64_t first, int64_t last, int32_t slot,
                int32_t signs) {
    thread_local Scratch for_base, for_slot, for_codes;
    uint16_t* w = (slot < 0 ? for_base : for_slot).get<uint16_t>(kBlock * kWide);
    if (slot >= 0 || !base_) prompt_weights(p_, slot, begin_, outs_, from_, size_, w);
    base_ = base_ || slot < 0;
    const int64_t levels = signs < 0 ? 0 : p_.levels, each = kPromptParts * words_;
    Codes* codes = for_codes.get<Codes>(levels * each);
    for (int64_t l = 0; l < levels; l++)
      prompt_codes(p_, p_.at(signs, l, begin_), outs_, from_ / 8, size_, codes + l * each);
    for (int64_t t = first; t < last; t++)
      for (int64_t skip = 0; skip < outs_; skip += kHalf * kLanes) {
        const Entry* entries = levels ? tables.entries() + tiles[t].entry : nullptr;
        PromptPart part{w + skip * words_ * kStep, codes + skip / kLanes * words_, entries, from_ / kStep, words_,
                        0, begin_ + skip, outs_ - skip, from_ == 0, {}};
        if (t + 1 < last) part.ahead = skip ? rows_of(tiles[t + 1]) : tables_of(tiles[t + 1], entries, tiles[t].count);
        if (!levels) prompt_rows<true, false>(p_, tiles[t], part);
        for (int64_t l = 0; l < levels; l++, part.codes += each, part.first = false) {
          part.at = p_.at(signs, l, begin_ + skip);
          if (l)
            prompt_rows<false, true>(p_, tiles[t], part);
          else
            prompt_rows<true, true>(p_, tiles[t], part);
        }
      }
  }

 private:
  // The next tile's inputs and tables.
  Ahead rows_of(const PromptTile& next) const {
    const uint16_t* x = next.x + from_ / kStep * next.count * kStep;
    return {reinterpret_cast<const uint8_t*>(x), words_ * next.count};
  }
  Ahead tables_of(const PromptTile& next, const Entry* entries, int64_t count) const {
    if (!entries || words_ < p_.steps()) return {};
    const auto* fine = reinterpret_cast<const uint8_t*>(entries[count].fine);
    return {fine, next.count * (words_ + 1) * (kTable / 64)};
  }

  const Problem& p_;
  int64_t begin_, outs_, from_, size_, words_;
  bool base_ = false;  // whether the base's own weights have been laid out
};

// A task's outputs of its share of each party's tiles.
inline void bf16_prompt(const Problem& p, const std::vector<Party>& all, const Rounding& rounding,
                        const PromptTiles& tiles, const Tables& tables, const ManyTask& task) {
  for (int64_t from = 0; from < p.inputs; from += kWide) {
    PromptBlock block(p, task.begin, task.end - task.begin, from);
    for (int64_t t = 0, last; t < tiles.count(); t = last) {
      for (last = t; last < tiles.count() && tiles[last].party == tiles[t].party;) last++;
      const int64_t first = t + task.first(last - t), until = t + task.last(last - t);
      const int32_t slot = all[tiles[t].party].slot;
      const bool may = rounding.may(tiles[t].party, task.begin);
      if (first < until) block.multiply(tiles, tables, first, until, may ? slot : -1, may ? -1 : slot);
    }
  }
}

}  // namespace zen
#endif
