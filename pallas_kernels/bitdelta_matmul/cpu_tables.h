// Products with signs by table: four inputs have 16 sums, looked up by four packed bits at once.
//
// A table's entry is a sum of four inputs with their signs, in steps of one size a row and in 8 bits.
// What rounding leaves of a row is known beforehand: each group of four is off by a step's uniform
// error, so that the whole is off by step sqrt(groups / 12) beside |x|. The step is such that the
// largest sums of eight inputs are 126 steps, since two entries are added in 8 bits. Where the row
// would then be off by more than the error allowed, steps are finer, and those words of 32 inputs
// whose sums are larger have a coarse table as well, in steps 126 times as large: few words, since
// few inputs are that large. A float32 base, which is there to be compared with, has four tables of
// every word. Sums of entries are whole numbers, the same in any order.
//
// (Table look-up for low-bit weights: T-MAC, arXiv:2407.00088.)

#pragma once

#include <algorithm>
#include <vector>

#include "cpu_rows.h"

namespace zen {

constexpr float kError = 0.015f;  // of the delta term, root mean square, over a bfloat16 base
constexpr int kCoarse = 126;      // steps of a table in one of the next coarser
constexpr int64_t kTable = 128;   // bytes of the tables of 32 inputs
constexpr int64_t kFilled = 64;   // inputs whose tables are made at once

// A row's tables and what they belong to.
struct Entry {
  const int8_t* fine;    // [steps, 2, 4, 16]: low and high half of byte k, its 16 sums
  const int8_t* coarse;  // the same of some words
  const int32_t* words;  // which ones, rising
  int64_t count;
  float scale;  // the fine table's step
  int64_t row;
};

// Entries of one variant, one after the other.
struct Group {
  int32_t slot;
  int64_t begin, end;
};

// What is known of a row before its tables are made.
struct Measure {
  float most = 0;     // the largest sum of eight magnitudes
  float squares = 0;  // the sum of all squares
  float total = 0;    // of all magnitudes; not finite where the row is not
};

// How a table is made: in steps of what size, of which of two words, and where it lies.
struct Filling {
  float step, inverse;
  bool has[2];
  int8_t* to;
};

// Where the table of a group of four inputs lies.
inline int64_t table_at(int64_t group) {
  const int64_t step = group / 8, part = group % 8;
  return step * kTable + (part & 1) * 64 + (part >> 1) * 16;
}

// Sums of four inputs with the signs of 16 codes, in this order of additions.
inline void sums_of_four(const float* x, float* sums) {
  for (int code = 0; code < 16; code++)
    sums[code] = ((code & 1 ? x[0] : -x[0]) + (code & 2 ? x[1] : -x[1])) +
                 ((code & 4 ? x[2] : -x[2]) + (code & 8 ? x[3] : -x[3]));
}

// 64 inputs of a row from `i` on; at its end a copy with zeros behind them.
template <typename X>
ZEN_INLINE const X* next_64(const X* x, int64_t i, int64_t inputs, X (&last)[kFilled]) {
  if (i + kFilled <= inputs) return x + i;
  for (int64_t k = 0; k < kFilled; k++) last[k] = i + k < inputs ? x[i + k] : X{};
  return last;
}

// Measures a row. eights: [inputs / 64, rounded up][16], sums of eight magnitudes, each twice.
inline Measure plain_measure(const float* x, int64_t inputs, float* eights) {
  Measure all;
  float total[kLanes] = {}, squares[kLanes] = {}, last[kFilled];
  for (int64_t i = 0; i < inputs; i += kFilled, eights += kLanes) {
    const float* v = next_64(x, i, inputs, last);
    float fours[kLanes];
    for (int64_t g = 0; g < kLanes; g++, v += 4) {
      fours[g] = (std::fabs(v[0]) + std::fabs(v[1])) + (std::fabs(v[2]) + std::fabs(v[3]));
      total[g] += fours[g];
      for (int k = 0; k < 4; k++) squares[g] += v[k] * v[k];
    }
    for (int64_t g = 0; g < kLanes; g++) {
      eights[g] = fours[g] + fours[g ^ 1];
      all.most = std::max(all.most, eights[g]);
    }
  }
  all.squares = across(squares);
  all.total = across(total);
  return all;
}

// The tables of 64 inputs, the coarsest first: each takes what the ones before leave.
inline void plain_fill(const float* x, const Filling* tables, int count) {
  for (int64_t g = 0; g < kLanes; g++) {
    float left[16];
    sums_of_four(x + 4 * g, left);
    for (int d = 0; d < count; d++) {
      const Filling& table = tables[d];
      if (!table.has[g / 8]) continue;
      for (int code = 0; code < 16; code++) {
        const float q = std::nearbyintf(left[code] * table.inverse);
        table.to[table_at(g) + code] = static_cast<int8_t>(q);
        left[code] = std::fma(-table.step, q, left[code]);
      }
    }
  }
}

#if defined(__x86_64__)
#define ZEN_TABLES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")))

// 64 inputs as four registers: input 4 g + k is lane g of register k.
ZEN_TABLES inline void turn_fours(const float* x, __m512 (&to)[4]) {
  const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(2));
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512 c = _mm512_loadu_ps(x + 32), d = _mm512_loadu_ps(x + 48);
  const __m512 ab = _mm512_permutex2var_ps(a, low, b), cd = _mm512_permutex2var_ps(c, low, d);
  const __m512 ef = _mm512_permutex2var_ps(a, high, b), gh = _mm512_permutex2var_ps(c, high, d);
  to[0] = _mm512_shuffle_f32x4(ab, cd, 0x44);
  to[1] = _mm512_shuffle_f32x4(ab, cd, 0xEE);
  to[2] = _mm512_shuffle_f32x4(ef, gh, 0x44);
  to[3] = _mm512_shuffle_f32x4(ef, gh, 0xEE);
}
ZEN_TABLES inline void turn_fours(const uint16_t* x, __m512 (&to)[4]) {
  const __m512i even =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512i upper = _mm512_set1_epi32(0xFFFF0000);
  const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32);
  const __m512i first = _mm512_permutex2var_epi32(a, even, b);
  const __m512i second = _mm512_permutex2var_epi32(a, odd, b);
  to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
  to[1] = _mm512_castsi512_ps(_mm512_and_si512(first, upper));
  to[2] = _mm512_castsi512_ps(_mm512_slli_epi32(second, 16));
  to[3] = _mm512_castsi512_ps(_mm512_and_si512(second, upper));
}

