// Few rows with AVX-512: tiles of four outputs and up to six rows in registers, signs by table.

#pragma once

#include "cpu_rows.h"
#include "cpu_tables.h"

#if defined(__x86_64__)
#define ZEN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")))
#define ZEN_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16")))
// Keeps a value in its register, so that it is not read from memory again at each use.
#define ZEN_KEEP(v) asm volatile("" : "+v"(v))

namespace zen {

// The halves of two registers added to each other, and the quarters of each half: of either register
// one part stays in its place, the other is brought to it by a single shuffle for both.
ZEN_AVX512 inline __m512 add_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4(a, b, 0x4E));
}
ZEN_AVX512 inline __m512 add_quarters(__m512 a, __m512 b) {
  const __m512 others = _mm512_mask_blend_ps(0x0F0F, a, b);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, a, b), _mm512_shuffle_f32x4(others, others, 0xB1));
}

// across() of four registers at once, in the same order of additions.
ZEN_AVX512 inline __m128 across(__m512 a, __m512 b, __m512 c, __m512 d) {
  __m512 v = add_quarters(add_halves(a, b), add_halves(c, d));  // sums of a, c, b and d
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));
  const __m512i first = _mm512_setr_epi32(0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(first, v));
}

ZEN_AVX512 inline float across(__m512 v) {
  float lanes[kLanes];
  _mm512_storeu_ps(lanes, v);
  return across(lanes);
}

template <int OUT, int ROWS>
ZEN_AVX512 inline void write(const Problem& p, const __m512 (&c)[OUT][ROWS], int64_t o, int64_t r) {
  for (int b = 0; b < ROWS; b++) {
    float* y = p.y + (r + b) * p.outputs + o;
    if constexpr (OUT == 4) {
      _mm_storeu_ps(y, across(c[0][b], c[1][b], c[2][b], c[3][b]));
    } else {
      for (int a = 0; a < OUT; a++) y[a] = across(c[a][b]);
    }
  }
}

// One of the two registers of a step of a weight; `left` inputs from `at` on exist.
template <bool kBf16, int kHalf, bool kWhole>
ZEN_AVX512 inline __m512 load_weight(const void* w, int64_t at, int64_t left) {
  if constexpr (kBf16) {
    const uint16_t* from = static_cast<const uint16_t*>(w) + at;
    const __mmask32 k = kWhole ? ~0u : (1u << left) - 1;
    const __m512i both = kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(k, from);
    return _mm512_castsi512_ps(kHalf ? _mm512_and_si512(both, _mm512_set1_epi32(0xFFFF0000))
                                     : _mm512_slli_epi32(both, 16));
  } else {
    const float* from = static_cast<const float*>(w) + at + kHalf * kLanes;
    if (kWhole) return _mm512_loadu_ps(from);
    const int64_t here = std::clamp<int64_t>(left - kHalf * kLanes, 0, kLanes);
    return _mm512_maskz_loadu_ps((1u << here) - 1, from);
  }
}

template <bool kBf16, int kHalf, bool kWhole, int OUT, int ROWS>
ZEN_AVX512 inline void half_step(const Problem& p, const float* x, int64_t o, int64_t i,
                                 __m512 (&c)[OUT][ROWS]) {
  __m512 w[OUT];
#pragma GCC unroll 8
  for (int a = 0; a < OUT; a++)
    w[a] = load_weight<kBf16, kHalf, kWhole>(p.w, (o + a) * p.inputs + i, p.inputs - i);
#pragma GCC unroll 8
  for (int b = 0; b < ROWS; b++) {
    __m512 v = _mm512_load_ps(x + b * kStep + kHalf * kLanes);
    ZEN_KEEP(v);
#pragma GCC unroll 8
    for (int a = 0; a < OUT; a++) c[a][b] = _mm512_fmadd_ps(w[a], v, c[a][b]);
  }
}