template <typename X>
ZEN_TABLES Measure avx512_measure(const X* x, int64_t inputs, float* eights) {
  __m512 total = _mm512_setzero_ps(), squares = total, most = total;
  X last[kFilled];
  for (int64_t i = 0; i < inputs; i += kFilled, eights += kLanes) {
    __m512 v[4], size[4];
    turn_fours(next_64(x, i, inputs, last), v);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      size[k] = _mm512_abs_ps(v[k]);
      squares = _mm512_add_ps(squares, _mm512_mul_ps(v[k], v[k]));
    }
    const __m512 four = _mm512_add_ps(_mm512_add_ps(size[0], size[1]), _mm512_add_ps(size[2], size[3]));
    const __m512 eight = _mm512_add_ps(four, _mm512_permute_ps(four, 0xB1));
    total = _mm512_add_ps(total, four);
    most = _mm512_max_ps(most, eight);
    _mm512_storeu_ps(eights, eight);
  }
  float lanes[2][kLanes];
  _mm512_storeu_ps(lanes[0], total);
  _mm512_storeu_ps(lanes[1], squares);
  return {_mm512_reduce_max_ps(most), across(lanes[1]), across(lanes[0])};
}

// Of the 16 codes of a group the sums of 0 to 7; 15 - c has the opposite of c's. Code 0 has its
// opposite here.
ZEN_TABLES inline void half_of_sums(const __m512 (&x)[4], __m512 (&sums)[8]) {
  const __m512 p = _mm512_add_ps(x[0], x[1]), m = _mm512_sub_ps(x[0], x[1]);
  const __m512 n = _mm512_add_ps(x[2], x[3]), k = _mm512_sub_ps(x[2], x[3]);
  const __m512 minus_m = _mm512_sub_ps(x[1], x[0]);
  sums[0] = _mm512_add_ps(p, n);
  sums[1] = _mm512_sub_ps(m, n);
  sums[2] = _mm512_sub_ps(minus_m, n);
  sums[3] = _mm512_sub_ps(p, n);
  sums[4] = _mm512_sub_ps(k, p);
  sums[5] = _mm512_add_ps(m, k);
  sums[6] = _mm512_add_ps(minus_m, k);
  sums[7] = _mm512_add_ps(p, k);
}

// Where the bytes of a table lie in two registers of packed sums, and which are opposites.
struct Packing {
  alignas(64) uint8_t from[2][64];  // of a word's even groups and of its odd ones
  uint64_t minus;