// OUT outputs of ROWS rows, all inputs. `next`: bytes to the weights that are wanted after these.
template <bool kBf16, int OUT, int ROWS>
ZEN_AVX512 void base_tile(const Problem& p, const float* x, int64_t o, int64_t r, int64_t next,
                          Ahead ahead) {
  __m512 c[OUT][ROWS];
  for (int b = 0; b < ROWS; b++)
    for (int a = 0; a < OUT; a++) c[a][b] = _mm512_setzero_ps();
  const int64_t whole = p.inputs / kStep, size = kBf16 ? 2 : 4, each = ahead.each(whole);
  const char* w = static_cast<const char*>(p.w) + o * p.inputs * size + next;
  for (int64_t s = 0; s < whole; s++, x += ROWS * kStep) {
    if (next)
      for (int a = 0; a < OUT; a++)
        _mm_prefetch(w + (a * p.inputs + s * kStep) * size, _MM_HINT_T1);
    if (each) ahead.fetch(s * each, each);
    half_step<kBf16, 0, true>(p, x, o, s * kStep, c);
    half_step<kBf16, 1, true>(p, x, o, s * kStep, c);
  }
  if (whole * kStep < p.inputs) {
    half_step<kBf16, 0, false>(p, x, o, whole * kStep, c);
    half_step<kBf16, 1, false>(p, x, o, whole * kStep, c);
  }
  write(p, c, o, r);
}

template <bool kWhole, int OUT, int ROWS>
ZEN_AVX512_BF16 inline void bf16_step(const Problem& p, const uint16_t* x, const uint16_t* w,
                                      int64_t left, __m512 (&c)[OUT][ROWS]) {
  const __mmask32 k = kWhole ? ~0u : (1u << left) - 1;
  __m512i v[OUT];
#pragma GCC unroll 8
  for (int a = 0; a < OUT; a++) {
    const uint16_t* from = w + a * p.inputs;
    v[a] = kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(k, from);
    ZEN_KEEP(v[a]);
  }
#pragma GCC unroll 8
  for (int b = 0; b < ROWS; b++) {
    __m512i row = _mm512_load_si512(x + b * kStep);
    ZEN_KEEP(row);
#pragma GCC unroll 8
    for (int a = 0; a < OUT; a++)
      c[a][b] = _mm512_dpbf16_ps(c[a][b], (__m512bh)v[a], (__m512bh)row);
  }
}

// The same in products of bfloat16 with float32 sums, two inputs a lane and step.
template <int OUT, int ROWS>
ZEN_AVX512_BF16 void bf16_tile(const Problem& p, const uint16_t* x, int64_t o, int64_t r,
                               int64_t next, Ahead ahead) {
  __m512 c[OUT][ROWS];
  for (int b = 0; b < ROWS; b++)
    for (int a = 0; a < OUT; a++) c[a][b] = _mm512_setzero_ps();
  const uint16_t* w = static_cast<const uint16_t*>(p.w) + o * p.inputs;
  const int64_t whole = p.inputs / kStep, each = ahead.each(whole);
  for (int64_t s = 0; s < whole; s++, x += ROWS * kStep, w += kStep) {
    if (each) ahead.fetch(s * each, each);
    if (next)
      for (int a = 0; a < OUT; a++)
        _mm_prefetch(reinterpret_cast<const char*>(w + a * p.inputs) + next, _MM_HINT_T1);
    bf16_step<true>(p, x, w, kStep, c);
  }
  if (whole * kStep < p.inputs) bf16_step<false>(p, x, w, p.inputs - whole * kStep, c);
  write(p, c, o, r);
}

// ---- signs: 16 outputs in a register, 32 inputs of each in a lane

// Sixteen registers of 16 words each, turned so that the first holds the first word of each.
ZEN_AVX512 inline __attribute__((always_inline)) void turn(__m512i (&r)[16], __m512i (&to)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; c++) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
    to[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    to[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    to[8 + c] = _mm512_shuffle_i32x4(a, d, 0xDD);
    to[12 + c] = _mm512_shuffle_i32x4(b, e, 0xDD);
  }
}

// 16 words of 32 bits of 16 outputs, one word of each side by side.
ZEN_AVX512 inline void turn(const uint8_t* const (&rows)[kLanes], int64_t at, __mmask64 k, uint32_t* to) {
  __m512i r[16], turned[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi8(k, rows[i] + at);
  turn(r, turned);
#pragma GCC unroll 16
  for (int c = 0; c < 16; c++) _mm512_store_si512(to + 16 * c, turned[c]);
}

// The last one or two words of rows: a whole turn costs more.
template <bool kWhole>
ZEN_AVX512 inline void turn_few(const uint8_t* const (&rows)[kLanes], int64_t at, int64_t bytes, uint32_t* to) {
  __m512i half[2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    half[h] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      uint64_t words = 0;
      std::memcpy(&words, rows[8 * h + i] + at, kWhole ? 8 : bytes);
      half[h] = _mm512_mask_set1_epi64(half[h], 1 << i, words);
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  _mm512_store_si512(to, _mm512_permutex2var_epi32(half[0], even, half[1]));
  _mm512_store_si512(to + kLanes, _mm512_permutex2var_epi32(half[0], odd, half[1]));
}

// Where each of 64 lookups falls in four tables side by side: the low and the high half of each byte.
struct Codes {
  __m512i first, second;
};

ZEN_AVX512 inline Codes codes_of(const uint32_t* words) {
  const __m512i low = _mm512_set1_epi8(15), table = _mm512_set1_epi32(0x30201000);
  const __m512i word = _mm512_load_si512(words);  // (word & low) | table
  return {_mm512_ternarylogic_epi32(word, low, table, 0xEA),
          _mm512_ternarylogic_epi32(_mm512_srli_epi32(word, 4), low, table, 0xEA)};
}

// What 16 outputs look up for one word of 32 inputs, in 8 bits the sums of eight inputs each.
ZEN_AVX512 inline __attribute__((always_inline)) __m512i found(const int8_t* tables, const Codes& codes) {
  return _mm512_add_epi8(_mm512_permutexvar_epi8(codes.first, _mm512_load_si512(tables)),
                         _mm512_permutexvar_epi8(codes.second, _mm512_load_si512(tables + 64)));
}

// Adds what 16 kParts outputs look up for one word of 32 inputs in tables whose steps count `times`.
template <int kParts>
ZEN_AVX512 inline __attribute__((always_inline)) void look_up(const int8_t* tables, __m512i times,
                                                              const Codes* codes, __m512i* sum) {
#pragma GCC unroll 4
  for (int g = 0; g < kParts; g++) sum[g] = _mm512_dpbusd_epi32(sum[g], times, found(tables, codes[g]));
}

// Adds alpha times the sums to y.
template <int kParts, int ENTRIES>
ZEN_AVX512 inline void add_terms(const Problem& p, const Entry* entries, int64_t at, int64_t o,
                                 int64_t outs, const __m512i (&sum)[ENTRIES][kParts]) {
  for (int e = 0; e < ENTRIES; e++)
    for (int g = 0; g < kParts; g++) {
      const int64_t count = std::clamp<int64_t>(outs - g * kLanes, 0, kLanes);
      const __mmask16 k = (1u << count) - 1;
      float* y = p.y + entries[e].row * p.outputs + o + g * kLanes;
      const __m512 alpha = _mm512_maskz_loadu_ps(k, p.scale + at + g * kLanes);
      const __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[e][g]), _mm512_set1_ps(entries[e].scale));
      const __m512 sum_y = _mm512_add_ps(_mm512_maskz_loadu_ps(k, y), _mm512_mul_ps(term, alpha));
      _mm512_mask_storeu_ps(y, k, sum_y);
    }
}

constexpr int64_t kWords = 16;  // of 32 signs, that are turned at once

// The signs of 16 outputs, `bytes` of them from `from` on, turned into up to 16 registers.
ZEN_AVX512 inline void turn_some(const uint8_t* const (&rows)[kLanes], int64_t from, int64_t bytes,
                                 uint32_t* to) {
  if (bytes == 8)
    turn_few<true>(rows, from, bytes, to);
  else if (bytes < 8)
    turn_few<false>(rows, from, bytes, to);
  else
    turn(rows, from, bytes < 64 ? (1ull << bytes) - 1 : ~0ull, to);
}

// Where the signs of 16 kParts outputs begin; those that do not exist repeat the last one.
template <int kParts>
inline void sign_rows(const Problem& p, int64_t at, int64_t outs, const uint8_t* (&rows)[kParts][kLanes]) {
  const uint8_t *row = p.bits + at * p.bytes, *last = row + (outs - 1) * p.bytes;
  for (int64_t i = 0; i < kParts * kLanes; i++, row += p.bytes)
    rows[i / kLanes][i % kLanes] = std::min(row, last);
}