  Packing() : minus(0) {
    for (int b = 0; b < 64; b++) {
      const int code = b % 16, half = code < 8 ? code : 15 - code;
      if ((code >= 8) != (half == 0)) minus |= uint64_t{1} << b;
      for (int odd = 0; odd < 2; odd++) {
        const int part = 2 * (b / 16) + odd;
        from[odd][b] = half / 4 * 64 + part / 4 * 16 + half % 4 * 4 + part % 4;
      }
    }
  }
};

ZEN_TABLES inline void avx512_pack(const __m512i (&q)[8], const Filling& table) {
  static const Packing packing;
  const __m512i a = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
  const __m512i b = _mm512_packs_epi16(_mm512_packs_epi32(q[4], q[5]), _mm512_packs_epi32(q[6], q[7]));
#pragma GCC unroll 2
  for (int word = 0; word < 2; word++)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      __m512i from = _mm512_load_si512(packing.from[odd]);
      if (word) from = _mm512_or_si512(from, _mm512_set1_epi8(32));
      __m512i t = _mm512_permutex2var_epi8(a, from, b);
      t = _mm512_mask_sub_epi8(t, packing.minus, _mm512_setzero_si512(), t);
      _mm512_store_si512(table.to + word * kTable + odd * 64, t);
    }
}

ZEN_TABLES inline void avx512_fill(const __m512 (&x)[4], const Filling* tables, int count) {
  __m512 left[8];
  half_of_sums(x, left);
  for (int d = 0; d < count; d++) {
    const Filling& table = tables[d];
    const __mmask16 has = (table.has[0] ? 0xFF : 0) | (table.has[1] ? 0xFF00 : 0);
    const __m512 inverse = _mm512_set1_ps(table.inverse), step = _mm512_set1_ps(-table.step);
    __m512i q[8];
#pragma GCC unroll 8
    for (int c = 0; c < 8; c++) {
      q[c] = _mm512_maskz_cvtps_epi32(has, _mm512_mul_ps(left[c], inverse));
      if (d + 1 < count) left[c] = _mm512_fmadd_ps(step, _mm512_cvtepi32_ps(q[c]), left[c]);
    }
    avx512_pack(q, table);
  }
}
#endif

// All rows' tables, grouped by variant; rows of the base have none.
class Tables {
 public:
  // fill(i) has to be called once for every i below rows(), in any order, before tables are used.
  // wanted: says of a slot whether its rows need tables.
  template <typename Wanted>
  Tables(const Problem& p, bool avx512, Scratch& scratch, const Wanted& wanted)
      : p_(p), avx512_(avx512), entries_a_row_(p.w_bf16 ? 1 : 2) {
    for (int64_t r = 0; r < p.rows; r++)
      if (p.slot(r) >= 0 && wanted(p.slot(r))) order_.push_back(r);
    std::stable_sort(order_.begin(), order_.end(),
                     [&p](int64_t a, int64_t b) { return p.slot(a) < p.slot(b); });
    bytes_ = (p.steps() + 1) / 2 * 2 * kTable;
    // Fine tables one behind the other, as they are read, and not a power of two apart.
    const int64_t count = rows() * entries_a_row_, each = bytes_ + kTable, list = (p.steps() + 15) / 16 * 16;
    entries_.resize(count);
    int8_t* fine = scratch.get<int8_t>(count * (2 * each + 4 * list));
    int8_t* coarse = fine + count * each;
    auto* words = reinterpret_cast<int32_t*>(coarse + count * each);
    for (int64_t at = 0; at < count; at++) {
      const int64_t row = order_[at / entries_a_row_];
      entries_[at] = {fine + at * each, coarse + at * each, words + at * list, 0, 0, row};
      if (groups_.empty() || groups_.back().slot != p.slot(row)) groups_.push_back({p.slot(row), at, at});
      groups_.back().end = at + 1;
    }
  }

  int64_t rows() const { return static_cast<int64_t>(order_.size()); }
  const std::vector<Group>& groups() const { return groups_; }
  const Entry* entries() const { return entries_.data(); }

  void fill(int64_t i) {
    Entry* entries = entries_.data() + i * entries_a_row_;
#if defined(__x86_64__)
    if (avx512_ && p_.x16) return wide_row(entries, p_.x16 + order_[i] * p_.inputs);
    if (avx512_) return wide_row(entries, p_.x + order_[i] * p_.inputs);
#endif
    plain_row(entries, p_.x + order_[i] * p_.inputs);
  }