// Signs of a block of outputs of a variant with ENTRIES tables at once: codes are made once for all.
// `next` is what is wanted after these.
template <int kParts, int ENTRIES>
ZEN_AVX512 void sign_block(const Problem& p, const Entry* entries, int64_t at, int64_t o, int64_t outs,
                           Ahead next) {
  alignas(64) uint32_t words[kParts][kWords * kLanes];
  const uint8_t* rows[kParts][kLanes];
  sign_rows<kParts>(p, at, outs, rows);
  const __m512i one = _mm512_set1_epi8(1), many = _mm512_set1_epi8(kCoarse);
  __m512i sum[ENTRIES][kParts];
  const int32_t* coarse[ENTRIES];
  for (int e = 0; e < ENTRIES; e++) {
    coarse[e] = entries[e].words;
    for (int g = 0; g < kParts; g++) sum[e][g] = _mm512_setzero_si512();
  }
  const int64_t turns = (p.bytes + 4 * kWords - 1) / (4 * kWords) * kParts;
  const int64_t share = (next.lines + turns - 1) / turns;
  for (int64_t from = 0; from < p.bytes; from += 4 * kWords) {
    const int64_t bytes = std::min(4 * kWords, p.bytes - from);
    for (int g = 0; g < kParts; g++) {
      next.fetch((from / (4 * kWords) * kParts + g) * share, share);
      turn_some(rows[g], from, bytes, words[g]);
    }
    const int64_t first = from / 4, last = first + (bytes + 3) / 4;
    for (int64_t j = first; j < last; j++) {
      Codes codes[kParts];
#pragma GCC unroll 4
      for (int g = 0; g < kParts; g++) codes[g] = codes_of(words[g] + (j - first) * kLanes);
#pragma GCC unroll 4
      for (int e = 0; e < ENTRIES; e++) look_up<kParts>(entries[e].fine + j * kTable, one, codes, sum[e]);
    }
#pragma GCC unroll 4
    for (int e = 0; e < ENTRIES; e++)
      for (; coarse[e] < entries[e].words + entries[e].count && *coarse[e] < last; coarse[e]++) {
        Codes codes[kParts];
#pragma GCC unroll 4
        for (int g = 0; g < kParts; g++) codes[g] = codes_of(words[g] + (*coarse[e] - first) * kLanes);
        look_up<kParts>(entries[e].coarse + *coarse[e] * kTable, many, codes, sum[e]);
      }
  }
  add_terms<kParts, ENTRIES>(p, entries, at, o, outs, sum);
}

// One variant's signs of one level; `next` is what is wanted after these.
template <int kParts>
ZEN_AVX512 void avx512_level(const Problem& p, const Tables& tables, const Group& group,
                                    int64_t level, int64_t o, int64_t outs, Ahead next) {
  const int64_t at = p.at(group.slot, level, o);
  for (int64_t e = group.begin; e < group.end; e += 4, next = {}) {
    const Entry* entries = tables.entries() + e;
    switch (std::min<int64_t>(group.end - e, 4)) {
      case 4: sign_block<kParts, 4>(p, entries, at, o, outs, next); break;
      case 3: sign_block<kParts, 3>(p, entries, at, o, outs, next); break;
      case 2: sign_block<kParts, 2>(p, entries, at, o, outs, next); break;
      default: sign_block<kParts, 1>(p, entries, at, o, outs, next);
    }
  }
}

constexpr int64_t kAhead = 12;  // lines that memory brings while 16 outputs' signs are turned

// `after` is what is wanted when all signs are done: as much of it as there is time for.
ZEN_AVX512 inline void avx512_signs(const Problem& p, const Tables& tables, int64_t o, int64_t outs,
                                    Ahead after) {
  const std::vector<Group>& groups = tables.groups();
  const int64_t count = static_cast<int64_t>(groups.size());
  const int64_t turns = (p.bytes + 4 * kWords - 1) / (4 * kWords) * (kBlock / kLanes);
  after.lines = std::min(after.lines, count * p.levels * turns * kAhead);
  for (int64_t g = 0; g < count; g++)
    for (int64_t level = 0; level < p.levels; level++) {
      const Ahead next = after.part(g * p.levels + level, count * p.levels);
      if (outs > kBlock / 2)
        avx512_level<kBlock / kLanes>(p, tables, groups[g], level, o, outs, next);
      else
        avx512_level<kBlock / kLanes / 2>(p, tables, groups[g], level, o, outs, next);
    }
}

// ---- a block of outputs: the base's product, signs on their way into the cache meanwhile

template <typename T, bool kBf16, int OUT, int ROWS>
inline void tile(const Problem& p, const T* x, int64_t o, int64_t r, int64_t next, Ahead ahead) {
  if constexpr (sizeof(T) == 4)
    base_tile<kBf16, OUT, ROWS>(p, x, o, r, next, ahead);
  else
    bf16_tile<OUT, ROWS>(p, x, o, r, next, ahead);
}

template <typename T, bool kBf16, int OUT>
void tiles(const Problem& p, const Rows<T>& rows, int64_t t, int64_t o, int64_t next, Ahead ahead) {
  const int64_t r = rows.begin(t);
  switch (rows.begin(t + 1) - r) {
    case 6: return tile<T, kBf16, OUT, 6>(p, rows.data(t), o, r, next, ahead);
    case 5: return tile<T, kBf16, OUT, 5>(p, rows.data(t), o, r, next, ahead);
    case 4: return tile<T, kBf16, OUT, 4>(p, rows.data(t), o, r, next, ahead);
    case 3: return tile<T, kBf16, OUT, 3>(p, rows.data(t), o, r, next, ahead);
    case 2: return tile<T, kBf16, OUT, 2>(p, rows.data(t), o, r, next, ahead);
    default: return tile<T, kBf16, OUT, 1>(p, rows.data(t), o, r, next, ahead);
  }
}

// The lines of signs that a block will read, dealt out to its tiles.
class Lines {
 public:
  Lines(const Problem& p, const Tables& tables, int64_t o, int64_t outs, int64_t parts)
      : p_(p), tables_(tables), o_(o), each_(outs * p.bytes / 64 + 1), parts_(parts) {
    all_ = static_cast<int64_t>(tables.groups().size()) * p.levels * each_;
  }
  Ahead next() {
    if (done_ >= all_) return {};
    const int64_t region = done_ / each_, skip = done_ % each_;
    const int64_t count = std::min((all_ + parts_ - 1) / parts_, each_ - skip);
    done_ += count;
    const Group& group = tables_.groups()[region / p_.levels];
    return {p_.bits + p_.at(group.slot, region % p_.levels, o_) * p_.bytes + skip * 64, count};
  }

 private:
  const Problem& p_;
  const Tables& tables_;
  int64_t o_, each_, parts_, all_, done_ = 0;
};

// `next`: the block that this thread is likely to take after this one.
template <typename T, bool kBf16>
void avx512_block(const Problem& p, const Rows<T>& rows, const Tables& tables, const Block& block,
                  const Block& next) {
  const int64_t far = p.far(), whole = block.begin + block.size() / 4 * 4;
  // Signs come first, so that they and the next block's first weights have the same time each.
  const int64_t parts = std::max<int64_t>((block.size() + 3) / 4 - far / 4, 1) * rows.tiles();
  Lines lines(p, tables, block.begin, block.size(), parts);
  int64_t o = block.begin;
  for (; o < whole; o += 4) {
    const int64_t then = o + far < whole ? o + far : next.begin + o + far - whole;
    const int64_t bytes = then < whole || then + 4 <= next.end ? p.weight_bytes(then - o) : 0;
    for (int64_t t = 0; t < rows.tiles(); t++)
      tiles<T, kBf16, 4>(p, rows, t, o, t ? 0 : bytes, lines.next());
  }
  for (; o < block.end; o++)
    for (int64_t t = 0; t < rows.tiles(); t++) tiles<T, kBf16, 1>(p, rows, t, o, 0, lines.next());
  // The next block's first tiles are on their way; the others follow.
  avx512_signs(p, tables, block.begin, block.size(), p.weights_ahead(next.begin + far, next.end));
}

}  // namespace zen
#endif