 private:
  // Which words of a row have coarse tables, and the room to find it out.
  struct Listed {
    std::vector<float> eights;
    std::vector<char> words;
    explicit Listed(int64_t steps) : eights((steps + 1) / 2 * kLanes), words(steps + 1) {}
  };

  void plain_row(Entry* entries, const float* x) const {
    Listed listed(p_.steps());
    if (!choose(entries, plain_measure(x, p_.inputs, listed.eights.data()), listed)) return;
    float last[kFilled];
    for (int64_t i = 0; i < p_.inputs; i += kFilled) {
      Filling tables[4];
      const int count = fillings(entries, listed, i / kStep, tables);
      plain_fill(next_64(x, i, p_.inputs, last), tables, count);
    }
  }
#if defined(__x86_64__)
  template <typename X>
  ZEN_TABLES void wide_row(Entry* entries, const X* x) const {
    thread_local Listed listed(0);
    if (listed.words.size() != static_cast<size_t>(p_.steps() + 1)) listed = Listed(p_.steps());
    if (!choose(entries, avx512_measure(x, p_.inputs, listed.eights.data()), listed)) return;
    X last[kFilled];
    for (int64_t i = 0; i < p_.inputs; i += kFilled) {
      Filling tables[4];
      const int count = fillings(entries, listed, i / kStep, tables);
      __m512 fours[4];
      turn_fours(next_64(x, i, p_.inputs, last), fours);
      avx512_fill(fours, tables, count);
    }
  }
#endif

  // The tables of two words, the coarsest first.
  ZEN_INLINE int fillings(const Entry* entries, const Listed& listed, int64_t word, Filling* tables) const {
    int count = 0;
    for (int e = 0; e < entries_a_row_; e++) {
      const Entry& entry = entries[e];
      const bool first = listed.words[word], second = listed.words[word + 1];
      int8_t* coarse = const_cast<int8_t*>(entry.coarse) + word * kTable;
      int8_t* fine = const_cast<int8_t*>(entry.fine) + word * kTable;
      const float step = entry.scale * kCoarse;
      if (first || second) tables[count++] = {step, 1 / step, {first, second}, coarse};
      tables[count++] = {entry.scale, 1 / entry.scale, {true, true}, fine};
    }
    return count;
  }

  // Sets the scales of a row's entries and lists the words that have coarse tables; false where there
  // is nothing to fill. A row that is not finite has no product: the base's is not finite either.
  bool choose(Entry* entries, const Measure& all, Listed& listed) const {
    const bool finite = std::isfinite(all.total);
    for (int e = 0; e < entries_a_row_; e++) entries[e].count = 0;
    std::fill(listed.words.begin(), listed.words.end(), 0);
    if (!finite || all.most < 1e-30f) {
      for (int e = 0; e < entries_a_row_; e++) {
        std::memset(const_cast<int8_t*>(entries[e].fine), 0, bytes_);
        entries[e].scale = finite ? 0.0f : NAN;
      }
      return false;
    }
    if (!p_.w_bf16) {  // every word has all tables
      constexpr float kSquare = kCoarse * kCoarse;
      entries[1].scale = std::max(all.most / (kSquare * kSquare), 1e-36f);
      entries[0].scale = entries[1].scale * kSquare;
      list(entries, listed, -1);
      return true;
    }
    const float reach = kCoarse * kError * std::sqrt(12 * all.squares / (p_.inputs / 4 + 1));
    float fine = all.most;  // the largest sum that the fine table has
    if (!(fine <= reach)) {
      fine /= kCoarse;
      for (const float eight : listed.eights)
        if (eight <= reach) fine = std::max(fine, eight);
      list(entries, listed, fine);
    }
    entries[0].scale = fine / kCoarse;
    return true;
  }

  // Lists the words with sums of eight inputs above `fine`.
  void list(Entry* entries, Listed& listed, float fine) const {
    for (int64_t w = 0; w < p_.steps(); w++) {
      const float* eights = listed.eights.data() + w * 8;
      listed.words[w] = *std::max_element(eights, eights + 8) > fine;
      for (int e = 0; listed.words[w] && e < entries_a_row_; e++)
        const_cast<int32_t*>(entries[e].words)[entries[e].count++] = static_cast<int32_t>(w);
    }
  }

  const Problem& p_;
  bool avx512_;
  int entries_a_row_;
  int64_t bytes_;
  std::vector<int64_t> order_;
  std::vector<Entry> entries_;
  std::vector<Group> groups_;
};

}  // namespace zen
